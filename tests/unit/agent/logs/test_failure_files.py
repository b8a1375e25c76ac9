"""What the files of a failed rank say."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from agent.logs.failure_files import MAX_ERROR_FILE_BYTES, TAIL_BYTES, find_failure, first_failure, last_failure

if TYPE_CHECKING:
    from pathlib import Path

CHAIN = """Traceback (most recent call last):
  File "/home/me/train.py", line 7, in load
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 20, in <module>
    main()
RuntimeError: no data
"""


def error_file(directory: Path, rank: int, content: object) -> Path:
    path = directory / f"rank-{rank}.error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def of_torchelastic(callstack: str, message: str = "RuntimeError: no data") -> object:
    return {"message": {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": "1700000000"}}}


def test_the_error_file_is_believed_before_what_else_was_printed(tmp_path: Path) -> None:
    (tmp_path / "rank-1.stderr.log").write_text("Traceback (most recent call last):\n  x\nKeyError: 'at exit'\n")
    path = error_file(tmp_path, 1, of_torchelastic(CHAIN))
    written_at = path.stat().st_mtime - 100
    os.utime(path, (written_at, written_at))
    found = find_failure(tmp_path, 1)
    assert found is not None
    assert found.text.exception == "FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'"
    assert (found.text.outer, found.text.where) == ("RuntimeError: no data", "train.py:7 in load")
    assert found.text.traceback == CHAIN.rstrip("\n")
    assert found.failed_s is not None
    assert 100 <= time.monotonic() - found.failed_s < 110


@pytest.mark.parametrize(
    ("content", "exception"),
    [
        ({"message": "ValueError: only text\nmore"}, "ValueError: only text"),
        (of_torchelastic("nothing to read", "OSError: x"), "OSError: x"),
        (
            {"message": "E: CUDA out of memory. Tried to allocate 1 B. X"},
            "E: CUDA out of memory. Tried to allocate 1 B",
        ),
        ("{cut by a full di", "KeyError: 'printed'"),
        ("", "KeyError: 'printed'"),
        ("[" * 100_000, "KeyError: 'printed'"),
        ({"message": {"message": "x" * MAX_ERROR_FILE_BYTES}}, "KeyError: 'printed'"),
    ],
)
def test_an_error_file_of_any_kind_does_no_harm(tmp_path: Path, content: object, exception: str) -> None:
    (tmp_path / "rank-0.stderr.log").write_text("Traceback (most recent call last):\n  x\nKeyError: 'printed'\n")
    error_file(tmp_path, 0, content)
    found = find_failure(tmp_path, 0)
    assert found is not None
    assert found.text.exception == exception


def test_without_an_error_file_the_end_of_standard_error_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank-0.stderr.log").write_text("noise\n" * TAIL_BYTES + CHAIN)
    found = find_failure(tmp_path, 0)
    assert found is not None
    assert (found.text.outer, found.failed_s) == ("RuntimeError: no data", None)


@pytest.mark.parametrize("kind", ["nothing", "link", "pipe", "quiet"])
def test_files_that_say_nothing_are_no_failure(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rank-0.stderr.log"
    match kind:
        case "link":
            path.symlink_to(error_file(tmp_path, 9, of_torchelastic(CHAIN)))
        case "pipe":
            os.mkfifo(path)
        case "quiet":
            path.write_text("all is well\n")
    assert find_failure(tmp_path, 0) is None
    assert first_failure(tmp_path, range(2), tmp_path, {}) is None


def test_the_first_of_several_ranks_is_taken_and_the_launcher_last(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("Traceback (most recent call last):\n  x\nOSError: of the launcher\n")
    found = first_failure(tmp_path, range(2), tmp_path, {})
    assert found is not None
    assert (found.rank, found.text.exception) == (-1, "OSError: of the launcher")
    (tmp_path / "rank-0.stderr.log").write_text(CHAIN)
    path = error_file(tmp_path, 1, of_torchelastic(CHAIN))
    error_file(tmp_path, 2, of_torchelastic(CHAIN))
    os.utime(path, (1, 1))
    found = first_failure(tmp_path, range(3), tmp_path, {})
    assert found is not None
    assert found.rank == 1


def test_a_launcher_that_got_sigint_comes_before_the_ranks_that_it_passed_it_on_to(tmp_path: Path) -> None:
    interrupted = "Traceback (most recent call last):\n  x\nKeyboardInterrupt\n"
    (tmp_path / "rank-0.stderr.log").write_text(interrupted)
    found = first_failure(tmp_path, range(2), tmp_path, {})
    assert found is not None
    assert (found.rank, found.text.exception) == (0, "KeyboardInterrupt")
    (tmp_path / "launcher.log").write_text("Traceback (most recent call last):\n  x\napi.SignalException: got 2\n")
    found = first_failure(tmp_path, range(2), tmp_path, {})
    assert found is not None
    assert found.rank == -1
    (tmp_path / "rank-1.stderr.log").write_text(CHAIN)
    for codes, rank in (({}, -1), ({1: -15}, -1), ({1: 1}, 1)):
        found = first_failure(tmp_path, range(2), tmp_path, codes)
        assert found is not None
        assert found.rank == rank, "what the launcher has ended has survived what it printed"


MARKED = "".join(f"[rank0]: {line}\n" for line in CHAIN.splitlines())


@pytest.mark.parametrize(
    ("text", "signal", "outer"),
    [
        (CHAIN, None, "RuntimeError: no data"),
        (CHAIN, 9, None),
        (CHAIN, 11, None),
        (CHAIN, 2, None),
        (CHAIN, 6, "RuntimeError: no data"),
        (MARKED + CHAIN, 9, "RuntimeError: no data"),
        (CHAIN.replace("RuntimeError: no data", "KeyboardInterrupt"), 2, "KeyboardInterrupt"),
        (CHAIN.replace("RuntimeError: no data", "KeyboardInterrupt"), 9, None),
        (CHAIN + "Fatal Python error: Segmentation fault\n", 11, ""),
    ],
)
def test_an_exception_that_a_rank_survived_is_not_what_a_signal_ended_it_of(
    tmp_path: Path, text: str, signal: int | None, outer: str | None
) -> None:
    (tmp_path / "rank-0.stderr.log").write_text(text + "step 7\n")
    found = find_failure(tmp_path, 0, signal)
    assert (found and found.text.outer) == outer
    error_file(tmp_path, 0, of_torchelastic(CHAIN))
    assert find_failure(tmp_path, 0, signal) is not None


def test_a_rank_without_an_exception_has_its_last_line(tmp_path: Path) -> None:
    assert last_failure(tmp_path, 1) is None, "it wrote nothing"
    path = tmp_path / "rank-1.stderr.log"
    path.write_text("step 1\ntrain.py: error: no data\n")
    found = last_failure(tmp_path, 1)
    assert found is not None
    assert (found.rank, found.text.last_line, found.text.exception) == (1, "train.py: error: no data", "")
    assert find_failure(tmp_path, 1) is None, "which is not what it failed of"
    path.write_text("\n")
    assert last_failure(tmp_path, 1) is None
