"""What single reports prove, and what they do not: the corners that whole simulations seldom reach."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agent.wire.jobs import JobState
from agent.wire.logs import RootCause
from agent.wire.reports import OutsideLook, ProcessState
from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.diagnoser import Diagnoser, Diagnosis, JobDiagnosis
from app.diagnosis.rank_facts import STATES, Thresholds
from app.diagnosis.verdicts import Aftermath
from app.manual import markdown
from app.model.cluster import SETTLED_S, Cluster
from app.view.view import View
from ddpcore.wire import PastCall, PeerCall, PeerWait, Phase, Place, StepCalls
from tests.support.node_reports import dead_worker, group_report, job_status, node_report, rank_report, worker_report

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport

LOST_PEER = "RuntimeError: Connection closed by peer"


class Watched:
    """A job on nodes of two ranks each, and its diagnoser."""

    def __init__(self, num_nodes: int = 2, thresholds: Thresholds | None = None) -> None:
        self.names = [f"n{index}" for index in range(num_nodes)]
        self.world_size = 2 * num_nodes
        self.cluster = Cluster(self.names)
        self.diagnoser = Diagnoser(thresholds)
        self.now_s = 1000.0
        self.seq = 0

    def receive(self, *workers: WorkerReport, nodes: list[int] | None = None, **status: Any) -> Diagnosis:
        """Let nodes report, all with what they have of `workers`."""
        for node in range(len(self.names)) if nodes is None else nodes:
            self.seq += 1
            own = [worker for worker in workers if worker.rank // 2 == node]
            share = job_status(2 * node, world_size=self.world_size, num_nodes=len(self.names), **status)
            self.cluster.apply(self.names[node], node_report(self.seq, [share], own), self.now_s)
        return self.look()

    def tick(self, rank: int, *groups: Any, **fields: Any) -> WorkerReport:
        """Return a fresh report of a rank."""
        report = rank_report(rank, self.world_size, report_seq=self.seq + 1, groups=list(groups), **fields)
        return worker_report(rank, report)

    def look(self) -> Diagnosis:
        diagnosis = self.diagnoser.observe(self.cluster, self.now_s)
        diagnosis.validate()
        return diagnosis

    def job(self) -> JobDiagnosis:
        return self.look().jobs["job"]


def causes(diagnosis: Diagnosis) -> set[tuple[Cause, tuple[int, ...]]]:
    return {(verdict.cause, verdict.culprits) for verdict in diagnosis.verdicts}


def test_a_rank_is_missing_only_when_its_report_is_younger_than_the_wait() -> None:
    watched = Watched()
    waiting = [watched.tick(rank, group_report(5, 3.0)) for rank in (0, 2, 3)]
    known = watched.receive(*waiting, watched.tick(1, group_report(4)))

    (wait,) = known.waits
    assert (wait.waiting.tolist(), wait.missing.tolist(), wait.is_settled) == ([0, 2, 3], [1], True)

    stale = Watched()
    stale.receive(stale.tick(1, group_report(4)))
    stale.now_s += 0.3
    (wait,) = stale.receive(*[stale.tick(rank, group_report(5, 0.25)) for rank in (0, 2, 3)]).waits
    assert (wait.missing.tolist(), wait.is_settled) == ([], False)


def test_every_row_of_a_rank_that_is_seen_from_outside_has_the_line_of_the_verdict() -> None:
    watched = Watched()
    own, seen = Place("/work/train.py", 66, "main"), Place("/work/train.py", 63, "main")
    waiting = [watched.tick(rank, group_report(5, 3.0)) for rank in (0, 2, 3)]
    silent = watched.tick(1, group_report(4), place=own)
    assert silent.report is not None
    for outside, line in ((seen, seen), (None, own)):
        look = OutsideLook(silent.report.pid, outside)
        frozen = msgspec.structs.replace(silent, process=ProcessState.FROZEN, outside=look)
        watched.receive(*waiting, frozen)
        view = View(watched.cluster, watched.look(), watched.now_s)

        assert view.verdicts()[0].culprits == [1]
        lines = {view.ranks([1])[0].where, view.barriers()[0].missing_where, _shown_place(view.verdicts()[0].text)}
        assert lines == {f"train.py:{line.line} in main"}


def _shown_place(sentence: str) -> str:
    found = re.search(r"train\.py:\d+ in main", sentence)
    return "" if found is None else found[0]


def test_a_rank_that_was_never_heard_is_missing_after_a_while() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(5, 0.5)) for rank in (0, 2, 3)], worker_report(1))
    assert [wait.missing.tolist() for wait in watched.look().waits] == [[]]

    watched.now_s += 1.8
    assert [wait.missing.tolist() for wait in watched.look().waits] == [[1]]


def test_a_wait_that_one_member_has_behind_it_is_over_unless_the_operation_is_one_way() -> None:
    done = Watched()
    ahead = done.tick(1, group_report(6, 0.1))
    diagnosis = done.receive(*[done.tick(rank, group_report(5, 0.5)) for rank in (0, 2, 3)], ahead)
    assert [wait.seq for wait in diagnosis.waits] == [6]

    root = Watched()
    waiting = [root.tick(rank, group_report(5, 0.5, op="broadcast")) for rank in (0, 2)]
    diagnosis = root.receive(*waiting, root.tick(1, group_report(9, op="broadcast")), root.tick(3, group_report(4)))
    assert [(wait.seq, wait.missing.tolist()) for wait in diagnosis.waits] == [(5, [3])]


def test_several_seqs_of_one_group_lead_to_the_same_root() -> None:
    watched = Watched()
    watched.receive(
        watched.tick(0, group_report(7, 12.0)),
        watched.tick(2, group_report(6, 12.0, op="broadcast")),
        watched.tick(3, group_report(6, 12.0, op="broadcast")),
        watched.tick(1, group_report(5)),
    )

    diagnosis = watched.look()
    assert [(wait.seq, wait.missing.tolist()) for wait in diagnosis.waits] == [(6, [1]), (7, [1, 2, 3])]
    assert causes(diagnosis) == {(Cause.STRAGGLER, (1,))}
    assert diagnosis.verdicts[0].waiting == (0, 2, 3)


def test_a_member_that_leaves_a_group_does_not_wait_in_it_any_more() -> None:
    watched = Watched()
    watched.receive(watched.tick(0, group_report(5, 1.0), group_report(2, 3.0, group="7", ranks=[0, 1])))
    assert {wait.group for wait in watched.look().waits} == {"0", "7"}

    assert {wait.group for wait in watched.receive(watched.tick(0, group_report(5, 1.2))).waits} == {"0"}


def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.diagnosis.waits.MAX_WAITS", 3)
    watched = Watched()
    groups = [group_report(5, 1.0, group=str(index), ranks=[0, 1]) for index in range(1, 9)]

    assert len(watched.receive(watched.tick(0, *groups)).waits) == 3


def test_beyond_the_limit_of_waits_those_are_followed_that_the_others_lead_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.diagnosis.waits.MAX_WAITS", 2)
    watched = Watched(num_nodes=4)
    own = [group_report(5, group=str(rank), ranks=[rank, rank + 4]) for rank in range(4)]
    theirs = [watched.tick(rank, group_report(6, 20.0, group=str(rank), ranks=[rank, rank + 4])) for rank in range(4)]
    first, *held = [
        group_report(5 + (rank > 4), 20.5 if rank > 4 else None, group="9", ranks=[4, 5, 6, 7]) for rank in range(4, 8)
    ]
    stands = watched.tick(4, own[0], first, stood_s=20.0)

    found = watched.receive(
        *theirs, stands, *(watched.tick(5 + place, own[1 + place], group) for place, group in enumerate(held))
    )

    assert causes(found) == {(Cause.STRAGGLER, (4,))}


def test_a_rank_frozen_inside_a_collective_holds_it_up_though_it_has_called() -> None:
    watched = Watched()
    inside = watched.tick(1, group_report(5, 4.0))
    frozen = worker_report(1, inside.report, process=ProcessState.FROZEN, process_s=3.0)
    diagnosis = watched.receive(*[watched.tick(rank, group_report(5, 4.0)) for rank in (0, 2, 3)], frozen)

    assert causes(diagnosis) == {(Cause.FROZEN, (1,))}
    assert diagnosis.verdicts[0].waiting == (0, 2, 3)
    assert diagnosis.verdicts[0].for_s == pytest.approx(3.0)


def test_a_console_that_attaches_late_does_not_blame_who_has_not_been_heard_yet() -> None:
    watched = Watched()
    diagnosis = watched.receive(*[watched.tick(rank, group_report(5, 100.0)) for rank in (0, 1)], nodes=[0])
    assert causes(diagnosis) == set()

    late = [watched.tick(rank, group_report(4)) for rank in (2, 3)]
    assert causes(watched.receive(*late, nodes=[1])) == set()


def test_a_rank_that_never_reports_is_a_straggler_that_is_still_starting() -> None:
    watched = Watched()
    for _ in range(24):
        watched.receive(
            *[watched.tick(rank, group_report(5, watched.now_s - 999.0)) for rank in (0, 2, 3)], worker_report(1)
        )
        watched.now_s += 0.5

    diagnosis = watched.look()
    assert causes(diagnosis) == {(Cause.STRAGGLER, (1,))}
    assert "rank 1 is still starting" in View(watched.cluster, diagnosis, watched.now_s).headline().text


def test_a_node_that_no_longer_knows_the_job_has_lost_its_ranks() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank) for rank in range(4)])
    for _ in range(16):
        watched.now_s += 0.5
        watched.seq += 1
        watched.cluster.apply("n1", node_report(watched.seq, [], []), watched.now_s)
        watched.receive(watched.tick(0), watched.tick(1), nodes=[0])

    diagnosis = watched.look()
    assert causes(diagnosis) == {(Cause.NODE_LOST, (2, 3))}
    assert diagnosis.verdicts[0].for_s == pytest.approx(8.0)


def test_many_lost_nodes_are_told_in_one_sentence() -> None:
    watched = Watched(num_nodes=12)
    watched.receive(*[watched.tick(rank) for rank in range(24)])
    for _ in range(16):
        watched.now_s += 0.5
        watched.receive(watched.tick(0), nodes=[0])

    (verdict,) = watched.look().verdicts
    assert (verdict.cause, verdict.culprits) == (Cause.NODE_LOST, tuple(range(2, 24)))
    text = View(watched.cluster, watched.look(), watched.now_s).headline().text
    assert text.startswith("n1, n2 and 9 more have not reported for 8.0 s: ranks 2-23 are lost")


def test_many_deaths_of_one_kind_are_told_in_one_sentence() -> None:
    watched = Watched(num_nodes=12)
    diagnosis = watched.receive(*[dead_worker(rank, signal=11) for rank in range(24)])

    (verdict,) = diagnosis.verdicts
    assert verdict.culprits == tuple(range(24))


def test_ranks_that_are_killed_with_all_others_of_their_node_are_named_once_their_launcher_is_known_to_live() -> None:
    watched = Watched()
    killed = [dead_worker(rank, signal=9) for rank in (0, 1)]

    assert causes(watched.receive(*killed, watched.tick(2), watched.tick(3))) == set()
    watched.now_s += 1.1
    aged = [dead_worker(rank, signal=9, age_s=1.1) for rank in (0, 1)]
    assert causes(watched.receive(*aged, watched.tick(2), watched.tick(3))) == {(Cause.EXITED, (0, 1))}


def test_deaths_of_different_kinds_are_told_apart() -> None:
    watched = Watched()
    diagnosis = watched.receive(
        dead_worker(0, signal=11), dead_worker(1, signal=11), dead_worker(2, code=1, error="E: x")
    )

    assert causes(diagnosis) == {(Cause.EXITED, (0, 1)), (Cause.EXITED, (2,))}


def test_errors_that_differ_in_their_numbers_alone_are_one_end_of_all_in_the_words_of_the_first_rank() -> None:
    watched = Watched()
    dead = [
        dead_worker(rank, code=1, error=f"ValueError: no shard {7 * rank} for rank {rank}", age_s=0.1 * rank)
        for rank in (3, 1, 0, 2)
    ]
    (verdict,) = watched.receive(*dead).verdicts
    assert (verdict.culprits, verdict.is_everyone) == ((0, 1, 2, 3), True)
    assert verdict.exit is not None
    assert verdict.exit.error == "ValueError: no shard 0 for rank 0"

    watched = Watched()
    dead = [dead_worker(rank, code=1, error=f"{name}: 7") for rank, name in enumerate(("KeyError", "ValueError"))]
    assert causes(watched.receive(*dead)) == {(Cause.EXITED, (0,)), (Cause.EXITED, (1,))}


@pytest.mark.parametrize("at_s", [(0.1, 0.3), (0.3, 0.1)])
def test_of_an_error_that_all_ranks_raise_the_one_whose_problem_it_is_is_named(at_s: tuple[float, float]) -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(3)])
    watched.now_s += 1
    error = "ddpcore.errors.CheckpointDirectoryError: rank 1: /runs is in use by another run"
    followed = [dead_worker(rank, code=1, error=error, age_s=at_s[0]) for rank in (0, 2)]
    diagnosis = watched.receive(*followed, dead_worker(1, code=1, error=error, age_s=at_s[1]))

    assert causes(diagnosis) == {(Cause.EXITED, (1,))}
    assert diagnosis.verdicts[0].lost_connection == ()


def test_who_called_less_in_a_sub_group_is_known_by_that_group() -> None:
    watched = Watched()
    other = group_report(9, group="8", ranks=[2, 3])
    watched.receive(
        watched.tick(0, group_report(3, group="7", ranks=[0, 1])),
        watched.tick(1, group_report(2, group="7", ranks=[0, 1])),
        watched.tick(2, other),
        watched.tick(3, other),
    )
    watched.now_s += 1
    dead = [dead_worker(rank, code=0, age_s=0.5) for rank in (1, 2)]
    diagnosis = watched.receive(*dead, dead_worker(0, code=1, error=LOST_PEER, age_s=0.1), watched.tick(3, other))

    assert causes(diagnosis) == {(Cause.FEWER_CALLS, (1,))}


def test_who_left_early_is_named_with_the_call_it_never_made_though_nobody_was_seen_waiting() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    watched.now_s += 1
    victims = [dead_worker(rank, code=1, error=LOST_PEER, age_s=0.1) for rank in (0, 2, 3)]
    last = [watched.tick(rank, group_report(5), place=None).report for rank in (0, 2, 3)]
    workers = [msgspec.structs.replace(dead, report=report) for dead, report in zip(victims, last, strict=True)]
    victim = RootCause(0, "exited with code 1", LOST_PEER, where="train.py:44 in train", is_consequence=True)
    (verdict,) = watched.receive(dead_worker(1, code=0, age_s=0.3), *workers, root_cause=victim).verdicts

    assert (verdict.cause, verdict.culprits) == (Cause.FEWER_CALLS, (1,))
    assert (verdict.op, verdict.seq, verdict.waiting_place) == ("all_reduce", 5, Place("train.py", 44, "train"))


@pytest.mark.parametrize(("said", "named"), [("Rank 1", (1,)), ("Ranks 1, 3", (1, 3))])
def test_who_did_not_come_to_a_monitored_barrier_is_named_as_torch_names_it(said: str, named: tuple[int, ...]) -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    watched.now_s += 5.0
    gave_up = dead_worker(0, code=1, error=f"RuntimeError: [Rank 0]: {said} failed to pass monitoredBarrier in 4000 ms")
    came = "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv"
    asleep = [watched.tick(rank, group_report(4)) for rank in (1, 3)]
    (verdict,) = watched.receive(gave_up, dead_worker(2, code=1, error=came), *asleep).verdicts

    assert (verdict.cause, verdict.culprits, verdict.op) == (Cause.STRAGGLER, named, "monitored_barrier")
    assert verdict.place is not None
    assert verdict.aftermath == Aftermath((0,), is_timeout=True, timeout_s=4.0)

    for rank in named:
        lost = [dead_worker(rank, code=1, error=came)]
        other = Watched()
        other.receive(gave_up, *lost)
        assert not any(verdict.cause is Cause.STRAGGLER for verdict in other.look().verdicts)


def test_a_console_that_comes_after_a_time_out_names_who_had_not_called_and_never_who_waited() -> None:
    timed_out = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"
    for is_known in (True, False):
        watched = Watched()
        victims = [dead_worker(rank, code=1, error=timed_out, age_s=9.0) for rank in (0, 2, 3)]
        last = [watched.tick(rank, group_report(5)).report for rank in (0, 2, 3)]
        workers = [msgspec.structs.replace(dead, report=report) for dead, report in zip(victims, last, strict=True)]
        culprit = dead_worker(1, signal=15, age_s=8.8)
        if is_known:
            culprit = msgspec.structs.replace(culprit, report=watched.tick(1, group_report(4)).report)
        found = watched.receive(culprit, *workers, state=JobState.FAILED)

        assert causes(found) == ({(Cause.STRAGGLER, (1,))} if is_known else set())
        assert [verdict.waiting for verdict in found.verdicts] == [(0, 2, 3)] * is_known


def test_a_console_that_comes_after_a_time_out_tells_calls_that_did_not_fit() -> None:
    timed_out = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"
    watched = Watched()
    calls = ["all_reduce", "broadcast", "all_reduce", "all_reduce"]
    workers = [
        msgspec.structs.replace(
            dead_worker(rank, code=1, error=timed_out, age_s=9.0),
            report=watched.tick(rank, group_report(5, op=op)).report,
        )
        for rank, op in enumerate(calls)
    ]
    assert causes(watched.receive(*workers, state=JobState.FAILED)) == {(Cause.MISMATCH, (1,))}


def test_ranks_that_all_end_by_sigterm_are_not_blamed_before_their_launcher_has_ended() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    for second in range(1, 9):
        watched.now_s += 1.0
        found = watched.receive(*[dead_worker(rank, signal=15, age_s=float(second)) for rank in range(4)])
        assert causes(found) == set()
    asked = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    launcher = RootCause(-1, "the launcher exited with code 1", asked)
    ended = watched.receive(
        *[dead_worker(rank, signal=15, age_s=9.0) for rank in range(4)], state=JobState.FAILED, root_cause=launcher
    )
    assert causes(ended) == set()
    unknown = watched.receive(*[dead_worker(rank, signal=15, age_s=9.0) for rank in range(4)], state=JobState.FAILED)
    assert causes(unknown) == {(Cause.EXITED, (0,))}


def test_a_process_that_ended_nobody_knows_how_is_done() -> None:
    watched = Watched()
    watched.receive(worker_report(0, process=ProcessState.EXITED), dead_worker(1, signal=9, age_s=5.0))

    states = [STATES[code] for code in watched.job().states]
    assert states == [RankState.DONE, RankState.EXITED, RankState.STARTING, RankState.STARTING]


def test_a_mismatch_that_is_over_is_held_for_a_moment_and_then_forgotten() -> None:
    watched = Watched()
    calls = ["all_reduce", "broadcast", "all_reduce", "all_reduce"]
    watched.receive(*[watched.tick(rank, group_report(5, 1.0, op=op)) for rank, op in enumerate(calls)])
    assert causes(watched.look()) == {(Cause.MISMATCH, (1,))}

    watched.now_s += 0.3
    assert causes(watched.receive(*[watched.tick(rank, group_report(6)) for rank in range(4)])) == {
        (Cause.MISMATCH, (1,))
    }
    watched.now_s += 0.3
    assert causes(watched.receive(*[watched.tick(rank, group_report(7)) for rank in range(4)])) == set()


@pytest.mark.parametrize("sizes", [[[6]], []])
def test_equal_element_counts_and_unknown_ones_are_no_mismatch(sizes: list[list[int]]) -> None:
    watched = Watched()
    told = [[[2, 3]], sizes, [[6]], [[6]]]
    diagnosis = watched.receive(*[watched.tick(rank, group_report(5, 3.0, sizes=told[rank])) for rank in range(4)])

    assert causes(diagnosis) == set()


def test_a_wait_at_hand_names_what_the_late_rank_is_about_if_that_takes_time() -> None:
    watched = Watched()
    waiting = [watched.tick(rank, group_report(5, 2.0), step=3) for rank in (0, 2, 3)]
    watched.receive(*waiting, watched.tick(1, group_report(4), step=3, phase=Phase.FORWARD))
    assert View(watched.cluster, watched.look(), watched.now_s).headline().text.endswith("for rank 1, 2.0 s")

    every = [watched.tick(rank, group_report(6, 2.0), step=3) for rank in range(4)]
    watched.receive(*every)
    assert (
        View(watched.cluster, watched.look(), watched.now_s).headline().text == "ranks 0-3 wait in all_reduce #6, 2.0 s"
    )


def test_verdicts_of_a_job_are_bounded_and_those_of_all_jobs_come_worst_first() -> None:
    watched = Watched(num_nodes=40)
    dead = [dead_worker(rank, code=rank, error=f"E: {rank}") for rank in range(1, 80)]
    assert len(watched.receive(*dead).verdicts) == 64

    two = Watched()
    told = [worker_report(0, process=ProcessState.FROZEN), dead_worker(1, signal=9, job_id="other")]
    two.cluster.apply("n0", node_report(1, [job_status(), job_status(job_id="other")], told), two.now_s)
    assert [verdict.cause for verdict in two.look().verdicts] == [Cause.EXITED, Cause.FROZEN]


def test_a_stopped_job_keeps_the_death_that_came_before() -> None:
    watched = Watched()
    watched.receive(dead_worker(1, signal=9), *[watched.tick(rank) for rank in (0, 2, 3)])
    watched.now_s += 5
    told = [dead_worker(rank, signal=15) for rank in (0, 2, 3)]
    diagnosis = watched.receive(dead_worker(1, signal=9, age_s=5.0), *told, state=JobState.STOPPED, state_s=0.0)
    assert causes(diagnosis) == {(Cause.EXITED, (1,))}


def test_a_job_that_is_over_is_judged_again_when_something_is_news() -> None:
    watched = Watched()
    alive = [watched.tick(rank) for rank in (0, 2, 3)]
    watched.receive(dead_worker(1, code=1), *alive, state=JobState.FAILED, state_s=0.0)
    first = watched.job()
    watched.now_s += SETTLED_S - 1.0
    second = watched.job()
    watched.now_s += 1.0
    assert second is not first
    assert watched.job() is second
    late = [dead_worker(1, code=1, age_s=50.0), dead_worker(3, signal=9, age_s=60.0), *alive[:2]]
    diagnosis = watched.receive(*late, state=JobState.FAILED, state_s=50.0)
    assert causes(diagnosis) == {(Cause.EXITED, (3,))}


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_rank_that_has_said_farewell_may_take_its_time_to_end(*, is_ending: bool) -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    farewell = watched.tick(1, group_report(4), is_ending=is_ending)
    for second in range(1, 41):
        watched.now_s += 1.0
        waiting = [watched.tick(rank, group_report(5, float(second))) for rank in (0, 2, 3)]
        found = watched.receive(*waiting, worker_report(1, farewell.report, report_age_s=float(second)))
        if second in (10, 25):
            assert ((Cause.SILENT, (1,)) in causes(found)) is not is_ending
    assert (Cause.SILENT, (1,)) in causes(watched.look())


def joining(watched: Watched, rank: int, for_s: float) -> WorkerReport:
    return watched.tick(rank, phase=Phase.JOINING, phase_s=for_s)


def test_ranks_that_have_all_come_get_their_time_to_meet() -> None:
    watched = Watched(thresholds=Thresholds(join_s=10.0))
    late = watched.receive(*[joining(watched, rank, 50.0) for rank in (0, 1, 2)], watched.tick(3, phase=Phase.STARTING))
    assert causes(late) == {(Cause.NOT_JOINED, (3,))}

    watched.now_s += 1.0
    here = [joining(watched, rank, 51.0) for rank in (0, 1, 2)]
    assert causes(watched.receive(*here, joining(watched, 3, 0.5))) == set()

    watched.now_s += 10.0
    there = [joining(watched, rank, 61.0) for rank in (0, 1, 2)]
    assert causes(watched.receive(*there, joining(watched, 3, 10.5))) == {(Cause.TRANSPORT, ())}


def test_a_wait_is_an_alarm_where_the_rank_has_been_at_one_line_for_half_a_stall_as_the_manual_has_it() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    stall_s, severities = Thresholds().stall_s, {}
    for second in range(1, 18):
        watched.now_s += 1.0
        place = Place("/home/me/validate.py", min(second, 8), "validate")
        busy = watched.tick(0, group_report(4), place=place)
        found = watched.receive(*[watched.tick(rank, group_report(5, float(second))) for rank in (1, 2, 3)], busy)
        severities[second] = [verdict.severity for verdict in found.verdicts]

    assert [second for second in severities if not severities[second]] == list(range(1, int(stall_s) + 1))
    assert {second for second in severities if severities[second] == [Severity.CRITICAL]} == {13, 14, 15, 16, 17}
    sentence = f"waits of {stall_s:g} s: an alarm if at one line for the last {stall_s / 2:g} s, else a warning."
    assert sentence in " ".join(markdown("verdicts").split())


def test_a_rank_that_moves_on_while_others_wait_is_warned_of_and_one_that_stands_is_not_only_that() -> None:
    for is_moving in (True, False):
        watched = Watched()
        found = watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
        for second in range(1, 25):
            watched.now_s += 1.0
            place = Place("/home/me/validate.py", second if is_moving else 7, "validate")
            busy = watched.tick(0, group_report(4), place=place)
            found = watched.receive(*[watched.tick(rank, group_report(5, float(second))) for rank in (1, 2, 3)], busy)
        (verdict,) = found.verdicts
        assert (verdict.cause, verdict.culprits) == (Cause.STRAGGLER, (0,))
        assert verdict.severity is (Severity.WARNING if is_moving else Severity.CRITICAL)


def seven_seconds(first: dict[str, Any], others: dict[str, Any], printed: float) -> list[tuple[object, ...]]:
    """Return the job's steps, their kind, loss step and rate, and rank 0's; it prints steps too, at first only that."""
    watched, seen = Watched(), []
    for second in range(1, 8):
        watched.now_s += 1.0
        known, line_step = {"step": second} if second > 1 else {}, int(printed * second)
        fields = {"metrics": {"step": float(line_step), "loss": 1.5}, "loss_step": line_step, "seen_s": float(second)}
        ticks = [watched.tick(rank, **(known and known | others)) for rank in (1, 2, 3)]
        watched.receive(*ticks, msgspec.structs.replace(watched.tick(0, **(known and known | first)), **fields))
        view = View(watched.cluster, watched.look(), watched.now_s)
        row = view.job()
        assert row is not None
        seen.append((row.step, row.is_step_counted, row.loss_step, row.steps_per_s, view.ranks()[0].step))
    return [seen[0], seen[-1]]


def test_a_printed_step_is_the_loss_s_where_steps_are_counted_and_a_count_is_none_where_they_are_reported() -> None:
    counted: dict[str, Any] = {"is_step_counted": True}
    for printed in (0.5, 100.0):
        first, last = int(printed), int(7 * printed)
        known = [(first, False, first, None, first), (7, True, last, pytest.approx(1.0), 7)]
        assert seven_seconds(counted, counted, printed) == known
    assert seven_seconds({}, counted, 2.0)[1] == (7, False, 14, pytest.approx(1.0), 7)
    assert seven_seconds({"step": None}, {"step": None}, 2.0)[1] == (14, False, 14, pytest.approx(2.0), 14)


def test_a_rank_that_others_waited_for_stays_named_while_their_processes_take_long_to_end() -> None:
    watched = Watched()
    found = watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    for second in range(1, 21):
        watched.now_s += 1.0
        waiting = [watched.tick(rank, group_report(5, float(second))) for rank in (0, 2, 3)]
        found = watched.receive(*waiting, watched.tick(1, group_report(4)))
    assert causes(found) == {(Cause.STRAGGLER, (1,))}

    for _ in range(8):
        watched.now_s += 1.0
        out = [watched.tick(rank, group_report(5)) for rank in (0, 2, 3)]
        assert causes(watched.receive(*out, watched.tick(1, group_report(4)))) == {(Cause.STRAGGLER, (1,))}
    watched.now_s += 1.0
    assert causes(watched.receive(*[watched.tick(rank, group_report(5)) for rank in range(4)])) == set()


def test_calls_that_did_not_fit_stay_named_while_the_processes_take_long_to_end() -> None:
    watched = Watched()
    calls = ["all_reduce", "broadcast", "all_reduce", "all_reduce"]
    watched.receive(*[watched.tick(rank, group_report(5, 3.0, op=op)) for rank, op in enumerate(calls)])
    for _ in range(3):
        watched.now_s += 1.0
        found = watched.receive(*[watched.tick(rank, group_report(5, op=op)) for rank, op in enumerate(calls)])
        assert causes(found) == {(Cause.MISMATCH, (1,))}


def test_who_did_not_come_to_the_process_group_stays_named_when_the_others_time_out_there() -> None:
    watched = Watched()
    place = Place("/home/me/train.py", 7, "download")
    found = watched.look()

    def late() -> WorkerReport:
        return watched.tick(1, phase=Phase.STARTING, place=place, stood_s=watched.now_s - 1000.0)

    for second in range(1, 16):
        watched.now_s += 1.0
        found = watched.receive(*[joining(watched, rank, float(second)) for rank in (0, 2, 3)], late())
    assert causes(found) == {(Cause.NOT_JOINED, (1,))}
    for _ in range(6):
        watched.now_s += 1.0
        found = watched.receive(*[watched.tick(rank) for rank in (0, 2, 3)], late())
        assert causes(found) == {(Cause.NOT_JOINED, (1,))}
    error = "torch.distributed.DistStoreError: wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1"
    for age_s in (0.0, 2.0, 40.0):
        watched.now_s += age_s
        dead = [dead_worker(rank, code=1, error=error, age_s=age_s) for rank in (0, 2, 3)]
        found = watched.receive(*dead, dead_worker(1, signal=15, age_s=max(0.0, age_s - 0.5)))
        (verdict,) = found.verdicts
        assert (verdict.cause, verdict.culprits, verdict.severity) == (Cause.NOT_JOINED, (1,), Severity.CRITICAL)
        assert verdict.aftermath == Aftermath((0, 2, 3), is_timeout=True, timeout_s=15.0)


def test_one_that_times_out_before_the_others_does_not_make_a_wait_look_complete() -> None:
    watched = Watched()
    found = watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    for second in range(1, 26):
        watched.now_s += 1.0
        first = watched.tick(0, group_report(5, float(second)) if second <= 20 else group_report(5))
        waiting = [watched.tick(rank, group_report(5, float(second))) for rank in (2, 3)]
        found = watched.receive(first, *waiting, watched.tick(1, group_report(4)))
        assert causes(found) <= {(Cause.STRAGGLER, (1,))}
    assert causes(found) == {(Cause.STRAGGLER, (1,))}


def test_a_rank_whose_gpu_waits_in_a_send_or_receive_is_not_to_blame_for_a_call_that_it_has_not_made() -> None:
    for held, named in (([2], {(Cause.STRAGGLER, (3,))}), ([2, 3], set())):
        watched = Watched()
        found = watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
        for second in range(1, 25):
            watched.now_s += 1.0
            waiting = [watched.tick(rank, group_report(5, float(second))) for rank in (0, 1)]
            late = [watched.tick(rank, group_report(4), has_open_transfers=rank in held) for rank in (2, 3)]
            found = watched.receive(*waiting, *late)
        assert causes(found) == named


@pytest.mark.parametrize("is_before", [False, True])
def test_what_all_have_called_is_not_over_because_of_the_network_only_where_no_gpu_stands_in_something_before_it(
    *, is_before: bool
) -> None:
    watched = Watched()
    found = watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    for second in range(1, 25):
        watched.now_s += 1.0
        group = group_report(5, float(second), is_queued=is_before)
        found = watched.receive(*[watched.tick(rank, group, has_open_transfers=True) for rank in range(4)])
    assert causes(found) == (set() if is_before else {(Cause.TRANSPORT, ())})


@pytest.mark.parametrize(
    ("process", "cause"), [(ProcessState.RUNNING, Cause.STRAGGLER), (ProcessState.FROZEN, Cause.FROZEN)]
)
def test_a_gpu_that_has_not_come_to_what_the_others_wait_in_holds_them_up_though_its_rank_has_called_it(
    process: ProcessState, cause: Cause
) -> None:
    watched = Watched()
    found = watched.look()
    for second in range(1, 25):
        watched.now_s += 1.0
        waiting = [watched.tick(rank, group_report(5, float(second))) for rank in (0, 1, 3)]
        late = watched.tick(2, group_report(5, float(second), is_behind_work=True))
        found = watched.receive(*waiting, worker_report(2, late.report, process=process, process_s=float(second)))
    assert causes(found) == {(cause, (2,))}
    assert (found.verdicts[0].waiting, found.verdicts[0].is_behind_work) == ((0, 1, 3), cause is Cause.STRAGGLER)


@pytest.mark.parametrize(("step_limit_s", "at_s"), [(0.0, 10), (300.0, 300)])
def test_gpus_none_of_which_comes_to_its_next_call_stand_in_work_of_their_own(step_limit_s: float, at_s: int) -> None:
    watched = Watched()
    found = watched.look()
    for second in range(1, at_s + 2):
        watched.now_s += 1.0
        group = group_report(5, float(second), is_behind_work=True)
        found = watched.receive(*[watched.tick(rank, group, step_limit_s=step_limit_s) for rank in range(4)])
        assert bool(found.verdicts) == (second >= at_s)
    assert causes(found) == {(Cause.STANDSTILL, ())}
    assert (found.verdicts[0].is_behind_work, found.verdicts[0].seq) == (True, 5)


def test_a_gpu_that_stands_in_another_groups_call_has_not_come_to_the_one_behind_it() -> None:
    # Rank 3 is late for the pair's call; rank 2 stands in that, and the others wait behind it for both.
    pair: dict[str, Any] = {"group": "pair", "ranks": [2, 3]}
    watched = Watched()
    found = watched.look()
    for second in range(1, 25):
        watched.now_s += 1.0
        waiting = group_report(5, float(second))
        found = watched.receive(
            watched.tick(0, waiting),
            watched.tick(1, waiting),
            watched.tick(2, group_report(5, float(second), is_queued=True), group_report(8, float(second), **pair)),
            watched.tick(3, group_report(4), group_report(7, **pair)),
        )
        assert causes(found) <= {(Cause.STRAGGLER, (3,))}
    assert causes(found) == {(Cause.STRAGGLER, (3,))}
    assert found.verdicts[0].waiting == (0, 1, 2)


@pytest.mark.parametrize("has_received", [False, True])
def test_a_gpus_send_waits_for_the_rank_that_has_not_called_its_receive_or_has_not_come_to_it(
    *, has_received: bool
) -> None:
    # Rank 0 sends to rank 1, which is in an all_reduce that lacks rank 0, and lacks the receive or has it behind.
    watched = Watched()
    found = watched.look()
    for second in range(1, 5):
        watched.now_s += 1.0
        sends = PeerWait([PeerCall("send", 1, number=3)], float(second), is_on_gpu=True)
        received = [PeerCall("recv", 0, number=2 + has_received)]
        waiting = group_report(5, float(second))
        found = watched.receive(
            watched.tick(0, group_report(4), peer_wait=sends, peer_calls=[PeerCall("send", 1, number=3)]),
            watched.tick(1, waiting, peer_calls=received, has_open_transfers=has_received),
            *[watched.tick(rank, waiting) for rank in (2, 3)],
        )
    # Both have done the like before: nobody can know which of the two calls is the odd one.
    assert causes(found) == {(Cause.MISMATCH, ())}
    assert [side.op for side in found.verdicts[0].sides] == ["send", "all_reduce"]


@pytest.mark.parametrize(("root", "is_known"), [(-1, False), (0, True)])
def test_of_a_broadcast_that_does_not_complete_it_is_told_whether_all_are_known_to_pass_one_source(
    root: int, *, is_known: bool
) -> None:
    watched = Watched()
    found = watched.look()
    for second in range(1, 14):
        watched.now_s += 1.0
        past = [PastCall(5, "broadcast", 4, "Float", root)]
        group = group_report(5, float(second), op="broadcast", past=past)
        found = watched.receive(*[watched.tick(rank, group, phase=Phase.OTHER) for rank in range(4)])
    assert [(one.cause, one.is_root_unknown) for one in found.verdicts] == [(Cause.TRANSPORT, not is_known)]


def test_a_rank_that_passes_another_source_to_a_call_of_nccl_is_named_also_where_all_have_called_many_more() -> None:
    watched = Watched()
    found = watched.look()
    for second in range(1, 4):
        watched.now_s += 1.0
        reports = []
        for rank in range(4):
            past = [PastCall(5, "broadcast", 4, "Float", int(rank == 2)), PastCall(6, "all_reduce", 4, "Float")]
            group = group_report(40 + rank, float(second), completed_seq=4, op="broadcast", past=past)
            reports.append(watched.tick(rank, group))
        found = watched.receive(*reports)
    assert causes(found) == {(Cause.MISMATCH, (2,))}
    assert [(side.seq, side.root) for side in found.verdicts[0].sides] == [(5, 1), (5, 0)]


def test_groups_called_in_another_order_are_told_also_where_a_broadcasts_source_is_through_before_the_others() -> None:
    pair: dict[str, Any] = {"group": "pair", "ranks": [0, 1]}
    watched = Watched()
    found = watched.look()
    for second in range(1, 5):
        watched.now_s += 1.0
        held = group_report(8, float(second), completed_seq=4, op="broadcast")
        behind = group_report(8, float(second), completed_seq=4, op="broadcast", is_queued=True)
        found = watched.receive(
            watched.tick(
                0,
                group_report(8, float(second), completed_seq=5),
                group_report(3, float(second), is_queued=True, **pair),
            ),
            watched.tick(1, behind, group_report(3, float(second), **pair)),
            watched.tick(2, held),
            watched.tick(3, held),
        )
    assert causes(found) == {(Cause.MISMATCH, (0, 1))}
    assert [(side.ranks, side.group) for side in found.verdicts[0].sides] == [((0,), "0"), ((1,), "pair")]


@pytest.mark.parametrize(
    ("num_called_beside", "per_step", "culprits"),
    [
        pytest.param(8, 1, (2,), id="the call comes first, and rank 2 has left it out"),
        pytest.param(7, 1, (3,), id="the call comes later, and rank 3 has made it too early"),
        pytest.param(8, 2, (2, 3), id="the others' pair is called at other times, and shows nothing"),
    ],
)
def test_of_a_pair_in_different_groups_calls_the_pair_beside_shows_which_rank_is_the_odd_one(
    num_called_beside: int, per_step: int, culprits: tuple[int, ...]
) -> None:
    watched = Watched()
    found = watched.look()
    own: dict[str, Any] = {"group": "1", "ranks": [2, 3], "steps": [StepCalls(step, step) for step in (5, 6, 7)]}
    beside: dict[str, Any] = {
        "group": "2",
        "ranks": [0, 1],
        "steps": [StepCalls(step, step * per_step) for step in (5, 6, 7)],
    }
    for second in range(1, 5):
        watched.now_s += 1.0
        waiting = group_report(22, float(second))
        found = watched.receive(
            *[watched.tick(rank, waiting, group_report(num_called_beside, **beside), step=7) for rank in (0, 1)],
            watched.tick(2, waiting, group_report(7, **own), step=7),
            watched.tick(3, group_report(21), group_report(8, float(second), **own), step=7),
        )
    assert causes(found) == {(Cause.MISMATCH, culprits)}


@pytest.mark.parametrize(("caller", "culprits"), [(1, (1,)), (0, (0,))])
def test_ranks_that_are_through_with_a_gather_show_that_it_comes_before_the_call_in_which_one_of_the_others_waits(
    caller: int, culprits: tuple[int, ...]
) -> None:
    # One of ranks 0 and 1 waits in the gather for the other one, which is in a second group of all. Ranks 2 and 3 have
    # called only the one of these two calls, and wait for rank 1.
    has_gathered = caller == 1
    watched = Watched()
    found = watched.look()
    for second in range(1, 5):
        watched.now_s += 1.0
        gather = [group_report(5, float(second), op="gather"), group_report(2, group="all")]
        second_group = [group_report(4), group_report(3, float(second), group="all")]
        done = [group_report(5, op="gather"), group_report(2, group="all")]
        if not has_gathered:
            done = [group_report(4), group_report(3, group="all", op="gather")]
            second_group[1] = group_report(3, float(second), group="all", op="gather")
        receives = [PeerWait([PeerCall("recv", peer, number=3)], float(second)) for peer in (1, 2)]
        found = watched.receive(
            watched.tick(0, *gather),
            watched.tick(1, *second_group),
            *[
                watched.tick(rank, *done, peer_wait=one, peer_calls=one.calls)
                for rank, one in zip((2, 3), receives, strict=True)
            ],
        )
    assert causes(found) == {(Cause.MISMATCH, culprits)}


@pytest.mark.parametrize(
    ("waits_too", "expected"),
    [(True, (Cause.MISMATCH, (2,))), (False, (Cause.STRAGGLER, (2,)))],
)
def test_a_rank_that_does_not_come_to_the_start_of_a_communicator_is_named(
    waits_too: bool, expected: tuple[Cause, tuple[int, ...]]
) -> None:
    watched = Watched()
    found = watched.look()
    for second in range(1, 15):
        watched.now_s += 1.0
        starts = PeerWait([PeerCall("ncclCommInitRank", None)], float(second))
        there = [watched.tick(rank, group_report(4), peer_wait=starts) for rank in (0, 1, 3)]
        other = group_report(5, float(second)) if waits_too else group_report(4)
        found = watched.receive(*there, watched.tick(2, other))
    assert causes(found) == {expected}


@pytest.mark.parametrize(
    ("op", "waits_for_communicator"), [("ncclCommInitRank", False), ("new_group", True), ("monitored_barrier", True)]
)
def test_a_rank_whose_collective_is_recorded_starts_no_communicator(op: str, waits_for_communicator: bool) -> None:
    # NCCL holds a rank up in a call that is recorded when the GPU's queue is full. An asynchronous collective may be
    # pending, too, while a rank makes a group.
    watched = Watched()
    found = watched.look()
    for second in range(1, 5):
        watched.now_s += 1.0
        meets = PeerWait([PeerCall(op, None)], float(second))
        found = watched.receive(
            *(watched.tick(rank, group_report(5, float(second)), peer_wait=meets) for rank in (0, 1, 3)),
            watched.tick(2, group_report(4)),
        )
    ops = {wait.op for wait in found.waits}
    assert (op in ops) is waits_for_communicator
    assert "all_reduce" in ops
