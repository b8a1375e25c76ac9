"""The first to die of its own cause is told from those who died of it."""

from __future__ import annotations

from typing import Any

import pytest

from agent.wire.reports import ExitReport
from app.diagnosis.causes import Cause
from app.diagnosis.exits import ExitContext, Exits, LastLooks, has_lost_peer, sort_out
from app.diagnosis.rank_facts import Thresholds
from app.diagnosis.verdicts import Aftermath, Verdict
from app.model.cluster import Cluster
from app.model.job_model import Death
from tests.support.node_reports import group_report, job_status, node_report, rank_report, worker_report

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:31415"
NEVER = float("inf")


def end(rank: int, at_s: float, code: int | None = None, signal: int | None = None, error: str = "") -> Death:
    return Death(rank, at_s, ExitReport(code=code, signal=signal, error=error))


def sorted_out(
    *deaths: Death, now_s: float = 20.0, stop: float = NEVER, other: bool = False, less: frozenset[int] = frozenset()
) -> Exits:
    context = ExitContext(stop_began_s=stop, has_other_cause=other, called_less=less, now_s=now_s)
    return sort_out({death.rank: death for death in deaths}, context, Thresholds())


def culprits(exits: Exits) -> list[int]:
    return [death.rank for death in exits.culprits]


def test_a_signal_is_a_cause_and_what_follows_is_a_consequence() -> None:
    found = sorted_out(
        end(0, 10.4, code=1, error=LOST),
        end(1, 10.2, signal=15),
        end(2, 10.0, signal=9),
        end(3, 40.0, signal=9),
        now_s=50,
    )

    assert culprits(found) == [2]
    assert found.lost_connection == [0]
    assert found.first_bad_s == 10.0


def test_a_consequence_noticed_a_little_earlier_than_its_cause_is_not_blamed() -> None:
    assert culprits(sorted_out(end(0, 9.9, code=1, error=LOST), end(2, 10.0, signal=9))) == [2]


def test_independent_deaths_of_one_instant_are_all_named() -> None:
    assert culprits(sorted_out(end(0, 10.0, signal=9), end(1, 10.2, signal=9), end(2, 11.0, code=1, error="E: x"))) == [
        0,
        1,
    ]


def test_ranks_that_end_alike_within_seconds_are_all_named_whichever_came_first() -> None:
    line = "train.py: error: unrecognized arguments: --slwo 3"
    alike = [Death(rank, 10.0 + 0.6 * rank, ExitReport(code=2, last_line=line)) for rank in range(4)]
    assert culprits(sorted_out(*alike)) == [0, 1, 2, 3]
    assert culprits(sorted_out(*alike[:3], end(3, 11.8, code=2))) == [0, 1, 2], "it has left no text"
    assert culprits(sorted_out(*alike[:3], end(3, 11.8, signal=15))) == [0, 1, 2]
    assert culprits(sorted_out(alike[0], Death(1, 30.0, alike[0].exit), now_s=50.0)) == [0]


def test_ranks_that_sigint_has_ended_are_all_named_once_their_launcher_may_have_said_that_it_was_asked() -> None:
    interrupted = [end(rank, 10.0 + rank / 10, signal=2, error="KeyboardInterrupt") for rank in range(3)]
    assert culprits(sorted_out(*interrupted)) == [], "it may have come from the launcher"
    assert culprits(sorted_out(*interrupted, now_s=50.0)) == [0, 1, 2]
    assert culprits(sorted_out(interrupted[1], end(0, 10.4, code=1, error=LOST), end(2, 10.6, signal=15))) == [1]


def test_others_may_follow_the_first_rank_that_ctrl_c_has_ended() -> None:
    interrupted = end(1, 10.0, signal=2)
    assert culprits(sorted_out(interrupted)) == []
    assert culprits(sorted_out(interrupted, now_s=50.0)) == [1]
    over = ExitContext(NEVER, has_other_cause=False, called_less=frozenset(), now_s=12.0, is_over=True)
    assert culprits(sort_out({1: interrupted}, over, Thresholds())) == [1]


def test_a_death_that_looks_like_a_consequence_waits_for_its_cause() -> None:
    early = sorted_out(end(0, 10.0, code=1, error=LOST), now_s=10.5)
    late = sorted_out(end(0, 10.0, code=1, error=LOST), end(1, 10.1, signal=15), now_s=11.5)

    assert culprits(early) == []
    assert early.first_bad_s == 10.0
    assert culprits(late) == [0]


def test_it_is_never_told_while_something_else_explains_it() -> None:
    assert culprits(sorted_out(end(0, 10.0, code=1, error=LOST), other=True)) == []


def test_an_exit_code_without_its_error_line_waits_for_it() -> None:
    assert culprits(sorted_out(end(0, 10.0, code=1), now_s=10.5)) == []
    assert culprits(sorted_out(end(0, 10.0, code=1), now_s=11.5)) == [0]
    assert culprits(sorted_out(end(0, 10.0, code=1, error="ValueError: boom"), now_s=10.1)) == [0]


def test_who_left_with_code_0_before_is_named_when_others_lost_a_connection() -> None:
    found = sorted_out(end(1, 9.0, code=0), end(3, 9.5, code=0), end(0, 10.0, code=1, error=LOST), now_s=10.1)
    surely = sorted_out(end(1, 9.0, code=0), end(3, 9.5, code=0), end(0, 10.0, code=1, error=LOST), less=frozenset({3}))

    assert [death.rank for death in found.early_leavers] == [1, 3]
    assert [death.rank for death in surely.early_leavers] == [3]
    assert culprits(found) == culprits(surely) == []


def test_who_left_with_code_0_is_not_blamed_for_a_sigterm_or_an_error_of_another() -> None:
    terminated = sorted_out(end(1, 9.0, code=0), end(0, 10.0, signal=15), now_s=12)
    failed = sorted_out(end(1, 9.0, code=0), end(0, 10.0, code=1, error="ValueError: boom"))

    assert (culprits(terminated), terminated.early_leavers) == ([0], [])
    assert (culprits(failed), failed.early_leavers) == ([0], [])


def test_ends_on_request_and_good_ends_are_nobody_s_fault() -> None:
    nothing = Exits([], [], [], None)

    assert sorted_out(end(0, 10.0, code=0), end(1, 11.0)) == nothing
    assert sorted_out(end(0, 10.0, signal=15), end(1, 11.0, code=1, error="x"), stop=9.9) == nothing
    assert sorted_out(end(0, 9.9, signal=9), stop=10.0) == nothing


def test_a_death_before_the_stop_is_still_told() -> None:
    assert culprits(sorted_out(end(0, 9.0, signal=9), end(1, 10.5, signal=15), stop=10.0)) == [0]


def test_an_end_that_nobody_saw_is_suspected_when_the_others_end_badly() -> None:
    found = sorted_out(end(1, 9.8), end(0, 10.0, code=1, error=LOST), now_s=12)

    assert culprits(found) == [1]


@pytest.mark.parametrize(("has_stepped", "victims"), [(True, set()), (False, {0, 1})])
def test_who_waited_in_a_slow_start_and_has_made_steps_since_is_no_victim_of_it(
    victims: set[int], *, has_stepped: bool
) -> None:
    cluster, looks = Cluster(["n0"]), LastLooks()
    start = Verdict(cause=Cause.TRANSPORT, culprits=(), waiting=(0, 1), job="job", attempt=0, waited_s=3.0)
    looks.put([], [start], 10.0)
    steps = {"step": 9, "step_age_s": 0.2, "step_limit_s": 0.5} if has_stepped else {}
    workers = [worker_report(rank, rank_report(rank, 2, groups=[group_report(5)], **steps)) for rank in range(2)]
    cluster.apply("n0", node_report(1, [job_status(world_size=2, num_nodes=1)], workers), 25.0)

    assert looks.victims(cluster.jobs["job"]) == victims


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        "RuntimeError: Read error [127.0.0.1]:4711: Connection reset by peer",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistNetworkError: The client socket has timed out",
        "RuntimeError: Gloo connectFullMesh failed",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//cpu//0/1",
        "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 4000 ms",
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv",
        "c10::DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 9 ms",
        "RuntimeError: Work WorkNCCL(SeqNum=1) timed out in blocking wait (TORCH_NCCL_BLOCKING_WAIT=1).",
        "RuntimeError: To avoid data inconsistency, we are taking the entire process down.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "ncclSystemError: connection closed by remote peer node1<42>",
    ],
)
def test_what_torch_says_when_a_peer_is_gone_is_recognised(error: str) -> None:
    assert has_lost_peer(end(0, 1.0, code=1, error=error))


@pytest.mark.parametrize(
    ("words", "timeout_s"),
    [
        ("Timed out waiting 20000ms for recv operation to complete", 20.0),
        ("wait timeout after 4000ms, keys: /default_pg/0//cpu//0/1", 4.0),
        ("Rank 1 failed to pass monitoredBarrier in 4000 ms", 4.0),
        (
            "Watchdog caught collective operation timeout: WorkNCCL() ran for 600081 milliseconds before timing out.",
            600.081,
        ),
        ("Timed out after 21 seconds waiting for clients. 1/2 clients joined.", 21.0),
        ("Socket Timeout", None),
    ],
)
def test_the_time_out_is_read_from_what_a_rank_says(words: str, timeout_s: float | None) -> None:
    after = sorted_out(end(0, 10.0, code=1, error=f"RuntimeError: {words}"), now_s=10.5).aftermath
    assert after == Aftermath((0,), is_timeout=True, timeout_s=timeout_s)


def test_ranks_that_end_with_their_launcher_have_no_cause_of_their_own() -> None:
    deaths = {rank: end(rank, 10.0 + rank / 10, signal=9) for rank in range(3)}
    context = ExitContext(NEVER, True, frozenset(), 20.0, 3, with_launcher=frozenset({0, 1, 2}))

    found = sort_out(deaths, context, Thresholds())

    assert culprits(found) == []
    assert found.aftermath == Aftermath((0, 1, 2), signal=9, is_with_launcher=True)


@pytest.mark.parametrize(("nodes", "culprit"), [((0, 0, 1, 1), 0), ((0, 1, 0, 0), 3), ((0, 1, 1, 0), 2)])
def test_of_deaths_that_have_no_order_one_that_lost_another_comes_last(nodes: tuple[int, ...], culprit: int) -> None:
    deaths = {0: end(0, 10.05, signal=15), 2: end(2, 10.2, signal=15), 3: end(3, 10.0, code=1, error=LOST)}
    context = ExitContext(NEVER, False, frozenset(), 20.0, 4, node_of=dict(enumerate(nodes)))

    assert culprits(sort_out(deaths, context, Thresholds())) == [culprit]


@pytest.mark.parametrize("how", [{"code": 3}, {"signal": 6}, {"code": 0}])
def test_who_waited_in_vain_and_ends_without_an_exception_is_no_cause(how: dict[str, Any]) -> None:
    deaths = {0: end(0, 10.0, **how), 2: end(2, 10.1, code=1, error=LOST)}
    context = ExitContext(NEVER, True, frozenset(), 20.0, 3, victims=frozenset({0, 2}))

    found = sort_out(deaths, context, Thresholds())

    assert (culprits(found), found.early_leavers) == ([], [])


@pytest.mark.parametrize(
    "error",
    [
        "",
        "ValueError: boom",
        "RuntimeError: CUDA out of memory",
        "KeyError: 'peer'",
        "RuntimeError: DataLoader timed out after 30 seconds",
        "[Rank 2] Process group watchdog thread terminated with exception: CUDA error: misaligned address",
        "subprocess.TimeoutExpired: Command '['aws', 's3', 'cp']' timed out after 60 seconds",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address.",
    ],
)
def test_other_errors_are_a_rank_s_own(error: str) -> None:
    assert not has_lost_peer(end(0, 1.0, code=1, error=error))


def test_a_rank_that_was_about_to_end_is_the_one_that_left_though_its_launcher_ended_it() -> None:
    lost, told = end(0, 10.0, code=1, error=LOST), end(1, 10.5, signal=15)
    context = ExitContext(
        stop_began_s=NEVER,
        has_other_cause=False,
        called_less=frozenset(),
        now_s=20.0,
        world_size=2,
        farewells=frozenset({0, 1}),
    )

    found = sort_out({0: lost, 1: told}, context, Thresholds())

    assert [death.rank for death in found.early_leavers] == [1]
    assert culprits(found) == []
    assert [death.rank for death in sorted_out(lost, told).early_leavers] == []


def test_a_rank_that_had_failed_is_the_one_though_its_launcher_ended_it_before_it_was_out() -> None:
    told_by_it = end(1, 10.0, code=1, error="ddpcore.errors.MasterFailedError: rank 0 failed: no corpus here")
    failed = end(0, 10.8, signal=15, error="FileNotFoundError: no corpus here")
    deaths = {0: failed, 1: told_by_it}

    def sort(farewells: set[int], now_s: float = 20.0) -> Exits:
        context = ExitContext(NEVER, False, frozenset(), now_s, 2, frozenset(farewells))
        return sort_out(deaths, context, Thresholds())

    found = sort({0, 1})
    assert culprits(found) == [0]
    assert (found.lost_connection, found.early_leavers) == ([1], [])
    assert culprits(sort({1})) == [1], "of one that had not begun to end, what its output ends with may be old"


def test_of_a_job_that_has_ended_well_its_ranks_are_not_blamed_for_the_last_one_s_loss() -> None:
    deaths = {rank: end(rank, 10.0 + rank / 100, code=0) for rank in range(7)}
    deaths[7] = end(7, 10.2, code=1, error=LOST)
    context = ExitContext(NEVER, has_other_cause=False, called_less=frozenset(), now_s=20.0, world_size=8)

    found = sort_out(deaths, context, Thresholds())

    assert found.early_leavers == []
    assert culprits(found) == [7]


def test_deaths_of_many_ranks_are_not_compared_one_by_one() -> None:
    class Compared(Death):
        times = 0

        def __eq__(self, other: object) -> bool:
            Compared.times += 1
            return super().__eq__(other)

        __hash__ = Death.__hash__

    ends = [Compared(rank, 10.0 + rank / 100, ExitReport(code=1, error="E: x")) for rank in range(100)]

    assert culprits(sorted_out(*ends)) == list(range(100))
    assert Compared.times < len(ends)
