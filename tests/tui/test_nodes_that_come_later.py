"""Nodes that have come after the console was opened: it says so for as long as it is so, wherever nodes are shown."""

from __future__ import annotations

import pytest

from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.model.new_nodes import NewNodes
from app.view.view import View
from tests.support.consoles import SimSource, TalkingSource, desk
from tests.support.node_reports import node_report
from tests.support.sim import SimCluster

SIZES = ((80, 24), (120, 35), (200, 50))
TOLD = "2 more nodes have come to the relay: leave and come in again"
COME = NewNodes("login1", ("gpu8", "gpu9"))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_below_the_nodes_of_a_running_job_it_stands_whole(size: tuple[int, int]) -> None:
    source = TalkingSource(SimCluster(num_nodes=6, ranks_per_node=2))
    source.run(12)
    async with desk(source, size) as console:
        await console.play(source, 4)
        assert "more nodes have come" not in console.text()
        source.sim.cluster.put_new_nodes(COME)
        await console.play(source, 4)

        lines = console.lines()
        (place,) = [place for place, line in enumerate(lines) if TOLD in line]
        assert lines[place].strip() == f"▲ {TOLD}"
        assert lines[place - 1].endswith("more nodes, all up")
        assert lines[place + 1].startswith(" RANK"), "the ranks follow"

        source.sim.cluster.put_new_nodes(NewNodes("login1"))
        await console.play(source, 4)
        assert "more nodes have come" not in console.text()


async def test_before_a_job_the_first_line_says_it_too() -> None:
    cluster, diagnoser = Cluster(["gpu1"]), Diagnoser()
    cluster.apply("gpu1", node_report(1, workers=[], jobs=[]), 100.0)
    cluster.put_new_nodes(COME)
    async with desk(SimSource(lambda: View(cluster, diagnoser.observe(cluster, 100.0), 100.0))) as console:
        assert f"1 node up, no job yet; {TOLD}" in " ".join(console.text().split())
        assert sum("more nodes have come" in line for line in console.lines()) == 2
