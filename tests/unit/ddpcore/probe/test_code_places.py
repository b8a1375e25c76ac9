"""Looking at another thread's stack is safe, and finds the user's lines."""

from __future__ import annotations

import gc
import site
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpcore.probe import stack as code_places
from ddpcore.probe.stack import CodeRoots, StackReader, StackWalk, caller_line, code_roots, no_collection, stack_of

if TYPE_CHECKING:
    from pathlib import Path

    from ddpcore.probe.stack import StackLine

CHURN = """
import sys, threading, time
from ddpcore.probe.stack import stack_of

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

DIVE = """
import gc, os, sys, threading, time
from ddpcore.probe.stack import {names}

def dive(depth):
    return dive(depth - 1) if depth else os.stat("/")

def run():
    while True:
        dive(5)
        dive(700)

gc.callbacks.append(lambda *_: time.sleep(0.002))
gc.set_threshold(20)
thread = threading.Thread(target=run, daemon=True)
thread.start()
end_s = time.monotonic() + 2.0
while time.monotonic() < end_s:
    {read}
    garbage = [[] for _ in range(50)]
print(gc.get_threshold()[0], flush=True)
os._exit(0)
"""
"""Python 3.11 dies of a segmentation fault where a collection may let a thread go on whose frames are read."""


def test_a_watched_process_that_begins_threads_and_collects_garbage_goes_on() -> None:
    subprocess.run([sys.executable, "-c", CHURN], timeout=60, check=True)


@pytest.mark.parametrize(
    ("names", "read"),
    [
        ("stack_of", "stack_of(thread.ident)"),
        ("StackWalk, CodeRoots", "StackWalk(CodeRoots((), (), ())).read(thread.ident)"),
        ("all_stacks", "all_stacks(100)"),
    ],
)
def test_a_watched_process_whose_stack_shrinks_amid_a_collection_lives_on(names: str, read: str) -> None:
    argv = [sys.executable, "-c", DIVE.format(names=names, read=read)]
    done = subprocess.run(argv, timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout == "20\n"


def test_collections_go_on_after_stacks_are_read_and_as_the_program_wants_them() -> None:
    before = gc.get_threshold()
    with no_collection, no_collection:
        assert gc.isenabled()
        assert sys.version_info >= (3, 12) or gc.get_threshold()[0] == 0
    assert gc.get_threshold() == before
    with no_collection:
        gc.set_threshold(123)
    assert gc.get_threshold()[0] == 123
    gc.set_threshold(*before)


FORK = """
import gc, os, threading
from ddpcore.probe.stack import no_collection

reading, let_go = threading.Event(), threading.Event()

def read():
    with no_collection:
        reading.set()
        let_go.wait(0.2)

before = gc.get_threshold()[0]
threading.Thread(target=read).start()
reading.wait()
child = os.fork()
if not child:
    os._exit(gc.get_threshold()[0] != before)
let_go.set()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_amid_a_look_collects_its_garbage() -> None:
    subprocess.run([sys.executable, "-c", FORK], timeout=60, check=True)


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


class Standing(torch.nn.Module):
    """A forward in which a thread stands until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.stands, self.let_go = threading.Event(), threading.Event()

    def forward(self) -> None:
        self.stands.set()
        self.let_go.wait()


LIBRARIES = ("/",)
"""Roots under which nothing is the user's."""


@pytest.mark.parametrize(
    "roots",
    [
        code_roots(),
        CodeRoots(torch=(), ddpcore=(), libraries=(), main_file=""),
        CodeRoots(torch=(), ddpcore=(), libraries=LIBRARIES, main_file=__file__),
        CodeRoots(torch=(), ddpcore=(), libraries=LIBRARIES, main_file=""),
    ],
    ids=["as they are", "all is the user's", "a program that is a library", "nothing is the user's"],
)
def test_a_walk_says_what_the_whole_stack_says(roots: CodeRoots) -> None:
    standing = Standing()
    thread = threading.Thread(target=standing)
    thread.start()
    standing.stands.wait()
    thread_id = thread.ident or 0
    try:
        walk, expected = StackWalk(roots), StackReader(roots).read(stack_of(thread_id))
        assert walk.read(thread_id) == expected
        assert walk.read(thread_id) == expected, "of code that has been met"
        assert expected.place is not None
    finally:
        standing.let_go.set()
        thread.join()
    assert walk.read(thread_id) == StackReader(roots).read([])


def test_a_walk_tells_a_line_anew_each_time() -> None:
    walk, own_id = StackWalk(code_roots()), threading.get_ident()

    first = walk.read(own_id).place
    second = walk.read(own_id).place

    assert first is not None
    assert second is not None
    assert (first.file, second.line - first.line) == (__file__, 1)


def test_the_memory_of_code_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_places, "MAX_REMEMBERED_FRAMES", 10)
    walk = StackWalk(code_roots())
    found = []
    for number in range(25):
        names = {"read": walk.read, "own_id": threading.get_ident()}
        exec(compile("place = read(own_id).place", f"/home/me/generated_{number}.py", "exec"), names)
        found.append(names["place"].file)  # type: ignore[attr-defined]

    assert found == [f"/home/me/generated_{number}.py" for number in range(25)]
    assert len(walk._kinds) == len(walk._met) <= 10


def call() -> StackLine:
    return caller_line()


def test_the_caller_s_line_is_the_innermost_that_is_not_ddpcore_s_own() -> None:
    file, line, function = call()

    assert (file, function) == (__file__, "call")
    assert line == call.__code__.co_firstlineno + 1


def test_what_is_installed_outside_this_environment_is_no_user_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian, base, own = tmp_path / "python3/dist-packages", tmp_path / "base/site-packages", tmp_path / "home/project"
    user = tmp_path / "local/lib/site-packages"
    for directory in (own, debian, base):
        monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(site, "USER_SITE", str(user))

    reader = StackReader(code_roots())

    for directory in (debian, base, user):
        assert not reader.is_own(f"{directory}/numpy/linalg.py", "norm")
    assert reader.is_own(f"{own}/train.py", "main")


def test_the_roots_tell_torch_ddpcore_and_libraries_apart() -> None:
    roots = code_roots()

    assert all(root.endswith("/torch/") for root in roots.torch)
    assert all(root.endswith("/ddpcore/") for root in roots.ddpcore)
    assert any("site-packages" in root for root in roots.libraries)


HOLDERS = """
def expression():
    return next(look() for _ in range(1))
class Model:
    def nested(self):
        return next(name for name in [[look() for _ in range(1)][0] for _ in range(1)])
    def dictionary(self):
        return {0: look() for _ in range(1)}[0]
def a_set():
    return {look() for _ in range(1)}.pop()
found = [expression(), Model().nested(), Model().dictionary(), a_set(), next(look() for _ in range(1))]
"""


@pytest.mark.parametrize("how", ["walk", "caller_line"])
def test_a_line_in_a_generator_expression_or_comprehension_is_of_the_function_that_holds_it(how: str) -> None:
    walk = StackWalk(code_roots())
    names: dict[str, Any] = {"look": partial(walk.read, threading.get_ident()) if how == "walk" else caller_line}
    exec(compile(HOLDERS, "/home/me/train.py", "exec"), names)

    found = [one.place.function if how == "walk" else one[2] for one in names["found"]]
    assert found == ["expression", "nested", "dictionary", "a_set", "<module>"]
