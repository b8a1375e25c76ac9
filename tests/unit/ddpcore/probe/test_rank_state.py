"""What a rank's report says, fold by fold."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddpcore.probe.rank_state import (
    ARRIVALS_REPORTS,
    LONG_WAIT_S,
    MAX_ARRIVALS,
    MAX_GAP_S,
    MAX_GROUPS,
    MIN_DUMP_INTERVAL_S,
    RESTING_SAMPLES,
    RankIdentity,
    RankState,
)
from ddpcore.probe.reporting import SLOW_TICK_S
from ddpcore.probe.samples import BarrierMark, CounterKey, GroupMembers, RecorderDump, RecorderEntry, Sample, StepMark
from ddpcore.probe.stack import CodeRoots, StackLine, StackReader
from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, ArrivalsReport, GroupReport, Phase, Place, RankReport

TICK_S = 0.1
GLOO: CounterKey = ("gloo", 0)
NCCL: CounterKey = ("nccl", 0)
USER: StackLine = ("/home/me/train.py", 57, "main")
BACKWARD: StackLine = ("/torch/_tensor.py", 647, "backward")
C10D: StackLine = ("/torch/distributed/distributed_c10d.py", 1, "barrier")
ROOTS = CodeRoots(torch=("/torch/",), ddpcore=("/ddpcore/",), libraries=("/lib/",))
ALL = {DEFAULT_GROUP: GroupMembers(ranks=(0, 1, 2, 3))}


def entry(
    seq: int,
    *,
    key: CounterKey = GLOO,
    group: str = DEFAULT_GROUP,
    retired: bool = True,
    op: str = "gloo:all_reduce",
    is_p2p: bool = False,
    called_us: int = 0,
    has_begun: bool | None = None,
    on_gpu_us: int = -1,
) -> RecorderEntry:
    return RecorderEntry(
        key=key,
        group=group,
        seq=seq,
        op=op,
        sizes=((3, 2),),
        is_p2p=is_p2p,
        is_retired=retired,
        called_us=called_us,
        has_begun=has_begun,
        on_gpu_us=on_gpu_us,
    )


class Rank:
    """One rank on a virtual clock, validated after every step."""

    def __init__(self, *, world_size: int = 4) -> None:
        self.now_s = 1000.0
        self.state = RankState(
            RankIdentity(rank=2, local_rank=0, world_size=world_size, pid=7, job_id="gpt", attempt=1)
        )
        self._reader = StackReader(ROOTS)

    def see(
        self,
        counters: dict[CounterKey, tuple[int, int]] | None = None,
        *,
        stack: list[StackLine] | None = None,
        after_s: float = TICK_S,
        has_group: bool = True,
        step: StepMark | None = None,
        phases: tuple[Phase, ...] = (),
        barrier: BarrierMark | None = None,
        num_openings: int = 1,
        num_worlds: int = 0,
    ) -> None:
        self.now_s += after_s
        reading = self._reader.read([USER] if stack is None else stack)
        tick = int((self.now_s + TICK_S / 2) / SLOW_TICK_S)
        self.state.observe(
            Sample(
                self.now_s,
                counters or {},
                reading,
                has_group,
                step,
                phases,
                barrier,
                num_openings=num_openings,
                num_worlds=num_worlds,
                tick=tick,
            )
        )
        self.state.validate()

    def learn(
        self,
        entries: list[RecorderEntry],
        counters: dict[CounterKey, tuple[int, int]],
        members: dict[str, GroupMembers] | None = None,
        cost_s: float = 0.0,
    ) -> None:
        self.state.learn(RecorderDump(entries, counters), ALL if members is None else members, cost_s)
        self.state.validate()

    def wants_dump(self) -> bool:
        return self.state.wants_dump(self.now_s)

    def report(self) -> RankReport:
        return self.state.report()

    def group(self, name: str = DEFAULT_GROUP) -> GroupReport:
        return next(group for group in self.report().groups if group.group == name)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def wait_at_seq_7(rank: Rank) -> None:
    """Let the rank call its seventh collective, and wait in it for three samples."""
    pending = {GLOO: (8, 7)}
    for _ in range(3):
        rank.see(pending)
    rank.learn([entry(6), entry(7, retired=False, op="gloo:barrier")], pending)


def test_a_report_needs_a_sample(rank: Rank) -> None:
    rank.state.validate()
    with pytest.raises(RuntimeError, match="needs a sample"):
        rank.state.report()


def test_a_wait_carries_the_seq_that_ranks_can_compare_and_its_time_to_the_tick(rank: Rank) -> None:
    wait_at_seq_7(rank)

    group = rank.group()
    assert (group.enqueued_seq, group.completed_seq, group.op, group.sizes) == (7, 6, "barrier", [[3, 2]])
    assert group.is_waiting
    assert group.waiting_s == pytest.approx(2 * TICK_S)
    assert group.ranks == []
    assert rank.state.is_waiting


def test_one_sample_is_not_a_wait_since_retirement_trails(rank: Rank) -> None:
    rank.see({GLOO: (8, 7)})
    rank.learn([entry(7, retired=False)], {GLOO: (8, 7)})

    assert not rank.group().is_waiting


def test_a_wait_of_two_samples_without_an_unfinished_entry_is_none(rank: Rank) -> None:
    for _ in range(3):
        rank.see({GLOO: (8, 7)})
    rank.learn([entry(7)], {GLOO: (8, 7)})

    assert (rank.group().is_waiting, rank.group().completed_seq) == (False, 7)


def test_the_next_collective_starts_its_own_wait(rank: Rank) -> None:
    wait_at_seq_7(rank)

    rank.see({GLOO: (9, 8)})
    assert not rank.group().is_waiting
    assert rank.group().waiting_s == 0.0

    rank.see({GLOO: (9, 8)})
    rank.learn([entry(7), entry(8, retired=False)], {GLOO: (9, 8)})
    assert (rank.group().enqueued_seq, rank.group().is_waiting) == (8, True)
    assert rank.group().waiting_s == pytest.approx(TICK_S)


def test_a_wait_ends_with_the_sample_that_sees_it_completed(rank: Rank) -> None:
    wait_at_seq_7(rank)

    rank.see({GLOO: (8, 8)})

    group = rank.group()
    assert (group.enqueued_seq, group.completed_seq, group.waiting_s, group.is_waiting) == (7, 7, 0.0, False)


def test_a_completed_counter_that_steps_back_does_not_end_a_wait(rank: Rank) -> None:
    wait_at_seq_7(rank)

    rank.see({GLOO: (8, 6)})

    assert rank.group().is_waiting
    assert rank.group().waiting_s == pytest.approx(3 * TICK_S)


def test_a_gpu_that_goes_on_through_calls_made_before_waits_in_the_next_one_since_then(rank: Rank) -> None:
    for _ in range(2):
        rank.see({NCCL: (8, 5)})
    rank.learn([entry(seq, key=NCCL, retired=seq < 6) for seq in range(1, 9)], {NCCL: (8, 5)})
    rank.see({NCCL: (8, 6)})
    rank.see({NCCL: (8, 6)})
    rank.learn([entry(seq, key=NCCL, retired=seq < 7) for seq in range(1, 9)], {NCCL: (8, 6)})

    group = rank.group()
    assert (group.enqueued_seq, group.completed_seq, group.is_waiting) == (8, 6, True)
    assert group.waiting_s == pytest.approx(TICK_S)


def test_a_dump_too_soon_to_tell_whether_an_earlier_call_hangs_is_followed_by_another(rank: Rank) -> None:
    rank.see({GLOO: (8, 8)})
    rank.learn([entry(7, retired=False), entry(8)], {GLOO: (8, 8)})
    rank.see({GLOO: (8, 8)}, after_s=MIN_DUMP_INTERVAL_S)

    assert rank.wants_dump()
    rank.learn([entry(7, retired=False), entry(8)], {GLOO: (8, 8)})
    assert (rank.group().completed_seq, rank.group().is_waiting) == (6, True)


def test_a_rank_that_moves_between_sample_and_dump_does_not_inherit_the_old_wait(rank: Rank) -> None:
    for _ in range(3):
        rank.see({GLOO: (8, 7)})
    rank.learn([entry(7), entry(8, retired=False)], {GLOO: (9, 8)})

    assert (rank.group().enqueued_seq, rank.group().is_waiting, rank.group().waiting_s) == (8, False, 0.0)
    rank.see({GLOO: (9, 8)})
    assert not rank.group().is_waiting


def test_the_oldest_unfinished_collective_decides_what_is_completed(rank: Rank) -> None:
    for _ in range(2):
        rank.see({GLOO: (9, 6)})
    rank.learn([entry(5, retired=False), entry(6), entry(7, retired=False)], {GLOO: (9, 6)})

    assert (rank.group().enqueued_seq, rank.group().completed_seq) == (7, 4)


def test_point_to_point_and_entries_without_a_seq_are_left_out(rank: Rank) -> None:
    rank.see({GLOO: (8, 8)})
    rank.learn([entry(4), entry(99, is_p2p=True), entry(0), entry(2**63)], {GLOO: (8, 8)})

    assert rank.group().enqueued_seq == 4


def test_no_dump_is_wanted_before_there_is_a_group(rank: Rank) -> None:
    rank.see()

    assert not rank.wants_dump()
    assert not rank.state.has_groups

    rank.see({GLOO: (1, 1)})
    assert rank.wants_dump()
    assert rank.state.has_groups


def test_a_dump_is_wanted_at_the_slow_beat_while_the_counters_move(rank: Rank) -> None:
    wanted_s = []
    for number in range(95):
        rank.see({GLOO: (number, number)})
        if rank.wants_dump():
            wanted_s.append(rank.now_s)
            rank.learn([entry(number + 1)], {GLOO: (number, number)})

    # The first dump is made at once, the others at the beats.
    assert [later - earlier for earlier, later in pairwise(wanted_s)][1:] == [pytest.approx(SLOW_TICK_S)] * 2


def test_a_group_that_rests_while_another_moves_waits_for_its_dump(rank: Rank) -> None:
    other: CounterKey = ("gloo", 1)
    rank.see({GLOO: (1, 1), other: (5, 5)})
    rank.learn([entry(1)], {GLOO: (1, 1), other: (4, 4)})  # the beat's, in whose midst the other group moved on
    for number in range(2, RESTING_SAMPLES + 1):
        assert not rank.wants_dump()
        rank.see({GLOO: (number, number), other: (5, 5)})
    assert rank.wants_dump()


def test_a_group_with_something_pending_gets_its_dump_though_another_moves(rank: Rank) -> None:
    other: CounterKey = ("gloo", 1)
    rank.see({GLOO: (1, 1), other: (5, 4)})
    rank.learn([entry(1)], {GLOO: (1, 1), other: (4, 4)})
    rank.see({GLOO: (2, 2), other: (5, 4)}, after_s=MIN_DUMP_INTERVAL_S)
    assert rank.wants_dump()


def test_a_second_look_tells_what_is_still_pending_from_what_is_over(rank: Rank) -> None:
    other: CounterKey = ("gloo", 1)
    rank.see({GLOO: (2, 1), other: (5, 5)})
    assert rank.state.still_pends({GLOO: (2, 1), other: (6, 6)}, ())
    assert not rank.state.still_pends({GLOO: (2, 2), other: (5, 5)}, ())
    assert not rank.state.still_pends({GLOO: (3, 2), other: (5, 5)}, ()), "the next one is another wait"
    assert not rank.state.still_pends({}, ())

    gate = BarrierMark(label="epoch end", seq=3, entered_s=rank.now_s, is_over=False)
    rank.see({GLOO: (2, 2)}, barrier=gate)
    assert rank.state.still_pends({GLOO: (2, 2)}, (gate,))
    assert not rank.state.still_pends({GLOO: (2, 2)}, (gate._replace(is_over=True),))
    assert not rank.state.still_pends({GLOO: (2, 2)}, (None,))


def test_a_program_that_has_made_a_step_since_does_not_wait_for_what_was_pending(rank: Rank) -> None:
    assert not rank.state.has_stepped(None), "nothing has been seen yet"
    first, second = (StepMark(number, None, None, None, number) for number in (1, 2))
    rank.see({GLOO: (2, 1)})
    assert not rank.state.has_stepped(None)
    assert rank.state.has_stepped(first)
    rank.see({GLOO: (4, 3)}, step=first)
    assert not rank.state.has_stepped(first)
    assert rank.state.has_stepped(second)


def test_the_latest_calls_of_a_beat_are_told_until_the_next_one(rank: Rank) -> None:
    rank.see({GLOO: (9, 9)})
    rank.learn(
        [entry(8, called_us=800, op="gloo:broadcast"), entry(9, called_us=900), entry(0, called_us=950, is_p2p=True)],
        {GLOO: (9, 9)},
    )
    first = rank.state.report()
    assert first.arrivals == [ArrivalsReport(DEFAULT_GROUP, [8, 9], [800, 900], [8])]

    rank.see({GLOO: (10, 10)})
    rank.learn([entry(10, called_us=1000)], {GLOO: (10, 10)})  # quiet, within the same beat
    assert (rank.state.report().tick, rank.state.report().arrivals) == (first.tick, first.arrivals)

    rank.see({GLOO: (11, 11)}, after_s=SLOW_TICK_S)
    rank.learn([entry(11, called_us=1100)], {GLOO: (11, 11)})
    assert rank.state.report().tick == first.tick + 1
    assert rank.state.report().arrivals == [ArrivalsReport(DEFAULT_GROUP, [11], [1100])]


def test_calls_are_told_a_few_times_and_not_for_the_whole_beat(rank: Rank) -> None:
    rank.see({GLOO: (9, 9)})
    rank.learn([entry(9, called_us=900)], {GLOO: (9, 9)})
    told = [bool(rank.state.report().arrivals) for _ in range(2 * ARRIVALS_REPORTS)]
    assert told == [True] * ARRIVALS_REPORTS + [False] * ARRIVALS_REPORTS


def test_of_many_calls_in_many_groups_the_latest_are_told(rank: Rank) -> None:
    members = {"0": GroupMembers((0, 1, 2, 3)), "7": GroupMembers((0, 2))}
    other: CounterKey = ("gloo", 1)
    rank.see({GLOO: (99, 99), other: (99, 99)})
    calls = [entry(seq, called_us=10 * seq) for seq in range(1, 100)]
    calls += [entry(seq, key=other, group="7", called_us=10 * seq + 5) for seq in range(1, 100)]
    rank.learn(calls, {GLOO: (99, 99), other: (99, 99)}, members)

    told = {arrivals.group: arrivals.seqs for arrivals in rank.state.report().arrivals}
    newest = list(range(100 - MAX_ARRIVALS // 2, 100))
    assert told == {"0": newest, "7": newest}


def test_a_quiet_position_is_dumped_once_whether_it_waits_or_is_missing(rank: Rank) -> None:
    rank.see({GLOO: (7, 7)})
    rank.learn([entry(6)], {GLOO: (7, 7)})
    wanted = []
    for _ in range(9):
        rank.see({GLOO: (8, 8)})
        wanted.append(rank.wants_dump())
        if rank.wants_dump():
            rank.learn([entry(7)], {GLOO: (8, 8)})

    assert wanted == [False, True, False, False, False, False, False, False, False]


def test_the_first_steps_end_what_the_start_has_called_last(rank: Rank) -> None:
    rank.see({GLOO: (2, 2)})
    rank.learn([entry(2, op="gloo:broadcast")], {GLOO: (2, 2)}, cost_s=1.0)
    rank.see({GLOO: (3, 3)})
    assert not rank.wants_dump(), "the start has no steps, and its dump was dear"

    first, second = (StepMark(number, None, None, None, number) for number in (1, 2))
    rank.see({GLOO: (5, 5)}, step=first)
    assert rank.wants_dump()
    rank.learn([entry(5, op="gloo:all_reduce")], {GLOO: (5, 5)}, cost_s=1.0)
    assert rank.group().op == "all_reduce"
    rank.see({GLOO: (7, 7)}, step=second)
    assert not rank.wants_dump()


def test_a_wait_that_follows_the_first_step_is_read_as_soon_as_any(rank: Rank) -> None:
    rank.see({GLOO: (5, 5)}, step=(first := StepMark(1, None, None, None, 1)))
    rank.learn([entry(5)], {GLOO: (5, 5)}, cost_s=1.0)
    for _ in range(2):
        rank.see({GLOO: (6, 5)}, step=first)
    assert rank.wants_dump(), "the dump that ends the start delays no other one"


def test_a_long_wait_is_read_once_though_the_last_dump_was_dear(rank: Rank) -> None:
    rank.see({GLOO: (5, 5)})
    rank.learn([entry(5)], {GLOO: (5, 5)}, cost_s=1.0)
    wanted = []
    for _ in range(6):
        rank.see({GLOO: (6, 5)}, after_s=LONG_WAIT_S / 2)
        wanted.append(rank.wants_dump())
        if wanted[-1]:
            # The recorder has moved on, it seems: whatever it shows, no second dump follows beyond the budget.
            rank.learn([entry(5)], {GLOO: (7, 6)}, cost_s=1.0)

    assert wanted == [False, False, True, False, False, False]


def test_a_default_group_that_is_made_again_has_a_start_again(rank: Rank) -> None:
    step = StepMark(1, None, None, None, 1)
    rank.see({GLOO: (5, 5)}, step=step)
    rank.learn([entry(5)], {GLOO: (5, 5)}, cost_s=1.0)
    other: CounterKey = ("gloo", 1)
    rank.see({other: (1, 1)}, step=step, num_openings=2)
    assert rank.wants_dump()


def test_dumps_that_cost_much_come_less_often_but_at_the_slow_beat_at_least(rank: Rank) -> None:
    rank.see({GLOO: (1, 1)})
    rank.learn([entry(1)], {GLOO: (1, 1)}, cost_s=0.001)
    for _ in range(8):
        rank.see({GLOO: (2, 2)})
    assert not rank.wants_dump()
    rank.see({GLOO: (2, 2)}, after_s=0.25)
    assert rank.wants_dump()

    rank.learn([entry(2)], {GLOO: (2, 2)}, cost_s=1.0)
    for _ in range(2):
        rank.see({GLOO: (3, 3)})
    assert not rank.wants_dump()
    rank.see({GLOO: (3, 3)}, after_s=SLOW_TICK_S)
    assert rank.wants_dump()


def test_waited_time_is_the_sampled_share_of_time_with_something_pending(rank: Rank) -> None:
    rank.see({GLOO: (1, 1)})
    for completed in (2, 1, 1, 2):
        rank.see({GLOO: (2, completed)})

    assert rank.report().observed_s == pytest.approx(4 * TICK_S)
    assert rank.report().waited_s == pytest.approx(2 * TICK_S)


def test_the_time_of_a_frozen_process_is_neither_worked_nor_waited(rank: Rank) -> None:
    rank.see({GLOO: (2, 1)})
    rank.see({GLOO: (2, 1)}, after_s=3600.0)

    assert (rank.report().observed_s, rank.report().waited_s) == (MAX_GAP_S, MAX_GAP_S)


def test_a_named_barrier_is_a_group_of_its_own(rank: Rank) -> None:
    mark = BarrierMark(label="epoch end", seq=3, entered_s=rank.now_s + TICK_S / 2, is_over=False)
    rank.see(barrier=mark)
    assert not rank.group(BARRIER_GROUP).is_waiting
    rank.see(barrier=mark)

    group = rank.group(BARRIER_GROUP)
    assert (group.label, group.enqueued_seq, group.completed_seq, group.op) == ("epoch end", 3, 2, "barrier")
    assert group.is_waiting
    assert group.waiting_s == pytest.approx(1.5 * TICK_S)
    assert rank.report().phase is Phase.BARRIER
    assert rank.report().waited_s == pytest.approx(TICK_S)

    rank.see(barrier=mark._replace(is_over=True))
    group = rank.group(BARRIER_GROUP)
    assert (group.completed_seq, group.is_waiting, group.waiting_s) == (3, False, 0.0)


def test_the_next_named_barrier_starts_its_own_wait(rank: Rank) -> None:
    rank.see(barrier=BarrierMark("a", 1, rank.now_s, is_over=False))
    rank.see(barrier=BarrierMark("b", 2, rank.now_s, is_over=False))

    assert not rank.group(BARRIER_GROUP).is_waiting


def test_a_subgroup_names_its_members_and_a_group_of_all_ranks_does_not(rank: Rank) -> None:
    pair: CounterKey = ("gloo", 1)
    counters = {GLOO: (1, 1), pair: (1, 1)}
    rank.see(counters)
    members = {**ALL, "5": GroupMembers(ranks=(0, 2)), "6": GroupMembers(ranks=(0, 1, 2, 3))}
    rank.learn([entry(1), entry(4, key=pair, group="5")], counters, members)

    assert [(group.group, group.ranks) for group in rank.report().groups] == [(DEFAULT_GROUP, []), ("5", [0, 2])]


def test_a_destroyed_group_is_no_longer_reported(rank: Rank) -> None:
    pair: CounterKey = ("gloo", 1)
    counters = {GLOO: (1, 1), pair: (1, 1)}
    rank.see(counters)
    rank.learn([entry(1), entry(4, key=pair, group="5")], counters)

    assert [group.group for group in rank.report().groups] == [DEFAULT_GROUP]


def test_a_group_made_anew_takes_the_place_of_its_namesake(rank: Rank) -> None:
    young: CounterKey = ("gloo", 4)
    rank.see({GLOO: (9, 9)})
    rank.learn([entry(9)], {GLOO: (9, 9)})
    counters = {GLOO: (9, 9), young: (1, 1)}
    rank.see(counters)
    rank.learn([entry(9), entry(1, key=young)], counters)

    assert [group.enqueued_seq for group in rank.report().groups] == [1]


def test_nccl_counts_apart_in_a_group_that_gloo_serves_too(rank: Rank) -> None:
    counters = {GLOO: (1, 1), NCCL: (900, 900)}
    rank.see(counters)
    entries = [entry(1), entry(900, key=NCCL, op="nccl:all_reduce")]
    rank.learn(entries, counters, {DEFAULT_GROUP: GroupMembers(ranks=(0, 1, 2, 3), is_mixed=True)})

    assert {group.group: group.enqueued_seq for group in rank.report().groups} == {"0": 1, "0@nccl": 900}


def test_nccl_alone_has_the_group_s_plain_name(rank: Rank) -> None:
    rank.see({NCCL: (900, 900)})
    rank.learn([entry(900, key=NCCL, op="nccl:all_reduce")], {NCCL: (900, 900)})

    assert (rank.group().enqueued_seq, rank.group().op) == (900, "all_reduce")


def test_a_report_is_bounded_and_the_groups_that_wait_go_first() -> None:
    rank = Rank(world_size=4096)
    keys: list[CounterKey] = [("gloo", number) for number in range(1, 60)]
    members = {str(key[1]): GroupMembers(ranks=tuple(range(1000))) for key in keys[:20]}
    members |= {str(key[1]): GroupMembers(ranks=(0, 1)) for key in keys[20:]}
    counters = {key: (2, 1 if key[1] == 59 else 2) for key in keys}
    for _ in range(2):
        rank.see(counters)
    rank.learn([entry(2, key=key, group=str(key[1]), retired=key[1] != 59) for key in keys], counters, members)

    groups = rank.report().groups
    assert len(groups) <= MAX_GROUPS
    assert sum(len(group.ranks) for group in groups) <= 4096
    assert groups[0].group == "59"


@pytest.mark.parametrize(
    ("stack", "phases", "phase"),
    [
        ([USER], (), Phase.OTHER),
        ([("/torch/optim/adamw.py", 1, "step"), USER], (), Phase.OPTIMIZER),
        ([("/torch/optim/adamw.py", 1, "step"), USER], (Phase.EVAL,), Phase.EVAL),
        ([USER], (Phase.EVAL, Phase.CHECKPOINT), Phase.CHECKPOINT),
        ([C10D, USER], (Phase.EVAL,), Phase.BARRIER),
    ],
)
def test_a_mark_wins_over_the_stack_but_a_collective_over_both(
    rank: Rank, stack: list[StackLine], phases: tuple[Phase, ...], phase: Phase
) -> None:
    rank.see(stack=stack, phases=phases)

    assert rank.report().phase is phase


def test_a_rank_without_a_process_group_is_starting_until_it_has_had_one(rank: Rank) -> None:
    rank.see(has_group=False)
    assert rank.report().phase is Phase.STARTING

    rank.see(has_group=True)
    rank.see(has_group=False)
    assert rank.report().phase is Phase.OTHER


def test_waiting_for_a_handle_is_a_barrier_though_no_frame_shows_it(rank: Rank) -> None:
    wait_at_seq_7(rank)
    rank.see({GLOO: (8, 7)})

    assert rank.report().phase is Phase.BARRIER


def test_a_phase_s_time_runs_without_a_break(rank: Rank) -> None:
    for _ in range(4):
        rank.see(stack=[C10D, USER])
    assert rank.report().phase_s == pytest.approx(3 * TICK_S)

    rank.see(stack=[USER])
    assert rank.report().phase_s == 0.0


def test_a_phase_within_steps_does_not_outlast_a_step(rank: Rank) -> None:
    """Samples of fast steps may all come upon backward: 25 s of it were reported at 16 steps a second."""
    marks = [StepMark(4 * number, None, None, None, 4 * number) for number in range(1, 9)]
    for mark in marks:
        rank.see(stack=[BACKWARD, USER], step=mark)
    assert rank.report().phase is Phase.BACKWARD
    assert rank.report().phase_s == 0.0

    for _ in range(3):
        rank.see(stack=[BACKWARD, USER], step=marks[-1])
    assert rank.report().phase_s == pytest.approx(3 * TICK_S), "it stands in this one"


def test_identity_place_and_step_are_passed_on(rank: Rank) -> None:
    rank.see(step=StepMark(step=12, loss=2.5, epoch=1, loss_first=5.5, steps_done=12))

    report = rank.state.report(probe_cpu_s=0.25, answered_request_id=9)
    assert (report.rank, report.local_rank, report.world_size, report.pid) == (2, 0, 4, 7)
    assert (report.job_id, report.attempt, report.report_seq) == ("gpt", 1, 1)
    assert report.place == Place(file="/home/me/train.py", line=57, function="main")
    assert (report.step, report.epoch, report.loss, report.loss_first, report.steps_done) == (12, 1, 2.5, 5.5, 12)
    assert (report.probe_cpu_s, report.answered_request_id) == (0.25, 9)
    assert rank.report().report_seq == 2


@pytest.mark.parametrize("step", [-1, 2**63])
def test_a_step_that_no_counter_can_hold_is_left_out(rank: Rank, step: int) -> None:
    rank.see(step=StepMark(step=step, loss=None, epoch=step, loss_first=None, steps_done=1))

    assert (rank.report().step, rank.report().epoch) == (None, None)


def test_a_default_group_made_anew_counts_from_nothing(rank: Rank) -> None:
    old, new = {GLOO: (60, 60)}, {GLOO: (60, 60), ("gloo", 1): (1, 0)}
    rank.see(old)
    rank.learn([entry(60)], old)
    assert rank.group().enqueued_seq == 60

    rank.see(old, has_group=False)
    assert rank.group().enqueued_seq == 60, "the last word of a group stands until there is another"

    rank.see(old, num_openings=2)
    assert rank.group() == GroupReport(group=DEFAULT_GROUP)
    assert rank.wants_dump()

    rank.see(new, num_openings=2)
    rank.see(new, num_openings=2)
    rank.learn([entry(60), entry(1, key=("gloo", 1), retired=False)], new)
    assert (rank.group().enqueued_seq, rank.group().completed_seq, rank.group().is_waiting) == (1, 0, True)


def test_groups_made_anew_have_a_name_of_their_own(rank: Rank) -> None:
    pair: CounterKey = ("gloo", 1)
    old, members = {GLOO: (60, 60), pair: (9, 9)}, {**ALL, "1": GroupMembers((0, 2))}
    rank.see(old, num_worlds=1)
    rank.learn([entry(60), entry(9, group="1", key=pair)], old, members)
    assert [group.group for group in rank.report().groups] == ["0", "1"]

    # A default group may be made and destroyed between two samples.
    rank.see(old, num_worlds=3)
    assert rank.report().groups == [GroupReport(group=DEFAULT_GROUP)]

    new = {**old, ("gloo", 2): (5, 5), ("gloo", 3): (1, 1)}
    rank.see(new, num_worlds=3)
    again = [entry(5, key=("gloo", 2)), entry(1, group="1", key=("gloo", 3))]
    rank.learn(again, new, {**ALL, "1": GroupMembers((2, 3))})
    assert [(group.group, group.enqueued_seq, group.ranks) for group in rank.report().groups] == [
        ("0", 5, []),
        ("1#3", 1, [2, 3]),
    ]
    assert {call.group for call in rank.report().arrivals} <= {"0", "1#3"}


def test_counted_steps_are_told_apart_from_said_ones_and_end_the_start(rank: Rank) -> None:
    rank.see(has_group=False)
    assert rank.report().phase is Phase.STARTING

    rank.see(has_group=False, step=StepMark(2, None, None, None, 2, is_counted=True))

    report = rank.report()
    assert (report.step, report.is_step_counted, report.phase) == (2, True, Phase.OTHER)


def test_half_of_the_gap_between_two_samples_is_of_each_state() -> None:
    rank = Rank()
    rank.see({GLOO: (5, 5)}, after_s=0.2)
    for _ in range(4):
        rank.see({GLOO: (6, 5)}, after_s=0.1)
        rank.see({GLOO: (6, 6)}, after_s=0.1)
    assert rank.report().waited_s == pytest.approx(0.4)


def test_a_rank_without_input_that_answers_the_others_neither_waits_nor_comes_late() -> None:
    rank = Rank()
    joining = [("/torch/distributed/algorithms/join.py", 1, "__exit__"), USER]
    for _ in range(5):
        rank.see({GLOO: (6, 5)}, stack=joining)
    assert rank.report().waited_s == 0.0
    assert rank.report().arrivals == []


@pytest.mark.parametrize(
    ("calls", "is_open"),
    [
        ([("nccl:send 0->1", True)], False),
        ([("nccl:send 0->1", True), ("nccl:recv 0<-1", False)], True),
        ([("nccl:recv 0<-1", False), ("nccl:send 0->1", True)], True),
        # What a batch consists of stays open for ever; its end tells.
        ([("nccl:send 0->1", False), ("nccl:recv 0<-1", False), ("nccl:coalesced", True)], False),
        ([("nccl:send 0->1", False), ("nccl:coalesced", False)], True),
        ([("nccl:send 0->1", False), ("nccl:coalesced", True), ("nccl:send 0->1", False)], True),
        ([("nccl:coalesced", False), ("nccl:send 0->1", False), ("nccl:coalesced", True)], True),
    ],
)
def test_sends_and_receives_in_the_recorder_are_open_until_they_or_their_batch_are_over(
    rank: Rank, calls: list[tuple[str, bool]], *, is_open: bool
) -> None:
    rank.see({NCCL: (8, 8)})
    transfers = [entry(8, key=NCCL, op=op, retired=retired, is_p2p=True) for op, retired in calls]
    rank.learn([entry(8, key=NCCL), *transfers], {NCCL: (8, 8)})
    assert rank.report().has_open_transfers == is_open


@pytest.mark.parametrize(("on_gpu_us", "waited_frac"), [(-1, 0.0), (5_000, 0.05), (50_000, 0.5)])
def test_with_nccl_a_rank_waits_as_long_as_its_gpu_is_in_calls_though_one_is_always_pending(
    rank: Rank, on_gpu_us: int, waited_frac: float
) -> None:
    for seq in range(1, 400):
        counters = {NCCL: (seq + 1, seq)}
        rank.see(counters)
        if rank.wants_dump():
            ring = [entry(one, key=NCCL, on_gpu_us=on_gpu_us) for one in range(max(1, seq - 63), seq + 1)]
            rank.learn([*ring, entry(seq + 1, key=NCCL, retired=False)], counters)

    found = rank.report()
    assert found.waited_s / found.observed_s == pytest.approx(waited_frac, abs=0.05)


@pytest.mark.parametrize(("has_begun", "phase"), [(None, Phase.BARRIER), (True, Phase.BARRIER), (False, Phase.OTHER)])
def test_a_rank_whose_gpu_is_in_work_before_a_call_is_not_in_that_call(
    rank: Rank, has_begun: bool | None, phase: Phase
) -> None:
    for _ in range(3):
        rank.see({NCCL: (8, 7)})
    rank.learn([entry(7, key=NCCL), entry(8, key=NCCL, retired=False, has_begun=has_begun)], {NCCL: (8, 7)})
    before_s = rank.report().waited_s
    for _ in range(10):
        rank.see({NCCL: (8, 7)})

    found = rank.report()
    assert (found.phase, found.waited_s > before_s) == (phase, has_begun is not False)
