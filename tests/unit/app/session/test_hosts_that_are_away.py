"""Hosts that cannot be reached or have ceased to answer, in a console that looks once."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from agent.wire.codec import REPORTS_SOCKET
from app.cli import hosts as commands
from app.diagnosis.causes import Severity
from app.errors import AgentUnreachableError, ExitCode, HostUnreachableError, NoAgentError
from app.fleet.agent_link import AgentPlace
from app.fleet.host_link import Access, HostLink
from app.fleet.start_progress import NodeStage, StartProgress
from app.inventory.inventory import HostEntry
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.recording.events import EventKind
from app.session import reconnector
from app.session.hosts import Connections, Hosts
from app.session.reconnector import Reconnector
from app.session.remote_session import RemoteSession
from app.session.session import Session
from app.ssh.connection import ForwardingRefusedError
from tests.support.sim import SimCluster
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.fleet.agent_link import AgentLink, Kept
    from app.view.view import View


class Link:
    """A link to a host, reached or not; `kept` is that of a relay where one is given."""

    is_forwarded = runs_programs = True
    is_relayed = False
    directory = Path()

    def __init__(
        self, host: str, *, is_alive: bool = True, reason: UnreachableReason | None = None, kept: Link | None = None
    ) -> None:
        self.host, self.is_alive, self.unreachable_reason = host, is_alive, reason
        self.kept = kept or self

    def open_sockets(self, _on_frame: Callable[..., None]) -> None:
        """Open nothing."""

    def reconnect(self, *, asks: bool = False) -> None:  # noqa: ARG002 - as the link's
        raise OFF


OFF = HostUnreachableError("h2", "No route to host")


async def connections(*links: Link, away: dict[str, HostUnreachableError]) -> Connections:
    """Return connections that are not kept, of hosts none of which reports now."""
    hosts = Hosts(cast("tuple[AgentLink, ...]", links), tuple(HostEntry(link.host) for link in links), "", away)
    opened = Connections(hosts, lambda _sentence: None)
    await opened.open(lambda _node, _frame, _age_s: None, 0.0, lambda _host: True)
    return opened


def reasons(opened: Connections) -> dict[str, str]:
    """Return why hosts are unreachable now."""
    return {host: reason.why for host, reason in opened.unreachable_reasons.items() if reason is not None}


async def test_a_host_that_was_never_reached_stays_away_however_long_it_is_silent() -> None:
    opened = await connections(Link("h1"), Link("h2", is_alive=False), away={"h2": OFF})

    assert reasons(opened) == {"h2": "No route to host"}
    assert opened.failure is None


async def test_a_node_that_has_come_back_to_its_relay_is_not_away() -> None:
    relay = Link("login1")
    opened = await connections(Link("h1", kept=relay), Link("h2", kept=relay), away={"h2": OFF})

    assert reasons(opened) == {}


async def test_of_several_connections_only_the_last_one_that_is_lost_ends_a_look() -> None:
    links = [Link("h1"), Link("h2")]
    opened = await connections(*links, away={})
    links[1].is_alive = False

    assert (opened.failure, reasons(opened)) == (None, {"h2": "the connection is lost"})
    links[0].is_alive = False
    assert str(opened.failure) == "h1: the connection is lost"


async def test_a_host_that_is_connected_and_sends_no_report_is_away_until_it_does() -> None:
    opened = await connections(Link("h1"), Link("h2"), away={})
    is_silent = {"h1": False, "h2": True}
    await opened.open(lambda _node, _frame, _age_s: None, 0.0, lambda host: is_silent[host])

    opened.put_silent(["h2"], UnreachableReason("no report in 5 s", UnreachableKind.ANSWER))

    assert reasons(opened) == {"h2": "no report in 5 s"}
    is_silent["h2"] = False
    assert reasons(opened) == {}


@pytest.mark.parametrize(
    ("state", "away", "leaving", "words"),
    [
        ("running", {"h1": UnreachableKind.AGENT}, "the job goes on", "job two goes on; watch it: "),
        ("stopping", {}, "the job is being stopped", "job two is being stopped; watch it: "),
        (
            "stopping",
            {"h1": UnreachableKind.AGENT, "h2": UnreachableKind.AGENT},
            "no agent on h1 and h2: whether the job goes on is not known",
            "no agent on h1 and h2: whether job two goes on is not known; look: rankdeck status two --host h1",
        ),
        (
            "running",
            {"h1": UnreachableKind.CONNECTION, "h2": UnreachableKind.AGENT},
            "no answer from the agent on h1 and h2: whether the job goes on is not known",
            "no answer from the agent on h1 and h2: whether job two goes on is not known; watch it: ",
        ),
        (
            "running",  # the agents have just gone, and why is not known yet
            {"h1": None, "h2": None},
            "no answer from the agent on h1 and h2: whether the job goes on is not known",
            "no answer from the agent on h1 and h2: whether job two goes on is not known; watch it: ",
        ),
        ("stopped", {"h1": UnreachableKind.AGENT, "h2": UnreachableKind.AGENT}, "the job has ended", ""),
    ],
)
def test_who_leaves_a_job_of_which_no_agent_answers_reads_that_its_end_is_not_known(
    state: str, away: dict[str, UnreachableKind | None], leaving: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("h1", "h2")
    reasons = {name: UnreachableReason("gone", kind) for name, kind in away.items() if kind is not None}
    links = tuple(Link(name, reason=reasons.get(name)) for name in names)
    hosts = Hosts(cast("tuple[AgentLink, ...]", links), tuple(map(HostEntry, names)), "--host h1", {})
    session = RemoteSession(hosts)
    session._is_open, session.patience_s = True, math.inf
    job = SimpleNamespace(job_id="two", state=state, allow_faults=False, loss=None)
    monkeypatch.setattr(Session, "view", lambda _: SimpleNamespace(job=lambda: job))
    session._connections._is_unheard = away.__contains__

    session.view()

    assert (session.leaving, bool(session.cut_off)) == (leaving, words.find("not known") > 0)
    assert session.farewell().startswith(f"rankdeck: {words}" if words else "")
    session._is_open = False  # it is being closed, and its evidence is put together
    session._connections._is_unheard = lambda _host: False

    session.view()

    assert session.farewell().startswith(f"rankdeck: {words}" if words else "")


def test_a_socket_for_reports_that_is_refused_is_named_without_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise ForwardingRefusedError("h1", "no channel to /tmp/x/reports.sock: Connect failed")

    link = HostLink(Access("h1"))
    link.place, link._can_forward = AgentPlace(True, "/s", "/p", "/h", 6), True
    monkeypatch.setattr(link, "open_in", refuse)

    with pytest.raises(ForwardingRefusedError):
        link._open_socket(REPORTS_SOCKET)

    assert link.unreachable_reason == UnreachableReason(
        "no reports: its socket for reports does not answer", UnreachableKind.ANSWER
    )
    link.close()


class Looked:
    """What a command looks at: some nodes report."""

    away: frozenset[str] = frozenset()
    title = "rankdeck on demo-0, demo-1"

    def __init__(self, sim: SimCluster) -> None:
        self.sim, self.view = sim, sim.view

    async def connect(self) -> None:
        """Connect to nothing."""

    check_job = replay_history = close = connect

    def put_silent(self, hosts: list[str], reason: UnreachableReason) -> None:
        for host in hosts:
            self.sim.cluster.put_unreachable(host, reason)
        self.sim.run(0.2)

    def drain_notices(self) -> list[str]:
        return []


def first_view_of(sim: SimCluster) -> Looked:
    return Looked(sim)


async def test_a_look_goes_on_with_the_nodes_that_report_and_returns_10_for_a_job_that_lost_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "FIRST_REPORTS_S", 0.0)
    sim = SimCluster(num_nodes=2, ranks_per_node=1)
    sim.nodes[1].is_unheard = True
    sim.run(seconds=8)

    shown: list[View] = []
    code = await commands.look(cast("RemoteSession", first_view_of(sim)), shown.append, is_watching=False)

    (view,) = shown
    assert (code, [row.state for row in view.nodes()]) == (ExitCode.VERDICT_STANDS, ["up", "lost"])
    assert view.headline().text == (
        "no answer from the agent on demo-1: no report in 0 s; rank 1 trains on unseen, as the others step on"
    )
    assert capsys.readouterr().err == (
        "rankdeck: the agent on demo-1 does not answer: no report in 0 s; going on without 1 of 2 hosts\n"
    )


async def test_a_look_at_nodes_of_which_none_reports_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "FIRST_REPORTS_S", 0.0)
    sim = SimCluster(num_nodes=2, ranks_per_node=1)
    for node in sim.nodes:
        node.is_unheard = True
    sim.run(seconds=8)

    with pytest.raises(AgentUnreachableError, match="no report in 0 s"):
        await commands.first_view(cast("RemoteSession", first_view_of(sim)))


class Noticing(Session):
    """A session that takes what is said of its connections."""

    def take(self, sentence: str) -> None:
        self._notices.append(sentence)


async def test_a_lost_connection_is_a_warning_among_the_events_and_its_return_is_not() -> None:
    session = Noticing({})
    link = Link("h2", is_alive=False)
    keeper = Reconnector(cast("Kept", link), session.take, patience_s=0.0)

    await keeper.run()

    session.drain_notices()
    rows = [(event.kind, event.severity, event.text) for event in session.events.latest_first()]
    assert (EventKind.NODE, Severity.WARNING, "h2: No route to host") in rows
    session.take("h2: the connection is back after 3 s")
    session.drain_notices()
    latest = next(iter(session.events.latest_first()))
    assert (latest.kind, latest.severity) == (EventKind.DONE, Severity.OK)


class Returning(Link):
    """A link whose agent is found at the second look; its reports come again after the first."""

    def __init__(self) -> None:
        super().__init__("h2", is_alive=False)
        self.num_looks = 0

    def find(self) -> None:
        raise NoAgentError("h2", "no agent runs there")

    def reconnect(self, *, asks: bool = False) -> None:  # noqa: ARG002 - as the link's
        self.num_looks += 1
        if self.num_looks == 1:
            raise NoAgentError("h2", "no agent runs there")


async def test_an_agent_whose_reports_come_again_is_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnector, "FIRST_PAUSE_S", 3600.0)
    session, link = Noticing({}), Returning()
    keeper = Reconnector(cast("Kept", link), session.take, 3600.0, is_unheard=lambda: link.num_looks == 0 or not heard)
    heard = False
    running = asyncio.create_task(keeper.run())
    try:
        await until_async(lambda: link.num_looks == 1, 30.0, "it is looked for")
        heard = True
        await until_async(lambda: "h2: the agent is back" in session.drain_notices(), 30.0, "it is found")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("how", ["in the console", "by a command"])
async def test_the_events_of_a_start_are_in_the_order_in_which_they_came(how: str) -> None:
    session = Noticing({})
    await session.connect()
    progress = StartProgress("job gpt", ["h1", "h2"])
    for stage in (NodeStage.ASKED, NodeStage.PREPARED, NodeStage.BEGINNING, NodeStage.BEGUN):
        for node in ("h1", "h2"):
            progress.move(node, stage)
            session.fleet._on_progress(progress)  # several within a frame
    started = "job gpt started on h1 and h2 with 2 ranks"
    if how == "in the console":
        session.log_done(started)
    else:
        session.take(started)

    notices = session.drain_notices()
    await session.close()

    steps = [f"job gpt: {step} on h1 and h2, 2 of 2 nodes" for step in ("prepared", "begun")]
    by_command = [started] * (how == "by a command")
    assert notices == [*steps, *by_command]
    texts = [event.text for event in session.events.latest_first()][::-1]
    assert texts == [*steps, *(by_command or [f"on request: {started}"])]
    assert session.drain_notices() == []
    assert len(session.events) == len(texts), "each is among the events once"
