"""How many collectives a rank had called at the end of each step, and what it reports of its last calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ddpcore.probe.group_track import MAX_PAST, GroupTrack
from ddpcore.probe.progress import NUM_LATEST, NUM_OLDER, CallsAtSteps
from ddpcore.probe.samples import RecorderEntry, StepEnd
from ddpcore.wire import PastCall

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = ("gloo", 0)


def entry(seq: int, at_us: int, op: str = "all_reduce", sizes: tuple[tuple[int, ...], ...] = ((8,),)) -> RecorderEntry:
    return RecorderEntry(GROUP, "0", seq, f"gloo:{op}", sizes, False, True, at_us, ("Float",) * len(sizes))


def training(num_steps: int, calls: Sequence[int]) -> tuple[list[RecorderEntry], list[StepEnd]]:
    """Return calls and ends of steps 1, 2, ...; `calls` is how many each step makes."""
    entries: list[RecorderEntry] = []
    ends = []
    for step in range(1, num_steps + 1):
        for number in range(calls[step - 1]):
            entries.append(entry(len(entries) + 1, 1000 * step + number))
        ends.append(StepEnd(step, 1000 * step + 900))
    return entries, ends


def known(steps: CallsAtSteps) -> dict[int, int]:
    return {pair.step: pair.seq for pair in steps.report()}


def test_each_step_has_the_seq_of_its_last_call() -> None:
    steps = CallsAtSteps()

    steps.learn(*training(3, [2, 3, 2]))

    assert known(steps) == {1: 2, 2: 5, 3: 7}


def test_a_step_before_the_oldest_call_in_the_ring_is_unknown() -> None:
    entries, ends = training(3, [2, 2, 2])
    steps = CallsAtSteps()

    steps.learn(entries[2:], ends)

    assert known(steps) == {2: 4, 3: 6}


def test_steps_that_a_program_counts_anew_replace_those_of_before() -> None:
    entries, ends = training(6, [1] * 6)
    again = [StepEnd(end.step if end.step < 4 else end.step - 3, end.at_us) for end in ends]
    steps = CallsAtSteps()

    steps.learn(entries[:3], again[:3])
    steps.learn(entries, again)
    steps.learn(entries, again)

    assert known(steps) == {1: 4, 2: 5, 3: 6}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=300), st.integers(1, 40), st.integers(1, 40))
def test_ranks_that_look_at_other_moments_agree_in_every_step_that_both_know(
    calls: list[int], one_every: int, other_every: int
) -> None:
    entries, ends = training(len(calls), calls)
    true = {end.step: sum(calls[: end.step]) for end in ends}
    found = []
    for every in (one_every, other_every):
        steps = CallsAtSteps()
        for step in range(every, len(calls) + 1, every):
            made = entries[: true[step]]
            steps.learn(made[-64:], ends[max(0, step - 64) : step])
        found.append(known(steps))

    assert all(true[step] == seq for one in found for step, seq in one.items())
    assert all(len(one) <= NUM_LATEST + NUM_OLDER for one in found)


def test_a_track_reports_its_last_calls_while_it_knows_that_they_are_the_last() -> None:
    track = GroupTrack()
    entries = [entry(seq, seq) for seq in range(1, 11)] + [entry(11, 11, "barrier", ())]
    track.observe(11, 11, 1.0)
    track.learn(entries, (11, 11))

    past = track.report("0", [], 1.0).past

    assert past[-1] == PastCall(11, "barrier", -1, "")
    assert [call.seq for call in past] == list(range(max(1, 11 - MAX_PAST + 1), 12))
    assert past[0] == PastCall(1, "all_reduce", 8, "Float")
    track.observe(12, 11, 1.1)
    assert track.report("0", [], 1.1).past == []


def test_what_the_main_thread_passed_is_forgotten_when_the_rank_moves_on() -> None:
    track = GroupTrack()
    track.observe(1, 0, 1.0)
    track.learn_arguments(3, "SUM")

    assert (track.report("0", [], 1.0).root, track.report("0", [], 1.0).reduce_op) == (3, "SUM")
    track.observe(2, 1, 1.1)
    assert (track.report("0", [], 1.1).root, track.report("0", [], 1.1).reduce_op) == (None, "")
    assert not track.has_arguments


def test_an_operation_that_later_ones_have_overtaken_is_waited_for() -> None:
    track = GroupTrack()
    hung = RecorderEntry(GROUP, "0", 1, "gloo:all_reduce", ((8,),), False, False, 1)
    for tick in range(3):
        track.observe(2, 2, 1.0 + tick)
    track.learn([hung, entry(2, 2)], (2, 2))

    report = track.report("0", [], 3.5)
    assert (report.is_waiting, report.completed_seq, report.enqueued_seq) == (True, 0, 2)
    assert report.waiting_s == 2.5
    track.validate()
    track.observe(3, 3, 4.0)
    track.validate()
    assert not track.is_pending
