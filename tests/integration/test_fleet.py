"""A job over two real agents: all of it starts, or none of it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.codec import CONTROL_SOCKET
from agent.wire.commands import Abort, Command, Commit, GetStatus, Kill, Prepare, Reply, Shutdown, Status
from agent.wire.jobs import JobSpec, JobState
from app.errors import AgentRefusedError, AgentUnreachableError
from app.fleet.commands import StreamChannel
from app.fleet.fleet import Fleet
from app.session.demo import PrivateAgents

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from app.fleet.commands import CommandChannel

NODES = ("n0", "n1")


def specs_of(directories: Mapping[str, Path]) -> dict[str, JobSpec]:
    """The demo program, one rank a node."""
    return {
        node: JobSpec(
            job_id="demo",
            attempt=0,
            python=sys.executable,
            command=["-m", "ddpcore.examples.bytegpt"],
            workdir=str(directory / "work"),
            num_nodes=2,
            node_rank=node_rank,
            local_world_size=1,
            first_rank=node_rank,
            world_size=2,
            master_addr="127.0.0.1",
            interface="lo",
        )
        for node_rank, (node, directory) in enumerate(directories.items())
    }


@pytest.fixture
async def agents() -> AsyncIterator[PrivateAgents]:
    agents = PrivateAgents(NODES)
    agents.make_directories()
    try:
        await agents.start()
        yield agents
    finally:
        await agents.close()
        assert [path for path in agents.directories.values() if path.exists()] == []


def roads_to(agents: PrivateAgents) -> dict[str, CommandChannel]:
    return {node: StreamChannel(node, path) for node, path in agents.directories.items()}


async def job_states(channels: Mapping[str, CommandChannel]) -> dict[str, list[JobState]]:
    states = {}
    for node, road in channels.items():
        status = await road.request(GetStatus())
        assert isinstance(status, Status)
        states[node] = [job.state for job in status.report.jobs]
    return states


@pytest.mark.fault(row=24)
async def test_when_one_node_refuses_no_node_keeps_the_job(agents: PrivateAgents) -> None:
    channels = roads_to(agents)
    fleet = Fleet(channels)
    specs = specs_of(agents.directories)
    specs["n1"] = msgspec.structs.replace(specs["n1"], workdir="/no/such/place")

    with pytest.raises(AgentRefusedError, match=r"n1 refused: .*/no/such/place") as caught:
        await fleet.start(specs)

    assert await job_states(channels) == {"n0": [], "n1": []}
    assert caught.value.hint == "--workdir names another directory there; n0: prepared, taken back"
    assert fleet.starting is not None
    assert fleet.starting.is_over
    assert "n1: refused: " in fleet.starting.account()
    await fleet.close()


async def test_when_one_node_is_gone_no_other_keeps_the_job(agents: PrivateAgents) -> None:
    channels = roads_to(agents)
    await channels["n1"].request(Shutdown())
    fleet = Fleet(channels)

    with pytest.raises(AgentUnreachableError, match="n1"):
        await fleet.start(specs_of(agents.directories))

    assert await job_states({"n0": channels["n0"]}) == {"n0": []}
    await fleet.close()


class CutLink:
    """The way to an agent's socket, which carries nothing more in either direction once a command has come to it."""

    def __init__(self, agent: Path, near: Path, command: bytes) -> None:
        self._agent = agent
        self._near = near
        self._command = command
        self._is_cut = asyncio.Event()

    async def __aenter__(self) -> Path:
        """Return the directory in which the agent seems to serve."""
        self._server = await asyncio.start_unix_server(self._carry, str(self._near / CONTROL_SOCKET))
        return self._near

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._agent / CONTROL_SOCKET))
        try:
            while line := await reader.readline():
                if self._is_cut.is_set() or self._command in line:
                    self._is_cut.set()
                    await reader.read()  # until the near end gives up
                    return
                far_writer.write(line)
                writer.write(await far_reader.readline())
        finally:
            for one in (writer, far_writer):
                one.close()


@pytest.mark.fault(row=25)
@pytest.mark.ranks
async def test_a_link_that_is_cut_between_prepare_and_commit_is_given_up_in_time_and_accounted_for(
    agents: PrivateAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.commands.REPLY_TIMEOUT_S", 5.0)  # real agents answer in time, on a busy machine
    told: list[str] = []
    direct = roads_to(agents)
    async with CutLink(agents.directories["n1"], tmp_path, b'"commit"') as near:
        cut = StreamChannel("n1", near)
        fleet = Fleet({"n0": direct["n0"], "n1": cut}, lambda progress: told.append(progress.text))

        async with asyncio.timeout(60):
            with pytest.raises(AgentUnreachableError, match="no reply in 5 s") as caught:
                await fleet.start(specs_of(agents.directories))

        assert caught.value.hint == (
            "n0: begun, killed; n1: prepared, no reply in 5 s, it may run there; "
            "job demo may run on n1: look with rankdeck status"
        )
        assert told[:4] == [
            "starting job demo: 0 of 2 prepared, waiting for n0",
            "starting job demo: 1 of 2 prepared",
            "starting job demo: 1 of 2 prepared, waiting for n1",
            "starting job demo: 2 of 2 prepared",
        ]
        assert "starting job demo: 1 of 2 begun, waiting for n1" in told
        assert told[-1] == "taking back job demo: n0 taken back, n1 not known"
        await fleet.close()
    assert (await job_states(direct))["n1"] == [JobState.PREPARED], "nothing runs there, though nobody knew"
    await Fleet(direct).close()


class LosingRoad:
    """A road that carries every command, and loses the replies to some."""

    def __init__(self, road: CommandChannel, kinds: tuple[type[Command], ...], lost: BaseException) -> None:
        self._road = road
        self._kinds = kinds
        self._lost = lost

    async def request(self, command: Command) -> Reply:
        reply = await self._road.request(command)
        if isinstance(command, self._kinds):
            raise self._lost
        return reply

    async def close(self) -> None:
        await self._road.close()


@pytest.mark.fault(row=25)
@pytest.mark.parametrize("lost", [AgentUnreachableError("n1", "no reply"), asyncio.CancelledError()], ids=repr)
async def test_a_node_whose_reply_is_lost_forgets_the_job_too(agents: PrivateAgents, lost: BaseException) -> None:
    channels = roads_to(agents)
    fleet = Fleet({"n0": channels["n0"], "n1": LosingRoad(channels["n1"], (Prepare,), lost)})

    with pytest.raises(type(lost)) as caught:
        await fleet.start(specs_of(agents.directories))

    assert await job_states(channels) == {"n0": [], "n1": []}
    assert "may run" not in getattr(caught.value, "hint", "")
    await fleet.close()


@pytest.mark.fault(row=23)
async def test_a_start_that_is_cancelled_leaves_no_job_and_no_reply_on_the_road(agents: PrivateAgents) -> None:
    channels = roads_to(agents)
    specs = specs_of(agents.directories)
    specs["n1"] = msgspec.structs.replace(specs["n1"], workdir="/no/such/place")  # no start gets as far as a commit

    for num_steps in range(0, 30, 3):
        start = asyncio.create_task(Fleet(channels).start(specs))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert await job_states(channels) == {"n0": [], "n1": []}

    await Fleet(channels).close()


@pytest.mark.slow
@pytest.mark.ranks
async def test_a_job_that_may_run_on_a_silent_node_is_said_to(agents: PrivateAgents) -> None:
    channels = roads_to(agents)
    silent = LosingRoad(channels["n1"], (Commit, Abort, Kill), AgentUnreachableError("n1", "no reply"))
    fleet = Fleet({"n0": channels["n0"], "n1": silent})

    with pytest.raises(AgentUnreachableError) as caught:
        await fleet.start(specs_of(agents.directories))

    assert caught.value.hint == (
        "n0: begun, killed; n1: prepared, no reply, it may run there; job demo may run on n1: look with rankdeck status"
    )
    await fleet.close()


@pytest.mark.slow
@pytest.mark.ranks
async def test_a_start_that_is_refused_or_unheard_leaves_a_running_job_of_that_name_alone(
    agents: PrivateAgents,
) -> None:
    channels = roads_to(agents)
    specs = specs_of(agents.directories)
    await Fleet(channels).start(specs)
    lost = {"n0": LosingRoad(channels["n0"], (Prepare,), AgentUnreachableError("n0", "no reply"))}
    for others in ({}, lost):
        with pytest.raises((AgentRefusedError, AgentUnreachableError)):
            await Fleet({**channels, **others}).start(specs)

    assert await job_states(channels) == {"n0": [JobState.RUNNING], "n1": [JobState.RUNNING]}
    await Fleet(channels).kill("demo")
    await Fleet(channels).close()


@pytest.mark.ranks
async def test_a_started_job_runs_on_every_node_and_a_kill_ends_it_on_every_node(agents: PrivateAgents) -> None:
    channels = roads_to(agents)
    fleet = Fleet(channels)
    await fleet.start(specs_of(agents.directories))
    assert await job_states(channels) == {"n0": [JobState.RUNNING], "n1": [JobState.RUNNING]}

    await fleet.kill("demo")

    async with asyncio.timeout(60):
        while await job_states(channels) != {"n0": [JobState.STOPPED], "n1": [JobState.STOPPED]}:  # noqa: ASYNC110 - agents
            await asyncio.sleep(0.02)
    await fleet.close()
