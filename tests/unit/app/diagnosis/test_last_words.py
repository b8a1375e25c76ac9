"""What ranks that report no more have called last: which call the others wait in is named once that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause
from tests.corpus.generator.cluster import StoryCluster
from tests.corpus.generator.kinds import Kind
from tests.corpus.generator.program import Semantics, Shape
from tests.corpus.generator.stories import Fault, Story

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Verdict

# Ten steps are launched before the loss is read: GPUs work on for long.
AHEAD = Shape(semantics=Semantics.NCCL, num_nodes=2, ranks_per_node=2, step_s=0.4, buckets=3, loss_every=10)


def looks(shape: Shape, kind: Kind, until_s: float, cause: Cause) -> list[tuple[Verdict, bool]]:
    """Return the verdicts on a fault, look by look while ranks wait, and whether each names what holds one up then."""
    cluster = StoryCluster(Story(shape, (Fault(kind, rank=1, step=8, place=5, value=1e9),), seed=3))
    found = []
    while cluster.elapsed_s < until_s:
        cluster.run(0.2)
        pending = cluster.pending()
        verdicts = [verdict for verdict in cluster.diagnosis.verdicts if verdict.cause is cause and pending]
        found += [(verdict, (verdict.group, verdict.seq) in pending) for verdict in verdicts]
    return found


def test_no_wait_is_laid_to_ranks_whose_agent_alone_is_gone() -> None:
    found = looks(AHEAD, Kind.AGENT, 25.0, Cause.NODE_LOST)

    assert {verdict.culprits for verdict, _ in found} == {(0, 1)}
    assert {(verdict.seq, verdict.waiting) for verdict, _ in found} == {(None, ())}


def test_a_stopped_rank_is_named_at_once_and_the_call_that_it_lacks_when_its_gpu_is_done() -> None:
    found = looks(AHEAD, Kind.STOP, 25.0, Cause.FROZEN)

    assert found[0][0].seq is None
    assert [is_pending for verdict, is_pending in found if verdict.seq is not None].count(False) == 0
    last, _ = found[-1]
    assert (last.culprits, last.waiting, last.op) == ((1,), (0, 2, 3), "all_reduce")


def test_the_call_that_ranks_wait_in_for_a_killed_one_is_the_one_they_stop_at() -> None:
    found = looks(AHEAD, Kind.KILL, 12.0, Cause.EXITED)

    named = [is_pending for verdict, is_pending in found if verdict.seq is not None]
    assert named
    assert all(named)
