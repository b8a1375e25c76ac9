"""What a thread waits for outside collectives, read from the real frames of threads that stand there."""

from __future__ import annotations

import contextlib
import dis
import inspect
import subprocess
import sys
import threading
import weakref
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from ddpcore.probe.main_thread import FIRST_CALLS, MainWaits, called_method
from ddpcore.probe.program_calls import MAX_COUNTED, PeerCalls
from ddpcore.probe.samples import NOTHING
from ddpcore.probe.stack import CodeRoots, StackWalk, current_frames
from ddpcore.wire import ExitWait, StoreMeeting
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WALK = StackWalk(CodeRoots(torch=("/nowhere/torch/",), ddpcore=("/nowhere/ddpcore/",), libraries=(sys.prefix,)))


class Work:
    """Stands for a `Work`: its wait() is no Python function, as torch's is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.wait = self._lock.acquire
        self.end = self._lock.release
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


@contextlib.contextmanager
def standing(target: Callable[[], Any], end: Callable[[], Any]) -> Iterator[int]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield thread.ident or 0
    finally:
        end()
        thread.join()


def looker(thread_id: int, calls: PeerCalls | None = None) -> MainWaits:
    return MainWaits(thread_id, WALK, calls or PeerCalls())


def test_a_wait_for_a_work_is_for_the_calls_of_that_thread_that_are_not_over() -> None:
    calls, over, mine, others = PeerCalls(), Work(), Work(), Work()
    over.is_over = True

    def receive() -> None:
        calls.note(("recv", None, "0", 3), over)
        calls.note(("recv", None, "0", 4), mine)
        mine.wait()

    calls.note(("send", None, "0", 5), others)
    with standing(receive, mine.end) as thread_id:
        look = looker(thread_id, calls)
        until(lambda: look.look(is_still=False).peer_wait is not None, 5, "the wait")
        wait = look.look(is_still=False).peer_wait

    assert wait is not None
    assert [(call.op, call.peer, call.tag, call.number) for call in wait.calls] == [("recv", None, 4, 1)]


def test_a_thread_that_sleeps_with_a_receive_under_way_does_not_wait_for_it() -> None:
    calls, work, awake = PeerCalls(), Work(), Work()

    def sleep() -> None:
        calls.note(("recv", None, "0", 0), work)
        awake._lock.acquire()

    with standing(sleep, awake.end) as thread_id:
        until(lambda: calls.is_used, 5, "the call")

        assert looker(thread_id, calls).look(is_still=True).peer_wait is None


@pytest.mark.parametrize("is_still", [False, True])
def test_code_without_the_name_of_a_wait_is_not_disassembled(monkeypatch: pytest.MonkeyPatch, is_still: bool) -> None:
    calls, awake = PeerCalls(), Work()
    calls.note(("recv", None, "0", 0), Work())
    monkeypatch.setattr("ddpcore.probe.main_thread.called_method", lambda *_: pytest.fail("tens of milliseconds"))

    with standing(awake._lock.acquire, awake.end) as thread_id:
        assert looker(thread_id, calls).look(is_still=is_still).peer_wait is None


def test_no_reference_to_a_work_is_kept() -> None:
    calls, work = PeerCalls(), Work()
    calls.note(("send", None, "0", 0), work)
    del work

    assert calls.open_calls(threading.get_ident()) == []
    assert [call.number for call in calls.latest()] == [1]


def test_calls_are_counted_by_operation_peer_group_and_tag_and_the_longest_unused_are_forgotten() -> None:
    calls = PeerCalls()
    for tag in range(100):
        calls.note(("send", None, "0", tag), None)
    calls.note(("send", None, "0", 90), None)

    latest = calls.latest()

    assert len(latest) == 64
    assert (latest[0].tag, latest[0].number) == (90, 2)
    assert min(call.tag for call in latest) == 36


def test_kinds_that_are_not_reported_are_counted_on() -> None:
    calls = PeerCalls()
    for _ in range(3):
        for tag in range(128):
            calls.note(("send", None, "0", tag), None)

    assert {call.number for call in calls.latest()} == {3}
    assert calls.num_calls == 3 * 128

    for tag in range(128, 2 * MAX_COUNTED):
        calls.note(("send", None, "0", tag), None)
    assert len(calls._numbers) == MAX_COUNTED


def test_a_subprocess_that_is_waited_for_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    with standing(child.wait, lambda: child.stdin and child.stdin.close()) as thread_id:
        until(lambda: looker(thread_id).look(is_still=True).child_wait is not None, 5, "the wait")
        wait = looker(thread_id).look(is_still=True).child_wait

    assert wait is not None
    assert (wait.pid, wait.what) == (child.pid, "subprocess")


def test_a_process_of_multiprocessing_that_is_joined_is_named() -> None:
    context = get_context("fork")
    inner, outer = context.Pipe()
    child = context.Process(target=inner.recv)
    child.start()

    with standing(child.join, lambda: outer.send(0)) as thread_id:
        until(lambda: looker(thread_id).look(is_still=True).child_wait is not None, 5, "the wait")
        wait = looker(thread_id).look(is_still=True).child_wait

    assert wait is not None
    assert (wait.pid, wait.what) == (child.pid, "process")


def test_a_queue_of_multiprocessing_that_nobody_empties_is_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's end joins the thread that feeds it, in frames like these."""
    monkeypatch.setattr("ddpcore.probe.main_thread.PROGRAMS", frozenset({"<module>"}))  # a thread stands for the end
    names: dict[str, Any] = {}
    exec(compile("def _exit_function(join, feeder): join(feeder)", "/lib/multiprocessing/util.py", "exec"), names)
    is_taken = threading.Event()
    feeder = threading.Thread(target=is_taken.wait)
    feeder.start()
    join = vars(Queue)["_finalize_join"].__func__

    with standing(lambda: names["_exit_function"](join, weakref.ref(feeder)), is_taken.set) as thread_id:
        until(lambda: looker(thread_id).look(is_still=True).exit_wait == ExitWait("queue"), 5, "the wait")


def test_the_mark_is_the_same_while_a_thread_stands_and_another_once_it_has_moved() -> None:
    first, second = Work(), Work()

    def move() -> None:
        first.wait()
        second.wait()

    def line(thread_id: int) -> int:
        return current_frames()[thread_id].f_lineno

    def end() -> None:
        for work in (first, second):
            with contextlib.suppress(RuntimeError):  # it is over
                work.end()

    with standing(move, end) as thread_id:
        look = looker(thread_id)
        before_line = move.__code__.co_firstlineno + 1
        until(lambda: line(thread_id) == before_line, 5, "the line")
        marks = {look.look(is_still=True).mark for _ in range(5)}
        first.end()
        until(lambda: line(thread_id) != before_line, 5, "the line")

        assert len(marks) == 1
        assert look.look(is_still=True).mark not in marks


def test_a_rank_that_makes_steps_is_not_looked_at() -> None:
    assert looker(threading.get_ident()).look(is_still=False) == NOTHING


@pytest.mark.parametrize(
    ("expression", "name"),
    [("work.wait()", "wait"), ("work.wait(timeout)", "wait"), ("works[0].wait()", "wait"), ("open(path)", "")],
)
def test_the_method_that_is_called_is_known_by_its_instruction(expression: str, name: str) -> None:
    code = compile(expression, "<test>", "eval")

    assert called_method(code, len(code.co_code)) == name


@pytest.mark.parametrize(("ranks", "is_told"), [([0, 1, 2], True), ([0, 1], False)])
def test_the_making_of_a_group_is_a_wait_for_all_where_all_are_its_members(ranks: list[int], is_told: bool) -> None:
    source = "def _new_group_with_tag(ranks, global_world_size, wait):\n    wait()\n"
    torch_names: dict[str, Any] = {}
    exec(compile(source, "/nowhere/torch/distributed/distributed_c10d.py", "exec"), torch_names)
    work = Work()

    with standing(lambda: torch_names["_new_group_with_tag"](ranks, 3, work.wait), work.end) as thread_id:
        until(lambda: any(f.f_code.co_name == "_new_group_with_tag" for f in frames_of(thread_id)), 5, "the wait")
        wait = looker(thread_id).look(is_still=True).peer_wait

    assert (wait is not None) is is_told
    assert wait is None or [(call.op, call.peer) for call in wait.calls] == [("new_group", None)]


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce"),
    *("reduce_scatter", "scatter"),
    # From torch 2.13 on all_gather_into_tensor and reduce_scatter_tensor call these two.
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_of_this_torch_calls_a_method_that_is_known(name: str) -> None:
    code = inspect.unwrap(getattr(dist, name)).__code__
    called = {called_method(code, at.offset) for at in dis.get_instructions(code) if at.opname.startswith("CALL")}

    assert called & FIRST_CALLS


FIRST_CALL = """
def all_reduce(group, wait):
    work = group.allreduce(wait)
    return work
"""


class Group:
    """A process group whose first collective begins, and does not come back."""

    group_name = "0"

    def __init__(self, size: int, allreduce: Callable[[bool], bool] = bool) -> None:
        self._size = size
        self.allreduce = allreduce
        """In C: as in torch, the innermost frame is that of all_reduce."""

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(
    ("size", "backend", "is_told"),
    [(3, "nccl", True), (3, "cpu:gloo,cuda:nccl", True), (3, "gloo", False), (2, "nccl", False)],
)
def test_the_start_of_a_communicator_is_a_wait_for_all_where_all_are_its_members(
    size: int, backend: str, is_told: bool
) -> None:
    world = type("GroupMember", (), {"WORLD": Group(3)})
    torch_names: dict[str, Any] = {"GroupMember": world, "get_backend": lambda _group: backend}
    exec(compile(FIRST_CALL, "/nowhere/torch/distributed/distributed_c10d.py", "exec"), torch_names)
    lock = threading.Lock()
    lock.acquire()
    group = Group(size, lock.acquire)

    with standing(lambda: torch_names["all_reduce"](group, True), lock.release) as thread_id:
        until(lambda: current_frames()[thread_id].f_code.co_name == "all_reduce", 5, "the call")
        wait = looker(thread_id).look(is_still=True).peer_wait

    assert (wait is not None) is is_told
    assert wait is None or [(call.op, call.peer) for call in wait.calls] == [("ncclCommInitRank", None)]


def frames_of(thread_id: int) -> list[Any]:
    frames, frame = [], current_frames().get(thread_id)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_where_a_rank_meets_the_others_is_read_from_torch_s_store() -> None:
    release = threading.Event()
    code = compile(
        "def _create_c10d_store(hostname, port, rank, world_size, wait):\n    wait()",
        "/venv/torch/distributed/rendezvous.py",
        "exec",
    )
    names: dict[str, Any] = {}
    exec(code, names)
    thread = threading.Thread(target=names["_create_c10d_store"], args=("10.0.0.1", 29500, 1, 4, release.wait))
    thread.start()
    try:
        look = looker(thread.ident or 0)
        until(lambda: look.look(is_still=True).store_meeting == StoreMeeting("10.0.0.1", 29500, 1, 4), 5, "the store")
    finally:
        release.set()
        thread.join()
