"""Stories of more than one life: attempts of a job one after another, and a second job on the same nodes.

A verdict belongs to a job and an attempt: what was said of the one that failed is over when the next one begins, and
another job's hang is no verdict on this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.corpus.generator.cluster import StoryCluster
from tests.corpus.generator.kinds import RESTARTED, Kind
from tests.corpus.generator.oracle import truth_of, truths_of
from tests.corpus.generator.program import Shape
from tests.corpus.generator.score import Grade, Result, grade, run_to_strike, watch
from tests.corpus.generator.score import play as play_one
from tests.corpus.generator.stories import Story

if TYPE_CHECKING:
    from agent.wire.jobs import JobStatus
    from tests.support.sim_node import SimNode

OTHER = "other"
OTHER_KINDS = (Kind.SLEEP, Kind.KILL, Kind.RAISE, Kind.STOP)
"""What happens to the other job."""
WATCH_S = 30.0
TRAINS_S = 25.0
ENDS_S = 12.0
"""By then all ranks of an attempt that has failed have ended: launchers end them."""
RESTART_S = 1.0
GONE_S = 2.0
"""Later than this after the restart, nothing of the former attempt is said."""
SIGTERM = 15


def play(story: Story) -> Result:
    """Simulate a story of one life or more, and grade what is said."""
    kind = story.faults[0].kind if story.faults else Kind.NONE
    if kind is Kind.OTHER_JOB:
        return _play_beside_another(story)
    if kind is Kind.CANCELLED:
        return _play_cancelled(story)
    return _play_again(story) if kind in RESTARTED else play_one(story)


def _play_beside_another(story: Story) -> Result:
    (fault,) = story.faults
    theirs = replace(fault, kind=OTHER_KINDS[fault.place % len(OTHER_KINDS)], value=1e9)
    healthy = replace(story, faults=())
    cluster = StoryCluster(healthy)
    plain = Shape(num_nodes=story.shape.num_nodes, ranks_per_node=story.shape.ranks_per_node)
    cluster.other = other = OtherCluster(Story(plain, (theirs,), story.seed), cluster.nodes)
    while not other.struck:
        cluster.run(1.0)
    cluster.run(WATCH_S)
    result = replace(grade(healthy, cluster, ()), story=story)
    if result.grade is not Grade.RIGHT:
        return result
    if any(row.job == OTHER for row in cluster.view().verdicts()):
        return replace(result, grade=Grade.FALSE_ALARM, why="the other job's verdict is among this one's")
    named = {verdict.culprits for verdict in cluster.diagnosis.jobs[OTHER].verdicts}
    is_named = (fault.rank,) in named
    return replace(result, grade=Grade.RIGHT if is_named else Grade.SILENT, why="" if is_named else f"other: {named}")


def _play_cancelled(story: Story) -> Result:
    """Let a rank hang, and somebody end all launchers once the hang has been named."""
    cluster = StoryCluster(story)
    truths = truths_of(story)
    run_to_strike(cluster)
    watch(cluster, story, truths)
    for index in range(story.shape.num_nodes):
        cluster.end_launcher(index, SIGTERM)
    cluster.run(ENDS_S)
    return grade(story, cluster, truths)


def _play_again(story: Story) -> Result:
    """Let an attempt fail, and the next one train or hang."""
    cluster = StoryCluster(story)
    truth = truth_of(story, story.faults[0])
    run_to_strike(cluster)
    watch(cluster, story, (truth,))
    first = grade(story, cluster, (truth,))
    if first.grade is not Grade.RIGHT:
        return first
    end_s = cluster.elapsed_s + ENDS_S
    while any(rank.end is None for rank in cluster.ranks) and cluster.elapsed_s < end_s:
        cluster.run(0.5)
    for rank in cluster.ranks:
        rank.end = rank.end or (None, SIGTERM, "")
    cluster.run(RESTART_S)
    cluster.next_attempt()
    cluster.run(GONE_S)
    if cluster.alarming:
        return replace(first, grade=Grade.FALSE_ALARM, why=f"of the former attempt: {cluster.alarming}")
    cluster.told_alarms.clear()
    faults = story.faults[1:]
    truths = tuple(truth_of(story, fault) for fault in faults)
    rest = replace(story, faults=faults)
    if truths:
        run_to_strike(cluster)
        watch(cluster, rest, truths)
    else:
        cluster.run(TRAINS_S)
    return replace(grade(rest, cluster, truths), story=story)


class OtherCluster(StoryCluster):
    """Plays the ranks of a second job; the first one's nodes speak for it."""

    def __init__(self, story: Story, nodes: list[SimNode]) -> None:
        super().__init__(story, job_id=OTHER)
        for node, shared in zip(self.nodes, nodes, strict=True):
            node.join(shared, OTHER, self.now_s)

    def advance(self, now_s: float) -> None:
        """Let time pass up to a moment."""
        while self.now_s < now_s - 1e-6:
            self._tick()

    def statuses(self, index: int, now_s: float) -> list[JobStatus]:
        """Return what a node has to say of this job."""
        return [self.nodes[index].status(now_s)]

    def _send(self, node: SimNode) -> None:
        node.sent_at_s = self.now_s

    def _observe(self) -> None:
        """Nobody watches this one by itself."""
