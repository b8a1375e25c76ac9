"""What the console shows while its hosts are on their way: what they wait for, and not for an agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from app.diagnosis.diagnoser import Diagnoser
from app.errors import HostUnreachableError
from app.fleet.agent_link import LinkGroup
from app.model.cluster import Cluster
from app.preflight.findings import HostStep, Step
from app.session.opening import OpeningProgress
from app.view.view import View
from tests.support.consoles import SimSource, desk
from tests.support.screens import assert_looks_as_before
from tests.support.waiting import until

if TYPE_CHECKING:
    from app.fleet.agent_link import AgentLink

NOW_S = 100.0


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_the_headline_names_what_the_hosts_wait_for(size: tuple[int, int]) -> None:
    cluster, diagnoser = Cluster(["h1", "h2"]), Diagnoser()
    source = SimSource(lambda: View(cluster, diagnoser.observe(cluster, NOW_S), NOW_S), can_inject=False)
    progress = OpeningProgress(["h1", "h2"])
    source.starting = progress  # type: ignore[assignment]  # other sources start jobs
    progress.move("h1", HostStep.READY)
    async with desk(source, size) as console:
        assert_looks_as_before(f"opening-connecting-{size[0]}x{size[1]}", console.lines())
        progress.move("h1", Step.REACHING)
        progress.move("h2", Step.EXAMINING)
        await console.frames(10)
        assert_looks_as_before(f"opening-doctor-{size[0]}x{size[1]}", console.lines())


def test_a_host_that_does_not_answer_is_waited_for_no_longer_and_one_alone_is_not_counted() -> None:
    progress = OpeningProgress(["h1", "h2", "h3"])
    progress.move("h1", Step.DONE)
    progress.move("h2", Step.FAILED)

    assert progress.text == "rankdeck doctor looks at 3 hosts: 1 of 3 done, waiting for h3"
    assert OpeningProgress(["h1"]).text == "going to h1"


def test_a_host_that_cannot_be_reached_is_waited_for_no_longer() -> None:
    progress = OpeningProgress(["h1", "h2"])

    def refuse() -> None:
        raise HostUnreachableError("h2", "refused")

    def come_last() -> None:
        until(lambda: "h2" not in progress.text, 10.0, "the failed host is left out")
        assert progress.text == "going to 2 hosts: 0 of 2 done, waiting for h1"

    with LinkGroup() as group:
        for name, connect in (("h1", come_last), ("h2", refuse)):
            group.add(cast("AgentLink", SimpleNamespace(host=name, connect=connect, close=lambda: None)))
        away = progress.connect(group, lambda _link: None)

    assert list(away) == ["h2"]
