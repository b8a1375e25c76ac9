"""However a hang ends, in whatever order the deaths are reported: who kept the others waiting stays named."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from app.diagnosis.causes import Cause
from ddpcore.wire import Place
from tests.support.examples import few_and_many
from tests.support.node_reports import dead_worker, group_report
from tests.unit.app.diagnosis.test_diagnosis import Watched

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport
    from app.diagnosis.diagnoser import Diagnosis

SPOILT = (
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting {ms}ms for recv operation to complete",
    "RuntimeError: [unbound_buffer.cc:129] Timed out waiting {ms}ms for send operation to complete",
)
LOST = (
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:31415",
    "RuntimeError: Application timeout caused pair closure",
)
CULPRIT = 1


class Ending(NamedTuple):
    """How one rank dies: when after the time-out, and of what."""

    at_s: float
    how: str


def ending(hows: tuple[str, ...]) -> st.SearchStrategy[Ending]:
    return st.builds(Ending, st.floats(0.0, 8.0), st.sampled_from(hows))


@few_and_many(
    15,
    60,
    timeout_s=st.sampled_from([3.0, 5.0, 20.0]),
    first=ending(("timeout-recv", "timeout-send")),
    others=st.tuples(*[ending(("timeout-recv", "timeout-send", "lost", "closure", "term"))] * 2),
    culprit=ending(("term", "closure", "lost")),
    lost_looks=st.sets(st.integers(0, 80)),
)
def test_any_order_of_deaths_leaves_the_culprit_named(
    timeout_s: float, first: Ending, others: tuple[Ending, Ending], culprit: Ending, lost_looks: set[int]
) -> None:
    watched = Watched()
    waiters = (0, 2, 3)
    ends = dict(zip(waiters, (first, *others), strict=True))
    ends[CULPRIT] = Ending(max(culprit.at_s, min(end.at_s for end in ends.values()) + 0.5), culprit.how)
    place = Place("/home/me/train.py", 30, "wander")
    watched.receive(*[watched.tick(rank, group_report(4)) for rank in range(4)])
    begun_s = watched.now_s
    found = watched.look()
    for look in range(round((timeout_s + 12.0) / 0.4)):
        watched.now_s = begun_s + 0.4 * (look + 1)
        waited_s = watched.now_s - begun_s
        workers = []
        for rank in range(4):
            dead_s = waited_s - timeout_s - ends[rank].at_s
            if dead_s >= 0.0:
                workers.append(dead_of(rank, ends[rank].how, dead_s, timeout_s))
            elif rank == CULPRIT:
                workers.append(watched.tick(rank, group_report(4), place=place))
            else:
                # The exception has taken it out of the call; its process takes seconds to end.
                waits = group_report(5, waited_s) if waited_s < timeout_s else group_report(5)
                workers.append(watched.tick(rank, waits))
        nodes = [node for node in range(2) if 2 * look + node not in lost_looks]
        was_named = bool(found.verdicts)
        found = watched.receive(*workers, nodes=nodes) if nodes else watched.look()
        assert all(CULPRIT in verdict.culprits for verdict in found.verdicts)
        assert found.verdicts or not was_named
    assert {(verdict.cause, verdict.culprits) for verdict in found.verdicts} == {(Cause.STRAGGLER, (CULPRIT,))}
    seq, op, reported_s = of(found)
    assert (seq, op) == (5, "all_reduce")
    assert reported_s in (timeout_s, None)


def dead_of(rank: int, how: str, age_s: float, timeout_s: float) -> WorkerReport:
    ms = round(1000 * timeout_s)
    if how == "term":
        return dead_worker(rank, signal=15, age_s=age_s)
    errors = {
        "timeout-recv": SPOILT[0].format(ms=ms),
        "timeout-send": SPOILT[1].format(ms=ms),
        "lost": LOST[0],
        "closure": LOST[1],
    }
    return dead_worker(rank, code=1, error=errors[how], age_s=age_s)


def of(found: Diagnosis) -> tuple[int | None, str, float | None]:
    """Return number and operation of the wait, and the time-out that ended it."""
    (verdict,) = found.verdicts
    assert verdict.aftermath is not None
    return verdict.seq, verdict.op, verdict.aftermath.timeout_s
