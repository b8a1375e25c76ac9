"""What ranks, nodes and agents send is text on the screen, never markup, never an escape, and never a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.errors import AgentRefusedError
from app.model.cluster import Cluster
from app.text import clean
from app.tui.actions import VIEW_NAMES
from app.tui.theme import Look
from ddpcore.wire import BARRIER_GROUP, Phase
from tests.support.consoles import SimSource, desk
from tests.support.hostile_text import PAYLOADS, assert_is_harmless
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Work

if TYPE_CHECKING:
    from collections.abc import Iterator


def hostile_sim(payload: str, monkeypatch: pytest.MonkeyPatch) -> SimCluster:
    """Return a training whose node names, file, functions, operations and labels are hostile; rank 2 is frozen."""

    def program(rank: int) -> Iterator[Action]:
        for step in range(1, 1000):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 10, f"forward{payload}", 0.02)
            yield Call(f"all_reduce{payload}", 11, f"step{payload}", sizes=((3,),), phase=Phase.BACKWARD)
            yield EndStep(step, 2.0, 0)
            yield Call("barrier", 12, f"sync{payload}", BARRIER_GROUP, f"epoch{payload}")

    monkeypatch.setattr("tests.support.sim_rank.PROGRAM_FILE", f"/home/{payload}/t{payload}.py")
    sim = SimCluster(program=program)
    for index, node in enumerate(sim.nodes):
        node.name = f"n{index}{payload}"
    sim.cluster = Cluster([node.name for node in sim.nodes])
    sim.freeze(2, at_step=20)
    sim.run(10)
    return sim


@pytest.mark.parametrize(
    ("payload", "look"),
    [*((payload, Look()) for payload in PAYLOADS), ("".join(PAYLOADS), Look(has_colour=False, is_ascii=True))],
    ids=[*(f"payload-{index}" for index in range(len(PAYLOADS))), "all-of-them-in-ascii"],
)
async def test_no_view_dialog_or_notification_acts_on_what_it_shows(
    payload: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SimSource(hostile_sim(payload, monkeypatch).view)
    source.print(f"n0{payload}", 0, f"before {payload} after")
    source.print("n1", 2, payload * 50, "stderr")
    source.notice(f"notice {payload}")
    source.refusal = AgentRefusedError(f"n0{payload}", f"reason{payload}", f"message {payload}")
    async with desk(source, (120, 30), look) as console:
        for name in VIEW_NAMES:
            await console.show(name)
            assert_is_harmless(console)
        if look.is_ascii:
            assert console.text().isascii()
        await console.show("logs")
        assert f"before {look.shown(clean(payload))}"[:40] in console.text()
        await console.press("right", "right", "left")
        assert_is_harmless(console)
        await console.resize(70, 20)
        for name in VIEW_NAMES:
            await console.show(name)
            assert_is_harmless(console)

        await console.press("F")
        assert_is_harmless(console)
        await console.press("enter", "enter", "right", "enter")
        assert len(source.injected) == 1
        assert "Not done" in console.text()
        assert_is_harmless(console)
        assert console.console.is_running


async def test_markup_is_shown_as_it_was_sent() -> None:
    sim = SimCluster()
    source = SimSource(sim.view)
    source.print("demo-0", 0, "[rank0]: loss [/b] [@click=app.quit]x[/]")
    async with desk(source) as console:
        await console.show("logs")
        assert "[rank0]: loss [/b] [@click=app.quit]x[/]" in console.text()

        source.refusal = AgentRefusedError("demo-0", "not_running", "[rank0] is [/b] gone")
        console.console.show_notice("[rank0] is [/b] gone")
        await console.settle()
        assert "[rank0] is [/b] gone" in console.text()
