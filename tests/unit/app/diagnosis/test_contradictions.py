"""Calls that do not fit: the first seq at which ranks differ, who is the odd one, and who is only a victim."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.aborts import DTYPE_BYTES, _pieces
from app.diagnosis.causes import Cause
from app.diagnosis.diagnoser import Diagnoser, Diagnosis
from app.diagnosis.verdicts import CallCounts, Verdict
from app.model.cluster import Cluster
from app.view.verdict_hints import hint
from app.view.verdict_text import sentence
from ddpcore.wire import PastCall, PeerCall, Phase, Place, StepCalls
from tests.support.node_reports import (
    PLACE,
    dead_worker,
    group_report,
    job_status,
    node_report,
    rank_report,
    worker_report,
)
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.reports import WorkerReport
    from ddpcore.wire import GroupReport

ALL_REDUCE, BROADCAST, BARRIER = ("all_reduce", 97, "Float"), ("broadcast", 16, "Float"), ("barrier", -1, "")
OVERFLOW = (
    "gloo::EnforceNotMet: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:451] "
    "op.preamble.length <= op.nbytes. 88 vs 4"
)
LOST_PEER = "RuntimeError: Connection closed by peer"

Made = tuple[str, int, str]


def in_call(
    calls: Sequence[Made], *, completed: int, first: int = 20, waiting_s: float = 3.0, **fields: Any
) -> GroupReport:
    """Return a rank that has made these calls, the first of them at seq `first`, and waits since seq `completed`."""
    past = [PastCall(first + place, *call) for place, call in enumerate(calls)]
    op, num_elements, dtype = calls[-1]
    return group_report(
        past[-1].seq,
        waiting_s,
        op=op,
        completed_seq=completed,
        sizes=[[num_elements]] if num_elements >= 0 else [],
        dtypes=[dtype] if dtype else [],
        past=past[-16:],
        **fields,
    )


def judged(*workers: WorkerReport, looks: int = 1) -> Diagnosis:
    """Return what is said of a job on one node."""
    cluster, diagnoser = Cluster(["n0"]), Diagnoser()
    num_ranks = len(workers)
    status = job_status(0, world_size=num_ranks, num_nodes=1, local_world_size=num_ranks)
    seen = []
    for look in range(looks):
        now_s = 1000.0 + look
        cluster.apply("n0", node_report(1 + look, [status], list(workers)), now_s)
        seen.append(diagnoser.observe(cluster, now_s))
        seen[-1].validate()
    return seen[-1]


def rank_in(rank: int, num_ranks: int, group: GroupReport, **fields: Any) -> WorkerReport:
    return worker_report(rank, rank_report(rank, num_ranks, groups=[group], **fields))


def only(diagnosis: Diagnosis) -> Verdict:
    (verdict,) = diagnosis.verdicts
    return verdict


def test_a_forward_through_ddp_on_one_rank_is_named_though_that_rank_is_one_call_further() -> None:
    others = in_call([ALL_REDUCE, BROADCAST, BROADCAST, ALL_REDUCE], completed=22)
    alone = in_call([ALL_REDUCE, BROADCAST, BROADCAST, BROADCAST, ("broadcast", 1, "Long")], completed=22)
    verdict = only(
        judged(
            rank_in(0, 3, alone, phase=Phase.FORWARD),
            *(rank_in(rank, 3, others, phase=Phase.BACKWARD) for rank in (1, 2)),
        )
    )

    assert (verdict.cause, verdict.culprits, verdict.waiting) == (Cause.MISMATCH, (0,), (1, 2))
    assert verdict.seq == 23
    assert [(side.ranks, side.op) for side in verdict.sides] == [((0,), "broadcast"), ((1, 2), "all_reduce")]
    assert "model.module" in hint(verdict, None)


def test_the_line_of_a_main_thread_that_has_gone_on_is_not_that_of_another_thread_s_barrier() -> None:
    others = in_call([ALL_REDUCE, ALL_REDUCE], completed=20)
    ahead = in_call([ALL_REDUCE, BARRIER, ALL_REDUCE], completed=20)
    verdict = only(judged(rank_in(0, 3, others), rank_in(1, 3, ahead), rank_in(2, 3, others)))

    assert [(side.ranks, side.op, side.place is None) for side in verdict.sides] == [
        ((1,), "barrier", True),
        ((0, 2), "all_reduce", False),
    ]


@given(
    num_ranks=st.integers(2, 6),
    data=st.data(),
    common=st.lists(st.sampled_from([ALL_REDUCE, BROADCAST, BARRIER]), min_size=1, max_size=5),
    differing=st.sampled_from(
        [
            (ALL_REDUCE, BROADCAST),
            (BARRIER, ALL_REDUCE),
            (ALL_REDUCE, ("all_reduce", 1, "Float")),
            (ALL_REDUCE, ("all_reduce", 97, "Double")),
            (BROADCAST, BARRIER),
        ]
    ),
)
def test_whoever_is_further_on_the_first_difference_and_its_odd_rank_are_found(
    num_ranks: int, data: st.DataObject, common: list[Made], differing: tuple[Made, Made]
) -> None:
    odd = data.draw(st.integers(0, num_ranks - 1))
    first_difference = 20 + len(common)
    workers = []
    for rank in range(num_ranks):
        further = data.draw(st.lists(st.sampled_from([ALL_REDUCE, BROADCAST, BARRIER]), max_size=2))
        calls = [*common, differing[rank == odd], *further]
        workers.append(rank_in(rank, num_ranks, in_call(calls, completed=first_difference - 1)))

    verdict = only(judged(*workers))

    assert (verdict.cause, verdict.seq) == (Cause.MISMATCH, first_difference)
    assert verdict.culprits == ((odd,) if num_ranks > 2 else (0, 1))


@pytest.mark.parametrize("first", [1, 20])
def test_ranks_that_have_called_the_same_do_not_differ_wherever_they_are(first: int) -> None:
    calls = [BROADCAST, ALL_REDUCE, BARRIER, ALL_REDUCE]
    waiting = in_call(calls, completed=first + 2, first=first)
    before = group_report(first + 1, past=[PastCall(first, *BROADCAST), PastCall(first + 1, *ALL_REDUCE)])

    diagnosis = judged(rank_in(0, 2, waiting), rank_in(1, 2, before), looks=3)

    assert Cause.MISMATCH not in {verdict.cause for verdict in diagnosis.verdicts}


def test_sources_that_differ_are_told_with_what_each_rank_passes() -> None:
    waits = [in_call([BROADCAST], completed=19, root=root) for root in (0, 0, 2)]
    verdict = only(judged(*(rank_in(rank, 3, wait) for rank, wait in enumerate(waits))))

    assert (verdict.culprits, [side.root for side in verdict.sides]) == ((2,), [2, 0])
    assert "rank 2 calls broadcast #20 with src=2 at" in sentence(verdict)
    assert "ranks 0-1 call broadcast #20 with src=0 at" in sentence(verdict)


def test_of_two_sources_nobody_is_blamed_while_a_third_ranks_is_unknown() -> None:
    workers = [rank_in(rank, 3, in_call([BROADCAST], completed=19, root=rank)) for rank in (0, 1)]
    gone_on = in_call([BROADCAST, BARRIER], completed=20)
    verdict = only(judged(*workers, rank_in(2, 3, gone_on)))

    assert (verdict.cause, verdict.culprits, verdict.seq) == (Cause.MISMATCH, (), 20)
    assert [side.ranks for side in verdict.sides] == [(0,), (1,)]


def test_a_call_that_is_over_for_the_rank_that_made_another_one_differs_all_the_same() -> None:
    others = in_call([ALL_REDUCE, BARRIER], completed=20)
    ahead = in_call([ALL_REDUCE, BROADCAST, BARRIER], completed=21)
    verdict = only(judged(rank_in(0, 3, ahead), *(rank_in(rank, 3, others) for rank in (1, 2))))

    assert (verdict.cause, verdict.culprits, verdict.seq) == (Cause.MISMATCH, (0,), 21)


def test_reductions_that_differ_while_ranks_wait_are_told() -> None:
    waits = [in_call([ALL_REDUCE], completed=19, reduce_op=name) for name in ("SUM", "SUM", "MAX")]
    verdict = only(judged(*(rank_in(rank, 3, wait) for rank, wait in enumerate(waits))))

    assert verdict.culprits == (2,)
    assert "op=MAX" in sentence(verdict)


def test_calls_by_step_tell_who_has_made_one_fewer_and_since_when() -> None:
    def steps(missing_from: int) -> list[StepCalls]:
        return [StepCalls(step, 2 * step - (step >= missing_from)) for step in (4, 8, 9, 10)]

    others = in_call([ALL_REDUCE] * 3, completed=21, steps=steps(99))
    fewer = in_call([ALL_REDUCE, ALL_REDUCE, BARRIER], completed=21, steps=steps(9))
    verdict = only(judged(rank_in(0, 3, others), rank_in(1, 3, fewer), rank_in(2, 3, others)))

    assert (verdict.culprits, verdict.counts) == ((1,), CallCounts(equal_step=8, difference=-1))
    assert "rank 1 has made 1 call fewer than ranks 0, 2 since step 8" in sentence(verdict)


def test_the_last_step_in_common_is_told_where_all_have_made_the_same_calls() -> None:
    others = in_call([ALL_REDUCE], completed=19, steps=[StepCalls(9, 18), StepCalls(10, 19)])
    fewer = in_call([BARRIER], completed=19, steps=[StepCalls(8, 17), StepCalls(9, 18)])
    verdict = only(judged(rank_in(0, 2, others), rank_in(1, 2, fewer)))

    assert verdict.counts == CallCounts(equal_step=9, difference=0)
    assert "as far as known (up to step 9) they made the same number of calls" in sentence(verdict)


def ended(num_ranks: int, groups: dict[int, GroupReport], aborted: int, lengths: str = "88 vs 4") -> Verdict:
    """Return what is said once gloo has ended one rank and the others lost it."""
    workers = []
    for rank in range(num_ranks):
        report = rank_report(rank, num_ranks, groups=[groups[rank]] if rank in groups else [])
        end: dict[str, Any] = (
            {"signal": 6, "error": OVERFLOW.replace("88 vs 4", lengths)}
            if rank == aborted
            else {"code": 1, "error": LOST_PEER}
        )
        workers.append(dead_worker(rank, report, age_s=3.0 if rank == aborted else 2.9, **end))
    return only(judged(*workers, looks=3))


LARGE: Made = ("all_reduce", 22, "Float")
SMALL: Made = ("all_reduce", 1, "Float")
HUGE: Made = ("all_reduce", 4_160, "Float")
LARGER: Made = ("all_reduce", 41_600, "Float")


def test_a_rank_that_gloo_has_ended_is_a_victim_of_the_odd_one() -> None:
    groups = {rank: in_call([call], completed=19) for rank, call in ((0, SMALL), (1, LARGE), (2, SMALL))}
    verdict = ended(3, groups, aborted=0)

    assert (verdict.cause, verdict.culprits, verdict.aborted) == (Cause.MISMATCH, (1,), (0,))
    assert "rank 1 calls all_reduce #20 with 22 elements" in sentence(verdict)


def test_a_rank_that_gloo_has_ended_before_it_reported_has_passed_less_than_another() -> None:
    groups = {1: in_call([LARGE], completed=19), 2: in_call([SMALL], completed=19), 0: group_report(18)}
    verdict = ended(3, groups, aborted=0)

    assert (verdict.culprits, [side.ranks for side in verdict.sides]) == ((1,), [(1,), (0, 2)])


def test_the_only_rank_whose_call_is_unknown_is_the_odd_one_where_all_others_agree() -> None:
    small = {0: in_call([SMALL], completed=19), 2: in_call([SMALL], completed=19), 1: group_report(18)}
    large = {0: in_call([LARGE], completed=19), 2: in_call([LARGE], completed=19), 1: group_report(18)}

    assert ended(3, small, aborted=0).culprits == (1,)
    assert ended(3, large, aborted=1, lengths="16 vs 4").culprits == (1,)
    assert ended(3, small, aborted=1).culprits == (), "it was sent more than the others pass"


def test_where_a_rank_stood_before_it_made_the_call_is_not_told_as_the_place_of_the_call() -> None:
    before = Place("/job/train.py", 7, "prepare")
    small = in_call([SMALL], completed=19, is_waiting=False)
    dead = dead_worker(0, rank_report(0, 3, groups=[small], place=before), signal=6, error=OVERFLOW, age_s=3.0)
    early = rank_report(1, 3, groups=[group_report(18)], place=before)
    others = [dead_worker(1, early, age_s=2.9, signal=15), lost(2, 3, [SMALL])]
    verdict = only(judged(dead, *others, looks=3))

    assert (verdict.culprits, verdict.place) == ((1,), None)
    assert [(side.ranks, side.place) for side in verdict.sides] == [((0, 2), PLACE)]
    assert "train.py:7" not in sentence(verdict)


@pytest.mark.parametrize(
    ("of_odd", "shown"),
    [
        (
            group_report(18),
            "ranks 0, 2 call all_reduce #20 at train.py:42 in train_step, rank 1 with another size or type at ",
        ),
        (in_call([SMALL], completed=19, is_waiting=False), "rank 1 calls all_reduce #20 with 1 element at "),
    ],
    ids=["its call is not known", "its call is known"],
)
def test_the_line_at_which_gloo_ended_a_rank_is_that_of_its_call(of_odd: GroupReport, shown: str) -> None:
    before, at_end = Place("/job/train.py", 7, "prepare"), Place("/job/train.py", 11, "extra")
    overflow = OVERFLOW.replace("88 vs 4", "16 vs 4")
    report = rank_report(1, 3, groups=[of_odd], place=before)
    dead = dead_worker(1, report, signal=6, error=overflow, age_s=3.0, place=at_end)
    verdict = only(judged(lost(0, 3, [LARGE]), dead, lost(2, 3, [LARGE]), looks=3))

    assert (verdict.culprits, verdict.place) == ((1,), at_end)
    assert f"{shown}train.py:11 in extra" in sentence(verdict)
    assert "the lines differ" in hint(verdict, None)


def test_the_line_at_which_gloo_ended_a_rank_is_shown_where_it_is_not_known_whose_call_differs() -> None:
    at_end = Place("/job/train.py", 11, "extra")
    workers = [
        dead_worker(rank, rank_report(rank, 4, groups=[group_report(18)]), age_s=2.9, code=1, error=LOST_PEER)
        for rank in (0, 1, 3)
    ]
    dead = dead_worker(
        2, rank_report(2, 4, groups=[group_report(18)]), signal=6, error=OVERFLOW, place=at_end, age_s=3.0
    )
    verdict = only(judged(*workers, dead, looks=3))

    assert (verdict.culprits, verdict.place) == ((), at_end)
    assert "whose call differs is not known; rank 2 ended at train.py:11 in extra" in sentence(verdict)


def test_of_two_ranks_neither_is_blamed_alone() -> None:
    groups = {0: in_call([SMALL], completed=19), 1: in_call([LARGE], completed=19)}

    assert ended(2, groups, aborted=0).culprits == (0, 1)
    assert ended(2, {}, aborted=0).culprits in ((), (0, 1))


def test_nobody_is_blamed_where_only_the_end_is_known() -> None:
    verdict = ended(4, {rank: group_report(18) for rank in range(4)}, aborted=2)

    assert (verdict.cause, verdict.culprits, verdict.aborted) == (Cause.MISMATCH, (), (2,))
    assert "gloo ended rank 2 (SIGABRT)" in sentence(verdict)
    assert "is not known" in sentence(verdict)


def lost(rank: int, num_ranks: int, calls: list[Made], phase: Phase = Phase.BARRIER) -> WorkerReport:
    """Return a rank that lost the one that gloo ended, with its last calls: the newest is not over."""
    group = in_call(calls, completed=19 + len(calls), is_waiting=False)
    facts = {"groups": [group], "report_seq": 2, "phase": phase, "raised": LOST_PEER, "is_ending": True}
    return worker_report(rank, rank_report(rank, num_ranks, **facts))


@pytest.mark.parametrize(
    ("made", "lengths", "size", "is_shifted"),
    [
        # With three ranks up to six elements come in pieces of one.
        ([LARGE, SMALL, LARGE], "16 vs 4", -1, True),
        ([SMALL, SMALL, LARGE], "16 vs 4", -1, False),
        ([LARGER, HUGE, LARGER], "27736 vs 2776", 4_160, True),
        ([LARGE, LARGE, LARGE], "16 vs 4", None, False),
    ],
    ids=["usual calls", "a first large one", "pieces of one size of calls", "a call that nobody else makes"],
)
def test_the_lengths_of_the_messages_tell_what_a_dead_rank_had_called(
    made: list[Made], lengths: str, size: int | None, *, is_shifted: bool
) -> None:
    overflow = OVERFLOW.replace("88 vs 4", f"{lengths}. Received data size doesn't match expected size.")
    dead = dead_worker(1, rank_report(1, 3, groups=[group_report(17)]), signal=6, error=overflow, age_s=1.0)
    verdict = only(judged(lost(0, 3, made), dead, lost(2, 3, made), looks=3))

    assert (verdict.culprits, verdict.aborted, verdict.seq, verdict.op) == ((1,), (1,), 22, "all_reduce")
    assert [(side.ranks, side.num_elements) for side in verdict.sides] == [((1,), size), ((0, 2), made[-1][1])][
        size is None :
    ]
    assert verdict.is_shifted is is_shifted
    assert ("has left out or doubled one" in sentence(verdict)) is (is_shifted and size != -1)


def test_of_calls_that_ddp_makes_ahead_the_one_that_gloo_ended_is_not_guessed() -> None:
    made = [SMALL, LARGE, LARGE]
    overflow = OVERFLOW.replace("88 vs 4", "16 vs 4. Received data size doesn't match expected size.")
    dead = dead_worker(1, rank_report(1, 3, groups=[group_report(17)]), signal=6, error=overflow, age_s=1.0)
    one, other = (lost(rank, 3, made, Phase.BACKWARD) for rank in (0, 2))
    before = rank_in(2, 3, group_report(18))
    verdict = only(judged(one, dead, before, looks=3))

    assert (verdict.culprits, verdict.aborted, verdict.seq, verdict.sides) == ((), (1,), None, ())
    # Where the others have called the same all along, it is the odd one.
    assert only(judged(one, dead, other, looks=3)).culprits == (1,)
    assert "different sizes or types to one all_reduce" in sentence(verdict)


@pytest.mark.parametrize("has_told", [True, False], ids=["receiver has told of it", "receiver has not"])
@pytest.mark.parametrize("has_gone_on", [True, False], ids=["sender has gone on", "sender has not"])
def test_a_receive_with_room_for_less_than_its_send_is_told_as_those_two(*, has_told: bool, has_gone_on: bool) -> None:
    overflow = OVERFLOW.replace("88 vs 4", "4000 vs 2000. Received data size doesn't match expected size.")
    sends = PeerCall("send", 1, number=16, num_bytes=(2000, 2000, 4000))
    if has_gone_on:
        sends = PeerCall("send", 1, number=17, num_bytes=(2000, 4000, 2000))
    receives = PeerCall("recv", 0, number=15 + has_told, num_bytes=(2000, 2000))
    group = {"groups": [in_call([BROADCAST], completed=20, is_waiting=False)]}
    sender = rank_report(0, 2, peer_calls=[sends], raised=LOST_PEER, is_ending=True, **group)
    dead = dead_worker(1, rank_report(1, 2, peer_calls=[receives], **group), signal=6, error=overflow, age_s=1.0)
    verdict = only(judged(worker_report(0, sender), dead, looks=3))

    assert (verdict.cause, verdict.culprits, verdict.aborted, verdict.op) == (Cause.MISMATCH, (0, 1), (1,), "send")
    assert sentence(verdict).startswith(
        "rank 0 calls send #16 to rank 1 with 4,000 bytes, rank 1 calls recv #16 from rank 0 with room for 2,000 bytes:"
        " gloo ended rank 1 (SIGABRT)"
    )
    assert "as large as that of the send" in hint(verdict, None)


def killed_early(rank: int, num_ranks: int, last_seq: int) -> WorkerReport:
    """Return a rank that its launcher ended before it reported its last calls."""
    report = rank_report(rank, num_ranks, groups=[group_report(last_seq)])
    return dead_worker(rank, report, age_s=0.5, signal=15)


@pytest.mark.parametrize("num_unknown", [1, 2])
def test_a_dead_rank_that_expected_what_the_others_pass_counts_with_them(num_unknown: int) -> None:
    made = [LARGE, SMALL, LARGE, SMALL]
    overflow = OVERFLOW.replace("88 vs 4", "16 vs 4. Received data size doesn't match expected size.")
    num_ranks = 2 + num_unknown
    dead = dead_worker(0, rank_report(0, num_ranks, groups=[group_report(17)]), signal=6, error=overflow, age_s=1.0)
    others = [killed_early(rank, num_ranks, 17) for rank in range(1, num_ranks - 1)]
    verdict = only(judged(dead, *others, lost(num_ranks - 1, num_ranks, made), looks=3))

    assert (verdict.aborted, verdict.seq) == ((0,), 23)
    assert verdict.culprits == ((1,) if num_unknown == 1 else ())


@pytest.mark.parametrize(("phase", "culprits"), [(Phase.BARRIER, (0,)), (Phase.OTHER, ())])
def test_of_calls_that_a_program_makes_before_it_waits_for_any_the_one_that_gloo_ended_is_not_guessed(
    phase: Phase, culprits: tuple[int, ...]
) -> None:
    large: Made = ("all_reduce", 1000, "Float")
    early = group_report(17)
    dead = [
        dead_worker(
            rank, rank_report(rank, 3, groups=[early]), signal=6, error=OVERFLOW.replace("88 vs 4", pair), age_s=3.0
        )
        for rank, pair in ((1, "668 vs 68"), (2, "668 vs 68"))
    ]
    made: list[Made] = [("all_reduce", 100, "Float"), large]
    verdict = only(judged(lost(0, 3, made, phase), *dead, looks=3))

    assert (verdict.aborted, verdict.culprits) == ((1, 2), culprits)


def test_gloo_sends_what_all_gather_in_halves() -> None:
    assert _pieces(PastCall(1, "all_gather", 363, "Float"), 3) == {726}
    assert _pieces(PastCall(1, "all_gather", 5, "Byte"), 3) == {2, 3}
    overflow = OVERFLOW.replace("88 vs 4", "726 vs 66. Received data size doesn't match expected size.")
    made: list[Made] = [("all_gather", 33, "Float"), ("all_gather", 363, "Float"), ("all_gather", 363, "Float")]
    dead = dead_worker(1, rank_report(1, 3, groups=[group_report(17)]), signal=6, error=overflow, age_s=1.0)
    verdict = only(judged(lost(0, 3, made), dead, lost(2, 3, made), looks=3))

    assert verdict.culprits == (1,)
    assert [(side.ranks, side.num_elements) for side in verdict.sides] == [((1,), 33), ((0, 2), 363)]


@pytest.mark.parametrize("known", [(1, 2, 3), (1, 3)])
def test_sizes_of_an_all_gather_that_differ_tell_whose_call_gloo_aborted(known: tuple[int, ...]) -> None:
    sizes = {1: 10, 2: 10, 3: 40}
    overflow = OVERFLOW.replace("88 vs 4", "80 vs 20")
    dead = dead_worker(0, rank_report(0, 4, groups=[group_report(17)]), signal=6, error=overflow, age_s=3.0)
    others = [
        lost(rank, 4, [LARGE, ("all_gather", size, "Float")])
        if rank in known
        else dead_worker(rank, rank_report(rank, 4, groups=[group_report(17)]), age_s=2.9, signal=15)
        for rank, size in sizes.items()
    ]
    verdict = only(judged(dead, *others, looks=3))

    assert (verdict.culprits, verdict.sides[0].num_elements, verdict.sides[0].ranks) == ((3,), 40, (3,))
    assert set(verdict.sides[1].ranks) == {0, *known} - {3}


def test_what_the_first_report_of_an_abort_tells_gives_way_to_what_all_tell() -> None:
    cluster, diagnoser = Cluster(["n0"]), Diagnoser()
    status = job_status(0, world_size=3, num_nodes=1, local_world_size=3)
    made = [LARGE, SMALL, LARGE]
    overflow = OVERFLOW.replace("88 vs 4", "16 vs 4. Received data size doesn't match expected size.")
    dead = dead_worker(1, rank_report(1, 3, groups=[group_report(17)]), signal=6, error=overflow, age_s=0.1)
    before = rank_in(2, 3, group_report(18))
    seen = []
    for look, third in enumerate((before, lost(2, 3, made))):
        now_s = 1000.0 + 0.2 * look
        cluster.apply("n0", node_report(1 + look, [status], [lost(0, 3, made), dead, third]), now_s)
        seen.append(diagnoser.observe(cluster, now_s))

    assert [only(one).culprits for one in seen] == [(), (1,)]


@pytest.mark.parametrize(
    ("num_elements", "dtype", "num_members", "lengths"),
    [
        (161, "Float", 3, {108, 104}),
        (1, "Float", 2, {4}),
        (22, "Float", 3, {16, 8}),
        (4000, "Double", 2, {8000}),
        (2_000_000, "Float", 2, {1_000_000}),
        (10_000_000, "Float", 2, {1_000_000}),
    ],
)
def test_gloo_sends_a_reduction_in_pieces(num_elements: int, dtype: str, num_members: int, lengths: set[int]) -> None:
    assert _pieces(PastCall(1, "all_reduce", num_elements, dtype), num_members) == lengths
    assert _pieces(PastCall(1, "broadcast", num_elements, dtype), num_members) == {num_elements * DTYPE_BYTES[dtype]}


def test_the_network_is_not_suspected_on_one_machine() -> None:
    words_of = {(1, 1): "a kernel on its GPU", (1, 3): "compare the stacks", (2, 3): "check the network"}
    for (num_nodes, ranks_per_node), words in words_of.items():
        sim = SimCluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
        sim.run_to_step(20)
        sim.cut_network()
        sim.run(15)

        (verdict,) = sim.diagnosis.verdicts
        assert (verdict.cause, verdict.num_hosts) == (Cause.TRANSPORT, num_nodes)
        assert words in hint(verdict, None)


def test_the_group_that_is_named_holds_the_rank_that_is_named() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2, groups={"1": (0, 1), "2": (2, 3)}, program=_pairs_then_all)
    sim.run_to_step(5)
    sim.freeze(0)
    sim.freeze(1)
    sim.run(3)

    (verdict,) = sim.diagnosis.verdicts
    assert (verdict.cause, verdict.culprits) == (Cause.FROZEN, (0, 1))
    assert verdict.group in ("0", "1", "")
    assert set(verdict.waiting) == {2, 3}


def test_whoever_left_early_is_told_with_the_call_that_it_did_not_make() -> None:
    left = dead_worker(1, rank_report(1, 2, groups=[group_report(57)]), code=0, age_s=3.0)
    lost = rank_report(0, 2, groups=[group_report(58, op="all_reduce")])
    verdict = only(judged(dead_worker(0, lost, code=1, error=LOST_PEER, age_s=2.9), left, looks=3))

    assert (verdict.cause, verdict.culprits, verdict.op, verdict.seq) == (Cause.FEWER_CALLS, (1,), "all_reduce", 58)
    assert "without calling all_reduce #58" in sentence(verdict)


@pytest.mark.parametrize(
    ("file", "function", "seen"),
    [
        ("/usr/lib/python3.11/multiprocessing/util.py", "_exit_function", ""),
        ("/usr/lib/python3.11/multiprocessing/util.py", "_run_finalizers", ""),
        ("/usr/lib/python3.11/threading.py", "_shutdown", ""),
        ("/usr/lib/python3.11/concurrent/futures/process.py", "_python_exit", ""),
        ("/home/u/util.py", "step", "last seen at util.py:360 in step"),
    ],
)
def test_of_whoever_left_no_line_of_the_interpreter_s_end_is_named(file: str, function: str, seen: str) -> None:
    report = rank_report(1, 2, groups=[group_report(57)], place=Place(file, 360, function))
    left = dead_worker(1, report, code=0, age_s=3.0)
    lost = rank_report(0, 2, groups=[group_report(58, op="all_reduce")])
    verdict = only(judged(dead_worker(0, lost, code=1, error=LOST_PEER, age_s=2.9), left, looks=3))

    assert verdict.culprits == (1,)
    text = sentence(verdict)
    assert ("last seen" in text) is bool(seen)
    assert seen in text


def _pairs_then_all(rank: int) -> Iterator[Action]:
    for step in itertools.count(1):
        yield BeginStep(step)
        yield Work(Phase.FORWARD, 10, "train_step", 0.02)
        yield Call("all_reduce", 11, "train_step", "1" if rank < 2 else "2", sizes=((8,),))
        yield Call("all_reduce", 12, "train_step", sizes=((8,),))
        yield EndStep(step, 1.0, 0)
