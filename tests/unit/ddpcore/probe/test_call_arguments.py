"""What the main thread has passed to a collective is read from torch's own frame while it waits there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from ddpcore.probe.program_calls import arguments_of
from ddpcore.probe.rank_state import RankIdentity, RankState
from ddpcore.probe.samples import CallArguments, GroupMembers, RecorderDump, RecorderEntry, Sample
from ddpcore.probe.stack import Reading
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

C10D = """
def broadcast(tensor, src=None, group=None, group_src=None, wait=None):
    wait()

def all_reduce(tensor, op=None, group=None, wait=None):
    wait()
"""


class Op:
    name = "MAX"


class Held:
    """A thread that stands in a function of torch's file until it is let go."""

    def __init__(self, call: Callable[[dict[str, Any], Callable[[], object]], object]) -> None:
        functions: dict[str, Any] = {}
        exec(compile(C10D, "/venv/torch/distributed/distributed_c10d.py", "exec"), functions)
        self._entered, self._over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: call(functions, self._wait))
        self.thread.start()
        assert self._entered.wait(10)

    def _wait(self) -> None:
        self._entered.set()
        self._over.wait(10)

    @property
    def id(self) -> int:
        assert self.thread.ident is not None
        return self.thread.ident

    def let_go(self) -> None:
        self._over.set()
        self.thread.join()


@pytest.fixture
def held() -> Iterator[Callable[[Callable[[dict[str, Any], Callable[[], object]], object]], Held]]:
    made: list[Held] = []

    def hold(call: Callable[[dict[str, Any], Callable[[], object]], object]) -> Held:
        made.append(Held(call))
        return made[-1]

    yield hold
    for one in made:
        one.let_go()


def test_source_and_group_source_of_a_broadcast_are_read(held: Callable[..., Held]) -> None:
    thread = held(lambda c10d, wait: c10d["broadcast"](object(), src=3, group_src=1, wait=wait))

    assert arguments_of(thread.id) == CallArguments("broadcast", 3, 1, "")


def test_the_reduction_is_read_by_its_name(held: Callable[..., Held]) -> None:
    thread = held(lambda c10d, wait: c10d["all_reduce"](object(), op=Op(), wait=wait))

    assert arguments_of(thread.id) == CallArguments("all_reduce", None, None, "MAX")


def test_a_thread_that_stands_elsewhere_has_passed_nothing(held: Callable[..., Held]) -> None:
    thread = held(lambda _, wait: wait())

    assert arguments_of(thread.id) is None


def waiting_rank(group: str, ranks: tuple[int, ...], op: str) -> RankState:
    """Return a rank that is known to wait in its group's first call."""
    state = RankState(RankIdentity(rank=5, local_rank=1, world_size=8, pid=1, job_id="j", attempt=0))
    key = ("gloo", 0)
    counters = {key: (1, 0)}
    for tick in range(4):
        state.observe(Sample(0.1 * tick, counters, Reading(Phase.BARRIER, None), has_process_group=True))
        entry = RecorderEntry(key, group, 1, f"gloo:{op}", ((4,),), False, False)
        state.learn(RecorderDump([entry], counters), {group: GroupMembers(ranks)})
    return state


@pytest.mark.parametrize(
    ("arguments", "root"),
    [
        (CallArguments("broadcast", 6, 2), 6),
        (CallArguments("broadcast", None, 2), 6),
        (CallArguments("broadcast", 1, None), None),
        (CallArguments("reduce", 6, None), None),
        (None, None),
    ],
)
def test_a_root_is_a_global_rank_of_the_group_that_waits(arguments: CallArguments | None, root: int | None) -> None:
    state = waiting_rank("1", (4, 5, 6), "broadcast")
    assert state.wants_arguments

    state.learn_arguments(arguments)

    (group,) = state.report().groups
    assert group.root == root
    assert not state.wants_arguments
