"""What the agents of a simulated cluster would remember of it, and what a console makes of that."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from agent.wire.commands import Tier
from agent.wire.digest import decode_frame
from agent.wire.reports import decode_node_report, encode_node_report
from app.diagnosis.rank_facts import Thresholds
from app.model.unreachable_reason import UnreachableReason
from app.recording.backfill import looks
from app.recording.history import History
from app.recording.history_replay import REPORT_S, stretches
from app.recording.history_replay import looks as history_looks
from app.recording.playback import ReplayModel
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.digest import NodeFrame
    from app.recording.history_replay import Stretch


def thinned(
    heard: Sequence[tuple[float, str, bytes]], node: str, period_s: float
) -> Iterator[tuple[float, str, NodeFrame]]:
    """Yield what a node's agent remembers: the first report of each period, as it keeps them on its disk."""
    slot = -1.0
    for at_s, name, frame in heard:
        if name == node and at_s // period_s != slot:
            slot = at_s // period_s
            yield at_s, node, decode_frame(encode_node_report(decode_node_report(frame)))


def remembered(sim: SimCluster, end_s: float, period_s: float = 0.5, nodes: Sequence[str] = ()) -> ReplayModel:
    """Return what the nodes remember up to a moment."""
    patient = Thresholds(silent_s=2.0 + period_s, confirm_s=0.5 + period_s, grace_s=1.0 + period_s)
    replay = ReplayModel([node.name for node in sim.nodes], patient, History(3 * period_s), "demo", is_excerpt=True)
    told = nodes or [node.name for node in sim.nodes]
    for _ in looks(replay, [thinned(sim.heard, node, period_s) for node in told], end_s):
        pass
    return replay


def frozen_and_thawed(seconds_after: float) -> tuple[SimCluster, float]:
    """Return a training in which rank 2 was frozen for a while, some time after, and when it was over."""
    sim = SimCluster()
    sim.run(40)
    sim.freeze(2)
    sim.run_until(lambda: bool(sim.verdicts()), 20, "a verdict")
    sim.run(5)
    sim.thaw(2)
    sim.run_until(lambda: not sim.verdicts(), 20, "its end")
    over_s = sim.now_s
    sim.run(seconds_after)
    return sim, over_s


@cache
def one_long_story() -> tuple[SimCluster, float]:
    """Return the same with half a minute after; nobody goes on with it."""
    return frozen_and_thawed(30.0)


def replayed(sim: SimCluster, thresholds: Thresholds | None = None, live_s: float = 1.0) -> ReplayModel:
    """Return what a command says now that has come a moment ago: it reads what the nodes remember, then looks on."""
    thresholds = thresholds or Thresholds()
    names = [node.name for node in sim.nodes if not node.is_lost]
    came_s = sim.now_s - live_s
    plan = stretches(len(names))
    begins_s = [came_s - stretch.max_age_s for stretch in plan]
    ends_s = [*begins_s[1:], came_s]
    heard = [one for one in sim.heard if one[0] <= came_s]
    told = [
        [_kept(heard, node, stretch, begin_s) for node in names]
        for stretch, begin_s in zip(plan, begins_s, strict=True)
    ]
    replay = ReplayModel([node.name for node in sim.nodes], thresholds, job_id="demo", is_excerpt=True)
    for _ in history_looks(replay, thresholds, zip(plan, told, ends_s, strict=True)):
        pass
    for lost in set(replay.cluster.node_names) - set(names):
        replay.cluster.put_unreachable(lost, UnreachableReason("no route to host"))
    for at_s, node, frame in sim.heard:
        if at_s > came_s:
            while replay.at_s + 0.1 < at_s:
                replay.look(replay.at_s + 0.1)
            replay.receive(node, decode_frame(frame), at_s)
    replay.look(sim.now_s)
    return replay


def _kept(
    heard: Sequence[tuple[float, str, bytes]], node: str, stretch: Stretch, begin_s: float
) -> Iterator[tuple[float, str, NodeFrame]]:
    """Yield what a node's agent hands out of a stretch: its disk has not every report, and the first of each period."""
    kept_s, before = float("-inf"), -1.0
    for at_s, name, frame in heard:
        if name != node or at_s < kept_s + {Tier.RECENT: 0.15, Tier.DAY: 9.9}[stretch.tier]:
            continue
        kept_s = at_s
        slot = at_s // stretch.period_s if stretch.period_s > REPORT_S else -1.0
        if at_s >= begin_s and (slot < 0 or slot != before):
            yield at_s, node, decode_frame(encode_node_report(decode_node_report(frame)))
        before = slot
