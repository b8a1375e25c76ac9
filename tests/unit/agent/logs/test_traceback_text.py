"""What is read from tracebacks: most of them are printed by a real interpreter here, so that they are as they are."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agent.logs.traceback_text import MAX_MESSAGE_LINES, failure_in, shortened
from agent.wire.logs import LOST_PEER, MAX_TRACEBACK_BYTES
from ddpcore.wire import Place

if TYPE_CHECKING:
    from pathlib import Path

    from agent.logs.traceback_text import FailureText

UNCAUGHT = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 3, in main
[rank1]:     loss.backward()
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 600, in backward
[rank1]:     torch.autograd.backward(
[rank1]: RuntimeError: Connection closed by peer
"""
ABORT = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4
Fatal Python error: Aborted

Thread 0x00007f5d31a00640 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/other.py", line 1 in watch

Current thread 0x00007f5d31c00740 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/home/me/train.py", line 8 in step
  File "/home/me/train.py", line 20 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 20)
"""
IN_GLOO = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at ../gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4
Fatal Python error: Aborted

Thread 0x00007f5d2b7fe6c0 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/other.py", line 1 in watch
  File "/venv/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f5d31c00740 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 8 in step
  File "/home/me/train.py", line 20 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 20)
"""
"""As torch 2.13 and Python 3.11 print it: the thread that aborts is gloo's own, so that none is the current one."""
SAVES = """
Thread 0x00007f5d2b7fe6c0 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_gather
  File "/home/me/saving.py", line 5 in save
  File "/venv/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f5d31c00740 (most recent call first):
  File "/home/me/train.py", line 9 in step
  File "/home/me/train.py", line 20 in <module>
"""
IN_ALL_REDUCE = IN_GLOO.splitlines(keepends=True)[-5]
IN_BACKWARD = '  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 824 in _engine_run_backward\n'
STEP = Place("/home/me/train.py", 8, "step")
NCCL_ABORT = "terminate called after throwing an instance of 'c10::DistBackendError'\nFatal Python error: Aborted\n"
GLOO = IN_GLOO[: IN_GLOO.index("\nThread")]
RICH = """╭────────────── Traceback (most recent call last) ──────────────╮
│ /home/me/train.py:12 in <module>                              │
│                                                               │
│ ❱ 12 main()                                                   │
╰───────────────────────────────────────────────────────────────╯
ValueError: told by rich
"""
NCCL = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 3, in main
[rank1]:     dist.init_process_group("nccl")
[rank1]: DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
[rank1]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank1]: Last error:
[rank1]: {}
[rank1]:[W1126 03:18:50.970109080 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called
"""
TEARDOWN = "terminate called without an active exception\nFatal Python error: Aborted\n"


def run(tmp_path: Path, program: str) -> FailureText | None:
    path = tmp_path / "train.py"
    path.write_text(program)
    (tmp_path / "broken.py").write_text("x = (\n")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False, errors="replace"
    )
    return failure_in(done.stderr)


@pytest.mark.parametrize(
    ("program", "exception", "outer", "where"),
    [
        ("def f():\n    raise ValueError('boom')\nf()", "ValueError: boom", "", "train.py:2 in f"),
        (
            "try:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('wrapped') from e",
            "KeyError: 'k'",
            "RuntimeError: wrapped",
            "train.py:2 in <module>",
        ),
        (
            "def f():\n    return 1 / 0\ntry:\n    f()\nexcept ZeroDivisionError:\n    [].x",
            "ZeroDivisionError: division by zero",
            "AttributeError: 'list' object has no attribute 'x'",
            "train.py:2 in f",
        ),
        ("def f(:\n   pass", "SyntaxError: invalid syntax", "", "train.py:1"),
        ("import broken", "SyntaxError: '(' was never closed", "", "broken.py:1"),
        (
            (
                "def a():\n    raise ValueError('first')\ntry:\n    a()\nexcept Exception as e:\n"
                "    raise ExceptionGroup('eg', [e, TypeError('never raised')])"
            ),
            "ValueError: first",
            "ExceptionGroup: eg (2 sub-exceptions)",
            "train.py:2 in a",
        ),
        (
            "raise ExceptionGroup('eg', [ExceptionGroup('inner', [TypeError('never raised')]), ValueError(2)])",
            "TypeError: never raised",
            "ExceptionGroup: eg (2 sub-exceptions)",
            "train.py:1 in <module>",
        ),
        (
            (
                "try:\n    raise ExceptionGroup('eg', [ValueError('one'), TypeError(2)])\n"
                "except* ValueError as e:\n    raise RuntimeError('outer') from e"
            ),
            "ValueError: one",
            "ExceptionGroup:  (2 sub-exceptions)",
            "train.py:2 in <module>",
        ),
        (
            "import faulthandler, os\nfaulthandler.enable()\ndef f():\n    os.abort()\nf()",
            "Fatal Python error: Aborted",
            "",
            "train.py:4 in f",
        ),
        (
            (
                "import traceback\ntry:\n    1/0\nexcept Exception: traceback.print_exc()\n"
                "import sys\nprint('INFO: going on', file=sys.stderr)\nraise ValueError('later')"
            ),
            "ValueError: later",
            "",
            "train.py:7 in <module>",
        ),
        (
            "class A:\n    def __del__(self):\n        raise KeyError('in del')\na = A()\nraise ValueError('real')",
            "ValueError: real",
            "",
            "train.py:5 in <module>",
        ),
        ("raise ValueError('\\nline two\\n\\nline four')", "ValueError: line two", "", "train.py:1 in <module>"),
        ("e = ValueError('x')\ne.add_note('a note')\nraise e", "ValueError: x", "", "train.py:3 in <module>"),
        (
            "class Odd(Exception): pass\ndef f():\n    class In(Odd): pass\n    raise In\nf()",
            "f.<locals>.In",
            "",
            "train.py:4 in f",
        ),
        (
            (
                "from concurrent.futures import ProcessPoolExecutor\ndef g(x): raise ValueError('in pool')\n"
                "if __name__ == '__main__':\n    with ProcessPoolExecutor(1) as p: list(p.map(g, [1]))"
            ),
            "ValueError: in pool",
            "",
            "train.py:2 in g",
        ),
        pytest.param(
            (
                "import torch.multiprocessing as mp\ndef g(i): raise ValueError('in spawned')\n"
                "if __name__ == '__main__': mp.spawn(g, nprocs=1)"
            ),
            "ValueError: in spawned",
            "torch.multiprocessing.spawn.ProcessRaisedException:",
            "train.py:2 in g",
            marks=pytest.mark.slow,  # it imports torch twice
        ),
        (
            (
                "from torch.utils.data import DataLoader\nclass D:\n    def __len__(self): return 4\n"
                "    def __getitem__(self, i): raise ValueError('bad sample')\n"
                "if __name__ == '__main__': list(DataLoader(D(), num_workers=1))"
            ),
            "ValueError: bad sample",
            "ValueError: Caught ValueError in DataLoader worker process 0.",
            "train.py:4 in __getitem__",
        ),
    ],
)
def test_the_first_exception_of_what_python_prints_is_told(
    tmp_path: Path, program: str, exception: str, outer: str, where: str
) -> None:
    found = run(tmp_path, program)
    assert found is not None
    assert (found.exception, found.outer, found.where) == (exception, outer, where)
    assert exception.partition(":")[0] in found.traceback


@pytest.mark.parametrize("program", ["import sys; sys.exit(3)", "import sys; print('all is well', file=sys.stderr)"])
def test_who_ends_without_an_exception_names_none(tmp_path: Path, program: str) -> None:
    assert run(tmp_path, program) is None


@pytest.mark.parametrize(
    ("text", "exception", "where"),
    [
        (UNCAUGHT, "RuntimeError: Connection closed by peer", "train.py:3 in main"),
        (
            ABORT,
            (
                "gloo::EnforceNotMet: [enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <="
                " op.nbytes. 8 vs 4"
            ),
            "train.py:8 in step",
        ),
        (RICH, "ValueError: told by rich", "train.py:12 in <module>"),
        (NCCL.format("Duplicate GPU"), "DistBackendError: NCCL invalid usage: Duplicate GPU", "train.py:3 in main"),
        (NCCL.format(""), "DistBackendError: NCCL invalid usage", "train.py:3 in main"),
        (UNCAUGHT + TEARDOWN, "RuntimeError: Connection closed by peer", "train.py:3 in main"),
        (
            UNCAUGHT + UNCAUGHT.replace("[rank1]: ", "").replace("Runtime", "AtExit"),
            "RuntimeError: Connection closed by peer",
            "train.py:3 in main",
        ),
        ("  what():  alone", "alone", ""),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault", ""),
        (
            "\x1b[31mTraceback (most recent call last):\x1b[0m\n\x1b[1mKeyError\x1b[0m: \x1b[35m3\x1b[0m\n",
            "KeyError: 3",
            "",
        ),
        ("Traceback (most recent call last):\n  File\n\nKeyboardInterrupt\nmore\n", "KeyboardInterrupt", ""),
        (
            'Traceback (most recent call last):\n  File "/v/lib/python3.11/site-packages/x.py", line 3, in f\nKeyError',
            "KeyError",
            "x.py:3 in f",
        ),
        ("Traceback (most recent call last):\nnoise of another thread, unasked\nKeyError: 'k'\n", "KeyError: 'k'", ""),
    ],
)
def test_the_texts_of_torch_gloo_and_others_are_read(text: str, exception: str, where: str) -> None:
    found = failure_in(text)
    assert found is not None
    assert (found.exception, found.where) == (exception, where)


@pytest.mark.parametrize("text", ["", "fine\nso far\n", "Traceback (most recent call last):\n  cut", TEARDOWN[:45]])
def test_what_names_no_exception_is_none(text: str) -> None:
    assert failure_in(text) is None


def test_a_traceback_that_another_process_wrote_into_says_what_is_whole() -> None:
    header = "Traceback (most recent call last):"

    found = failure_in(f"{header}\nOriginal {header}\nOriginal {header}\nKeyError: 3")

    assert found is not None
    assert found.exception == "KeyError: 3"


@pytest.mark.parametrize("kind", ["MasterFailedError", "RankFailedError"])
def test_what_another_rank_died_of_is_not_what_this_one_says(kind: str) -> None:
    told = f"""Traceback (most recent call last):
  File "/home/me/train.py", line 7, in main
    with ddpcore.master_first("corpus"):
ddpcore.errors.{kind}: rank 0 failed in first 'corpus': FileNotFoundError: no corpus here
on rank 0:
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    raise FileNotFoundError("no corpus here")
FileNotFoundError: no corpus here
"""
    for text in (told, "".join(f"[rank1]: {line}\n" for line in told.splitlines())):
        found = failure_in(text)
        assert found is not None
        assert found.exception.startswith(f"ddpcore.errors.{kind}: rank 0 failed")
        assert LOST_PEER.search(found.exception)


def test_the_prefix_of_torch_is_not_in_the_text_and_no_escape_is() -> None:
    found = failure_in(UNCAUGHT.replace("loss.", "\x1b]52;c;x\x07loss."))
    assert found is not None
    assert "[rank1]" not in found.traceback
    assert "\x1b" not in found.traceback
    assert "\ufffd]52;c;x\ufffdloss.backward()" in found.traceback


PROBE = """Fatal Python error: Segmentation fault

Current thread 0x00007f5d2b7fe6c0 (most recent call first):
  File "/venv/lib/python3.11/site-packages/ddpcore/probe/stack.py", line 319 in read
  File "/venv/lib/python3.11/site-packages/ddpcore/probe/probe.py", line 266 in _run
  File "/venv/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f5d31c00740 (most recent call first):
  File "/home/me/train.py", line 8 in step
  File "/home/me/train.py", line 20 in <module>
"""


def test_a_crash_in_the_probe_is_not_the_program_s() -> None:
    found = failure_in(PROBE, 11)
    assert found is not None
    assert found.exception == "Fatal Python error: Segmentation fault, in a thread of rankdeck's probe"
    assert (found.outer, found.place) == ("", None)
    program = PROBE.replace("/venv/lib/python3.11/threading.py", "/home/me/train.py")
    below_a_wrapper = failure_in(program, 11)
    assert below_a_wrapper is not None
    assert below_a_wrapper.exception == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    ("text", "signal", "place"),
    [
        (IN_GLOO, 6, Place("/home/me/train.py", 8, "step")),
        (ABORT, 6, Place("/home/me/train.py", 8, "step")),
        (ABORT.replace("Aborted", "Segmentation fault"), 11, Place("/home/me/train.py", 8, "step")),
        (IN_GLOO, 9, None),
        (IN_GLOO, None, None),
        (GLOO + SAVES, 6, Place("/home/me/saving.py", 5, "save")),
        ("Fatal Python error: Aborted\n" + SAVES, 6, Place("/home/me/train.py", 9, "step")),
        (NCCL_ABORT + IN_GLOO.partition("\n\n")[2].partition("\n\n")[0], 6, None),
        (NCCL_ABORT + SAVES.replace("distributed", "utils"), 6, Place("/home/me/train.py", 9, "step")),
        (GLOO + SAVES.replace("distributed", "utils"), 6, None),
        (GLOO + SAVES + SAVES, 6, None),
        (GLOO + SAVES.replace('  File "/home/me/train', IN_BACKWARD + '  File "/home/me/train', 1), 6, None),
        (GLOO + IN_GLOO[IN_GLOO.index("\nThread") :].replace(IN_ALL_REDUCE, IN_BACKWARD), 6, STEP),
        (GLOO, 6, None),
        (GLOO + "Thread 0x00007f (most recent call first):\n  <no Python frame>\n", 6, None),
        (GLOO + "Thread 0x00007f (most recent call first):\n" + ABORT.splitlines()[-5], 6, None),
        (IN_GLOO.replace("line 8 in", f"line {'8' * 5000} in"), 6, None),
        (IN_GLOO.replace("train.py", "t" * 5000 + ".py"), 6, None),
        (UNCAUGHT, 6, None),
    ],
    ids=[
        "in a thread of gloo",
        "in the current thread",
        "of another signal",
        "killed later",
        "an exit code",
        "of another thread's collective",
        "of no collective",
        "the main thread is not among them",
        "a call of NCCL that was made before",
        "a call of gloo that was made before",
        "two threads that make calls twice",
        "two threads that make calls",
        "a backward pass",
        "no thread",
        "no frame",
        "no frame of the program",
        "no number of a line",
        "no path",
        "an exception of Python",
    ],
)
def test_the_line_at_which_a_fatal_signal_came_is_that_of_the_thread_that_had_called(
    text: str, signal: int | None, place: Place | None
) -> None:
    found = failure_in(text, signal)
    assert found is not None
    assert found.place == place


def test_a_huge_traceback_keeps_its_head_and_its_tail() -> None:
    lines = [f'  File "/home/me/train.py", line {number}, in f\n    \U0001f600' for number in range(5000)]
    found = failure_in("\n".join(["Traceback (most recent call last):", *lines, "ValueError: " + "x" * 5000]))
    assert found is not None
    assert len(found.exception) == 1024
    assert len(found.traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert found.traceback.startswith("Traceback")
    assert "not all of them are shown" in found.traceback
    assert found.traceback.endswith("x" * 5000)
    assert found.where == "train.py:4999 in f"


def test_a_long_message_is_told_to_a_bound() -> None:
    found = failure_in("Traceback (most recent call last):\nValueError: x\n" + "more\n" * 1000)
    assert found is not None
    assert found.traceback.count("more") == MAX_MESSAGE_LINES
    assert shortened("short", 100) == "short"
