"""Hosts that there is no way to: their rows say why, in the place of figures that nobody has."""

from __future__ import annotations

import pytest

from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.model.unreachable_reason import UnreachableReason
from app.view.view import View
from tests.support.consoles import SimSource, TalkingSource, desk, never_reached_source
from tests.support.node_reports import node_report
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

SIZES = ((80, 24), (120, 35), (200, 50))
WHY = "no answer from port 22 within 10 s: Connection timed out"


def row_of(console_lines: list[str], node: str) -> str:
    return next(line for line in reversed(console_lines) if line.startswith(f" {node}"))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", ["overview", "memory"])
async def test_a_host_that_was_never_reached_looks_as_before(name: str, size: tuple[int, int]) -> None:
    source = never_reached_source()
    async with desk(source, size) as console:
        await console.play(source, 14)
        await console.show(name)
        assert_looks_as_before(f"away-{name}-{size[0]}x{size[1]}", console.lines())
        assert WHY in row_of(console.lines(), "demo-2")


async def test_of_its_ranks_it_is_not_said_that_they_have_not_been_started() -> None:
    source = never_reached_source()
    async with desk(source) as console:
        await console.play(source, 14)
        assert "not started" not in console.text()
        (row,) = [line for line in console.lines() if line.startswith("    9 ")]
        assert row.split() == ["9", "demo-2", "▲", "lost", "not", "known"]


async def test_the_details_of_such_a_rank_claim_nothing_of_its_process() -> None:
    source = never_reached_source()
    async with desk(source) as console:
        await console.play(source, 14)
        await console.show("ranks")
        text = console.text()
        assert "RANK 8" in text
        assert "no process yet" not in text
        assert [line.split("process")[1].strip() for line in console.lines() if "process  " in line] == [
            "not known on demo-2"
        ]


async def test_of_a_host_that_is_lost_later_the_age_of_the_last_report_stays_beside_why() -> None:
    source = TalkingSource(SimCluster(num_nodes=4, ranks_per_node=4))
    source.run(12)
    source.sim.lose_node(2)
    source.sim.cluster.put_unreachable("demo-2", UnreachableReason(WHY))
    async with desk(source) as console:
        await console.play(source, 8)
        cells = row_of(console.lines(), "demo-2").split()
        assert cells[:4] == ["demo-2", "✖", "lost", "8-11"]
        assert " ".join(cells[4:-1]) == WHY
        assert cells[-1].endswith("s")


async def test_before_a_job_each_host_says_why_it_is_away_and_the_first_line_too() -> None:
    cluster, diagnoser = Cluster(["gpu1", "gpu2", "gpu3"]), Diagnoser()
    cluster.apply("gpu1", node_report(1, workers=[], jobs=[]), 100.0)
    cluster.put_unreachable("gpu2", UnreachableReason("port 22 refuses connections"))
    cluster.put_unreachable("gpu3", UnreachableReason("no route to host"))
    source = SimSource(lambda: View(cluster, diagnoser.observe(cluster, 100.0), 100.0))
    async with desk(source) as console:
        assert "no connection to gpu2 (port 22 refuses connections) and gpu3 (no route to host)" in console.text()
        assert row_of(console.lines(), "gpu3").split(maxsplit=3)[1:] == ["✖", "lost", "no route to host"]
