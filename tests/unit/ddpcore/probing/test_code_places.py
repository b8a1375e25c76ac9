"""Looking at another thread's stack is safe, and finds the user's lines."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import torch  # noqa: F401 - its directory is one of the roots

from ddpcore.probing.code_places import caller_line, code_roots, stack_of

if TYPE_CHECKING:
    from ddpcore.probing.samples import StackLine

CHURN = """
import sys, threading, time
from ddpcore.probing.code_places import stack_of

class Garbage:
    def __del__(self):
        for _ in range(100):
            pass

def watch(thread_id, end_s):
    while time.monotonic() < end_s:
        for _ in range(5):
            garbage = Garbage()
            garbage.itself = garbage
        stack_of(thread_id)

sys.setswitchinterval(1e-5)
end_s = time.monotonic() + 1.0
watcher = threading.Thread(target=watch, args=(threading.get_ident(), end_s))
watcher.start()
while time.monotonic() < end_s:
    short = threading.Thread(target=int)
    short.start()
    short.join()
watcher.join()
"""
"""Stops for ever within a second where a collection may run inside `sys._current_frames` (CPython issue 106883)."""


def test_a_watched_process_that_begins_threads_and_collects_garbage_goes_on() -> None:
    subprocess.run([sys.executable, "-c", CHURN], timeout=60, check=True)


def test_a_stack_holds_the_lines_of_another_thread_innermost_first() -> None:
    stopped, let_go = threading.Event(), threading.Event()

    def stand() -> None:
        stopped.set()
        let_go.wait()

    thread = threading.Thread(target=stand)
    thread.start()
    stopped.wait()
    stack = stack_of(thread.ident or 0)
    let_go.set()
    thread.join()

    assert "stand" in [function for _, _, function in stack]
    assert stack_of(thread.ident or 0) == []


def call() -> StackLine:
    return caller_line()


def test_the_caller_s_line_is_the_innermost_that_is_not_ddpcore_s_own() -> None:
    file, line, function = call()

    assert (file, function) == (__file__, "call")
    assert line == call.__code__.co_firstlineno + 1


def test_the_roots_tell_torch_ddpcore_and_libraries_apart() -> None:
    roots = code_roots()

    assert all(root.endswith("/torch/") for root in roots.torch)
    assert all(root.endswith("/ddpcore/") for root in roots.ddpcore)
    assert any("site-packages" in root for root in roots.libraries)
