"""Faults as changes of what a rank does in a step: its events with something left out, doubled, altered or put in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpcore.wire import DEFAULT_GROUP, MONITORED_BARRIER, NEW_GROUP, Phase
from tests.corpus.generator.kinds import HEALTHY, IN_OPENING, KEPT, Kind
from tests.corpus.generator.program import (
    Collective,
    Harm,
    Meet,
    Semantics,
    Shape,
    Transfer,
    buffers_of,
    ending,
    opening,
    step_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.corpus.generator.program import Event
    from tests.corpus.generator.stories import Fault, Story

HARMS: dict[Kind, str] = {
    Kind.SLEEP: "sleep",
    Kind.LOCK: "lock",
    Kind.CHILD: "child",
    Kind.LOADER: "loader",
    Kind.FILE: "file",
    Kind.GIL: "gil",
    Kind.STOP: "freeze",
    Kind.EXIT: "exit",
    Kind.RAISE: "raise",
    Kind.KILL: "signal",
    Kind.TERMINATE: "signal",
    Kind.OOM: "oom",
    Kind.HOST: "host",
    Kind.AGENT: "agent",
    Kind.LINK: "link",
    Kind.AGENT_ANEW: "agent anew",
    Kind.SLOW: "slow",
    Kind.SLOW_NODE: "slow",
    Kind.SLOW_BACKWARD: f"slow {Phase.BACKWARD.value}",
    Kind.SLOW_INPUT: f"slow {Phase.DATA.value}",
    Kind.HICCUP: "sleep",
    Kind.ALL_STAND: "lock",
    Kind.OTHER_MEMBERS: "new_group",
    Kind.FIRST_STANDS: "sleep",
    Kind.RECEIVE_ANY: "recv",
    Kind.KEPT_BY_THREAD: "thread",
    Kind.KEPT_BY_HANDLER: "atexit",
    Kind.KEPT_BY_PROCESS: "process",
    Kind.SLOW_END: "atexit",
    Kind.LEAK: "leak",
    Kind.LEAK_OF_ALL: "leak",
    Kind.GPU_LEAK: "gpu leak",
    Kind.CACHE_FILLS: "cache",
    Kind.RESTARTS: "raise",
    Kind.FAILS_AGAIN: "signal",
    Kind.RAISE_SLOWLY: "raise slowly",
    Kind.ALL_RAISE: "raise slowly",
    Kind.LEAVE_SLOWLY: "leave",
    Kind.CANCELLED: "sleep",
    Kind.LAUNCHER_ENDED: "launcher",
    Kind.KERNEL: "kernel",
}
VALUES: dict[Kind, float] = {Kind.KILL: 9.0, Kind.FAILS_AGAIN: 9.0, Kind.TERMINATE: 15.0, Kind.EXIT: 0.0}
TURN_STEPS = 4
"""How long each of two ranks that are slow in turns is slow."""
RARE_STEPS = 10
"""Of so many steps one is slow, by so much that all take as long as with a rank that always is."""
AT_THE_END = KEPT | {Kind.SLOW_END}
INPUT_FACTOR = 8.0
"""Input is a twelfth of a step: a factor on it alone has to be larger to show."""


def events_of(story: Story, rank: int) -> Iterator[Event]:
    """Return all that a rank does, with the story's faults."""
    shape = story.shape
    mine = [fault for fault in story.faults if strikes(fault, shape, rank)]
    events = opening(shape, rank)
    for fault in mine:
        if fault.kind in IN_OPENING:
            events = _struck_in_opening(events, fault)
    yield from events
    step = 0
    while not shape.num_steps or step < shape.num_steps:
        step += 1
        events = step_of(shape, rank, step)
        for fault in mine:
            events = _struck(shape, events, fault, rank, step)
        yield from events
    yield from ending()
    yield from (Harm(HARMS[fault.kind], fault.value) for fault in mine if fault.kind in AT_THE_END)


def strikes(fault: Fault, shape: Shape, rank: int) -> bool:
    """Return whether a fault strikes at a rank."""
    if fault.kind in (Kind.ALL_STAND, Kind.LEAK_OF_ALL, Kind.CACHE_FILLS, Kind.ALL_RAISE):
        return True
    if fault.kind is Kind.NEVER_LAUNCHED:
        return rank // shape.ranks_per_node == shape.num_nodes - 1
    if fault.kind is Kind.SLOW_NODE:
        return rank // shape.ranks_per_node == fault.rank // shape.ranks_per_node
    if fault.kind is Kind.SLOW_IN_TURNS:
        return rank in (fault.rank, (fault.rank + 1) % shape.world_size)
    return rank == fault.rank


def _struck(shape: Shape, events: list[Event], fault: Fault, rank: int, step: int) -> list[Event]:
    if fault.kind in IN_OPENING | AT_THE_END:
        return events
    if fault.kind is Kind.SLOW_RARELY:
        return _rarely(events, fault, step)
    if fault.kind is Kind.SLOW_IN_TURNS:
        return _in_turns(shape, events, fault, rank, step)
    if step != fault.step:
        return events
    if fault.kind in HARMS:
        return _harmed(shape, events, fault)
    change = CHANGES.get(fault.kind)
    return events if change is None else change(shape, events, fault)


def _struck_in_opening(events: list[Event], fault: Fault) -> list[Event]:
    if fault.kind is Kind.NEW_GROUP_LEFT_OUT:
        at = next(at for at, event in enumerate(events) if isinstance(event, Meet) and event.op == NEW_GROUP)
        return [*events[:at], Harm("mark"), *events[at + 1 :]]
    is_first = fault.kind is Kind.FIRST_STANDS
    at = 1 if is_first else len(events) - 2
    return [*events[:at], Harm(HARMS[fault.kind], fault.value), *events[at:]]


def _is_in_batch(event: Event) -> bool:
    return isinstance(event, Transfer) and not event.waits


def _harmed(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    # Behind the events that begin and before those that end the step: a rank that is struck has begun it.
    at = 1 + fault.place % (len(events) - 1)
    while shape.semantics is Semantics.NCCL and _is_in_batch(events[at - 1]):
        # batch_isend_irecv is one call: nothing happens in the middle of it.
        at -= 1
    value = VALUES.get(fault.kind, fault.value)
    if fault.kind is Kind.SLOW_INPUT:
        value *= INPUT_FACTOR
    harm = Harm(HARMS[fault.kind], value, is_odd=fault.kind in HEALTHY)
    healed = [Harm("healed", is_odd=True)] if fault.kind is Kind.HICCUP else []
    return [*events[:at], harm, *healed, *events[at:]]


def _in_turns(shape: Shape, events: list[Event], fault: Fault, rank: int, step: int) -> list[Event]:
    if step < fault.step:
        return events
    whose = (step - fault.step) // TURN_STEPS % 2
    is_mine = rank == (fault.rank + whose) % shape.world_size
    return [events[0], Harm("slow", fault.value if is_mine else 1.0), *events[1:]]


def _rarely(events: list[Event], fault: Fault, step: int) -> list[Event]:
    if step < fault.step:
        return events
    is_slow = (step - fault.step) % RARE_STEPS == 0
    return [events[0], Harm("slow", 1.0 + RARE_STEPS * (fault.value - 1.0) if is_slow else 1.0), *events[1:]]


def _calls(events: list[Event]) -> list[int]:
    return [at for at, event in enumerate(events) if isinstance(event, Collective)]


def _target(events: list[Event], fault: Fault) -> int:
    calls = _calls(events)
    return calls[fault.place % len(calls)]


def _leave_out(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = _target(events, fault)
    return [*events[:at], Harm("mark"), *events[at + 1 :]]


def _double(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = _target(events, fault)
    return [*events[: at + 1], Harm("mark"), events[at], *events[at + 1 :]]


def _move(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Swap a call with the next one."""
    calls = _calls(events)
    place = fault.place % len(calls)
    if place + 1 >= len(calls):
        return events
    at, behind = calls[place], calls[place + 1]
    moved = list(events)
    moved[at], moved[behind] = moved[behind], moved[at]
    return [*moved[:at], Harm("mark"), *moved[at:]]


def _move_far(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Make a call later than several others of the step."""
    calls = _calls(events)
    place = fault.place % len(calls)
    at, behind = calls[place], calls[min(place + 2 + fault.place % 5, len(calls) - 1)]
    if at == behind:
        return events
    return [*events[:at], Harm("mark"), *events[at + 1 : behind + 1], events[at], *events[behind + 1 :]]


def _reorder_groups(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Call in the sub-group before all calls of the group of all, rather than behind them."""
    own = shape.group_of(fault.rank)
    calls = _calls(events)
    found = [at for at in calls if events[at].group == own]  # type: ignore[union-attr]
    if own == DEFAULT_GROUP or not found or found[0] == calls[0]:
        return events
    first, at = calls[0], found[0]
    return [*events[:first], Harm("mark"), events[at], *events[first:at], *events[at + 1 :]]


def _restart(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Raise in the middle of a step, catch it in the loop, take the same batch once more."""
    at = _target(events, fault)
    return [*events[: at + 1], Harm("mark"), *events[1:]]


def _reduce_otherwise(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = next(at for at in _calls(events) if events[at].line == 147)  # type: ignore[union-attr]
    return _altered(events, at, reduce_op="MAX")


def _stay_away(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = next(at for at, event in enumerate(events) if isinstance(event, Meet) and event.op == MONITORED_BARRIER)
    return [*events[:at], Harm("sleep", fault.value), *events[at:]]


def _altered(events: list[Event], at: int, **changes: object) -> list[Event]:
    call = events[at]
    assert isinstance(call, Collective)
    return [*events[:at], Harm("mark"), replace(call, **changes), *events[at + 1 :]]  # type: ignore[arg-type]


def _resize(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    sized = [at for at in _calls(events) if events[at].op != "barrier"]  # type: ignore[union-attr]
    at = sized[fault.place % len(sized)]
    call = events[at]
    assert isinstance(call, Collective)
    return _altered(events, at, elements=call.elements * 2 if fault.place % 2 else max(1, call.elements // 2))


def _retype(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    sized = [at for at in _calls(events) if events[at].op != "barrier"]  # type: ignore[union-attr]
    return _altered(events, sized[fault.place % len(sized)], element_bytes=8 if fault.place % 2 else 2)


def _reroot(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    # DDP's own broadcasts take their source from no line of the program.
    rooted = [at for at in _calls(events) if events[at].line == 148]  # type: ignore[union-attr]
    # A rank that was root already passes another; one that was not passes itself.
    other = fault.rank if fault.rank != 0 else 1
    return _altered(events, rooted[fault.place % len(rooted)], root=other) if rooted else events


def _reroot_gather(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = next(at for at in _calls(events) if events[at].line == 149)  # type: ignore[union-attr]
    return _altered(events, at, root=fault.rank if fault.rank != 0 else 1)


def _reoperate(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    at = _target(events, fault)
    call = events[at]
    assert isinstance(call, Collective)
    if call.op != "all_reduce":
        return _altered(events, at, op="all_reduce", root=-1)
    return _altered(events, at, op="broadcast", root=shape.members().get(call.group, (0,))[0])


def _regroup(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Call in the group of all what belongs to the sub-group, or the other way round."""
    own = shape.group_of(fault.rank)
    if own == DEFAULT_GROUP:
        return events
    at = _target(events, fault)
    call = events[at]
    assert isinstance(call, Collective)
    if call.root >= 0:
        return events
    return _altered(events, at, group=own if call.group == DEFAULT_GROUP else DEFAULT_GROUP)


def _swallow(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Raise in the forward, catch it in the loop, go on with the next batch."""
    at = _target(events, fault)
    return [*events[:at], Harm("mark")]


def _evaluate_wrapped(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
    """Rank 0 evaluates through DDP: its forward broadcasts the buffers, which nobody else does then."""
    at = next(at for at in reversed(range(len(events))) if isinstance(events[at], Collective))
    return [*events[:at], Harm("mark"), buffers_of(162, "evaluate"), *events[at:]]


def _drop_transfer(is_send: bool) -> Callable[[Shape, list[Event], Fault], list[Event]]:
    def change(shape: Shape, events: list[Event], fault: Fault) -> list[Event]:
        found = [at for at, event in enumerate(events) if isinstance(event, Transfer) and event.is_send is is_send]
        return [*events[: found[0]], Harm("mark"), *events[found[0] + 1 :]] if found else events

    return change


CHANGES: dict[Kind, Callable[[Shape, list[Event], Fault], list[Event]]] = {
    Kind.LEFT_OUT: _leave_out,
    Kind.DOUBLED: _double,
    Kind.MOVED: _move,
    Kind.OTHER_SIZE: _resize,
    Kind.OTHER_DTYPE: _retype,
    Kind.OTHER_ROOT: _reroot,
    Kind.OTHER_OP: _reoperate,
    Kind.OTHER_GROUP: _regroup,
    Kind.SWALLOWED: _swallow,
    Kind.EVALUATES_WRAPPED: _evaluate_wrapped,
    Kind.SEND_LEFT_OUT: _drop_transfer(is_send=True),
    Kind.RECEIVE_LEFT_OUT: _drop_transfer(is_send=False),
    Kind.MOVED_FAR: _move_far,
    Kind.GROUP_ORDER: _reorder_groups,
    Kind.RETRIED: _restart,
    Kind.OTHER_REDUCE_OP: _reduce_otherwise,
    Kind.OTHER_DST: _reroot_gather,
    Kind.NOT_MONITORED: _stay_away,
}
"""`Harm("mark")` changes nothing: it says when the rank came to the place."""
