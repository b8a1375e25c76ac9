"""What holds for every test: nothing leaks, and waiting means waiting for a condition."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings

from tests.support.warm_ranks import template_pid

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

pytest_plugins = [
    "tests.support.compiled",
    "tests.support.durations",
    "tests.support.long_tests",
    "tests.support.order",
    "tests.support.second_run",
]

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Every TCPStore connection looks up names, which stalls for 5 s and more where a machine's name server does not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A person's own settings must not decide what a test sees; those that have settings name a directory of their own.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
# Nor the size of the terminal that tests are started in, which several at once are told: each terminal has its own.
for _variable in ("NO_COLOR", "RANKDECK_ASCII", "RANKDECK_THEME", "COLUMNS", "LINES"):
    os.environ.pop(_variable, None)

# The tests start thousands of Python processes: each would compile our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in its background with Ctrl-C ignored, nohup with SIGHUP, and every program of a test would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LEAK_GRACE_S = 30.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage seldom while a million objects that stay are made, and never look at those again."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    result = yield
    gc.set_threshold(*usual)
    gc.freeze()
    return result


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or a file descriptor of its own behind."""
    processes_before = _children()
    threads_before = set(threading.enumerate())

    yield

    left = [child for child in _children() if child not in processes_before]
    _, alive = psutil.wait_procs(left, timeout=LEAK_GRACE_S)
    assert [_describe(child) for child in alive] == [], "child processes left behind"
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(LEAK_GRACE_S)
        assert not thread.is_alive(), f"thread left behind: {thread.name}"


def _children() -> set[psutil.Process]:
    """Return what runs below this process. Most tests start nothing, and need no look at every process there is."""
    template = template_pid()
    try:
        own = {
            pid
            for thread in Path("/proc/self/task").iterdir()
            for pid in thread.joinpath("children").read_text().split()
        }
        is_alone = own <= {str(template)} and not (
            own and Path(f"/proc/{template}/task/{template}/children").read_text()
        )
    except OSError:  # a thread has just ended, or this kernel does not keep the list
        is_alone = False
    if is_alone:
        return set()
    return {child for child in psutil.Process().children(recursive=True) if child.pid != template}


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
