"""Which exceptions end a program, and what is noted of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ddpcore.probe.process_facts import _write_error, uncaught
from ddpcore.probe.stack import CodeRoots
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from pathlib import Path

ROOTS = CodeRoots(torch=("/torch/",), ddpcore=("/ddpcore/",), libraries=("/usr/",))
HEAD = """
import os, sys, threading
from ddpcore.probe.stack import CodeRoots
from ddpcore.probe.process_facts import record_uncaught_errors
noted = []
record_uncaught_errors(CodeRoots((), (), ()), noted.append)
import atexit
atexit.register(lambda: print(noted[0].text, noted[0].place and noted[0].place.line) if noted else print("nothing"))
def fail():
    raise ValueError("boom")
"""
FIRST_LINE = len(HEAD.splitlines()) + 1


def ended(tmp_path: Path, program: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(HEAD + program)
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    argv = [sys.executable, str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environ)
    return done.stdout.strip()


def test_an_error_file_holds_what_torchrun_reads_and_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    first, second = ValueError("boom"), ValueError("later")

    _write_error(str(path), ValueError, first, None)
    with contextlib.suppress(FileExistsError):
        _write_error(str(path), ValueError, second, None)

    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == "ValueError: boom\n"
    assert message["extraInfo"]["timestamp"].isdigit()


@pytest.mark.parametrize(
    "program",
    [
        "fail()",
        "try:\n    fail()\nfinally:\n    print(end='')",
        "def log(*error):\n    before(*error)\nbefore, sys.excepthook = sys.excepthook, log\nfail()",
        "try:\n    fail()\nexcept ValueError as error:\n    raise KeyError('shard') from error",
    ],
    ids=["plain", "finally", "a hook of its own", "a chain"],
)
def test_the_exception_that_nobody_catches_ends_the_program(tmp_path: Path, program: str) -> None:
    assert ended(tmp_path, program) == f"ValueError: boom {FIRST_LINE - 1}"
    assert "boom" in (tmp_path / "error.json").read_text()


def test_ctrl_c_ends_the_program_too(tmp_path: Path) -> None:
    assert ended(tmp_path, "raise KeyboardInterrupt") == f"KeyboardInterrupt {FIRST_LINE}"


@pytest.mark.parametrize(
    "program",
    [
        "try:\n    fail()\nexcept ValueError:\n    pass",
        "try:\n    fail()\nexcept ValueError:\n    sys.excepthook(*sys.exc_info())",
        "thread = threading.Thread(target=fail)\nthread.start()\nthread.join()",
        "threading.Thread(target=fail, daemon=True).start()",
        (
            "def run():\n    try:\n        fail()\n    except ValueError:\n        sys.excepthook(*sys.exc_info())\n"
            "thread = threading.Thread(target=run)\nthread.start()\nthread.join()"
        ),
        "sys.exit(3)",
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        "if not os.fork():\n    fail()\nos.wait()",
    ],
    ids=["caught", "printed", "thread", "daemon", "printed by a thread", "exit", "caught exit", "a forked child's"],
)
def test_other_exceptions_end_no_program(tmp_path: Path, program: str) -> None:
    assert set(ended(tmp_path, program).splitlines()) == {"nothing"}
    assert not (tmp_path / "error.json").exists(), "torchrun takes the rank with the earliest file as the first to fail"


EXITS = """
import os, sys, threading
from ddpcore.probe import process_facts
from ddpcore.probe.stack import CodeRoots
ROOTS = CodeRoots((), (os.path.dirname(process_facts.__file__),), (os.path.dirname(os.__file__),))
def print_place(exited):
    print(exited.place.line, exited.place.function, repr(exited.text), flush=True)
process_facts.record_exits(ROOTS, print_place)
def leave(status):
    sys.exit(status)
"""


@pytest.mark.parametrize(
    ("program", "printed", "code"),
    [
        ("leave(3)", ["10 leave ''"], 3),
        ("leave('no data')", ["10 leave ''"], 1),
        ("from sys import exit\nexit(True)", ["12 <module> ''"], 1),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])", ["12 <module> ''"], 2),
        ("try:\n    leave(3)\nexcept SystemExit:\n    sys.exit(4)", ["14 <module> ''"], 4),
        ("leave(0)", [], 0),
        ("leave(None)", [], 0),
        ("leave(False)", [], 0),
        ("try:\n    leave(3)\nexcept SystemExit:\n    raise ValueError", [], 1),
        ("thread = threading.Thread(target=leave, args=(3,))\nthread.start()\nthread.join()", [], 0),
        ("if not os.fork():\n    leave(3)\nos.wait()", [], 0),
    ],
)
def test_the_line_that_exits_with_an_error_is_noted(
    tmp_path: Path, program: str, printed: list[str], code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXITS + program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines(), done.returncode) == (printed, code)


CHILD = """
import multiprocessing, sys
from ddpcore.probe.stack import CodeRoots
from ddpcore.probe.process_facts import record_uncaught_errors
def boom():
    raise ValueError("boom")
def kept(code):
    try:  # as torch.multiprocessing.spawn does
        boom()
    except Exception:
        sys.exit(code)
def run(body):
    record_uncaught_errors(CodeRoots((), (), ()), lambda one: print(one.text, one.place.line, flush=True))
    eval(body)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=run, args=(sys.argv[2],))
    child.start()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("boom()", ["ValueError: boom 6", "1"]),
        ("kept(1)", ["ValueError: boom 6", "1"]),
        ("kept(0)", ["0"]),
        ("sys.exit(3)", ["3"]),
        ("None", ["0"]),
    ],
)
def test_in_a_process_of_multiprocessing_it_is_noted_too(
    tmp_path: Path, method: str, body: str, printed: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHILD)
    argv = [sys.executable, str(script), method, body]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == printed


LATE = """
import os, signal, sys
from ddpcore.probe.stack import CodeRoots
from ddpcore.probe.process_facts import record_uncaught_errors
def note(uncaught):
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", uncaught.text)
    sys.stdout.flush()
record_uncaught_errors(CodeRoots((), (), ()), note)
"""


@pytest.mark.parametrize(
    ("before", "printed", "code"),
    [
        ("", ["noted ValueError: boom"], -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: print('its own'))", ["its own", "noted ValueError: boom"], 1),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", ["noted ValueError: boom"], 1),
    ],
    ids=["default", "a handler of its own", "ignored"],
)
def test_sigterm_waits_until_the_exception_is_noted(tmp_path: Path, before: str, printed: list[str], code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{LATE}{before}\nraise ValueError('boom')")

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.splitlines(), done.returncode) == (printed, code)


def test_words_are_those_of_a_traceback_and_bounded() -> None:
    assert uncaught(ValueError("one\ntwo"), ROOTS).text == "ValueError: one\ntwo", "NCCL's reason is its last line"
    assert uncaught(json.JSONDecodeError("bad", "x", 0), ROOTS).text.startswith("json.decoder.JSONDecodeError: bad")
    message = "Caught it in worker 1.\nOriginal Traceback (most recent call last):\n  File\nKeyError: 'caption'\n"
    assert uncaught(RuntimeError(message), ROOTS).text == "KeyError: 'caption'"
    assert uncaught(ValueError(), ROOTS).text == "ValueError"
    assert len(uncaught(ValueError("x" * 5000), ROOTS).text) == 1024
    assert uncaught(OSError("\udcff"), ROOTS).text == "OSError: ?"


def test_it_is_noted_in_what_phase_the_program_ends() -> None:
    library: dict[str, Any] = {}
    code = "def _engine_run_backward():\n    raise RuntimeError('Connection closed by peer')"
    exec(compile(code, "/torch/autograd/graph.py", "exec"), library)

    with pytest.raises(RuntimeError) as raised:
        library["_engine_run_backward"]()

    assert uncaught(raised.value, ROOTS).phase is Phase.BACKWARD
    assert uncaught(RuntimeError("elsewhere"), ROOTS).phase is Phase.OTHER


def test_a_circle_of_exceptions_has_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one

    assert uncaught(one, ROOTS).text in {"ValueError: one", "ValueError: other"}
