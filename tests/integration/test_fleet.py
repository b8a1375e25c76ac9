"""A job over two real agents: all of it starts, or none of it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.commands import GetStatus, Shutdown
from agent.wire.jobs import JobSpec, JobState
from agent.wire.replies import Status
from app.command_road import open_local_road
from app.errors import AgentRefusedError, AgentUnreachableError
from app.fleet import Fleet
from app.private_agents import PrivateAgents

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from app.command_road import CommandRoad

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


async def roads_to(agents: PrivateAgents) -> dict[str, CommandRoad]:
    return {node: await open_local_road(node, path, sys.executable) for node, path in agents.directories.items()}


async def job_states(roads: Mapping[str, CommandRoad]) -> dict[str, list[JobState]]:
    states = {}
    for node, road in roads.items():
        status = await road.request(GetStatus())
        assert isinstance(status, Status)
        states[node] = [job.state for job in status.report.jobs]
    return states


async def test_when_one_node_refuses_no_node_keeps_the_job(agents: PrivateAgents) -> None:
    roads = await roads_to(agents)
    fleet = Fleet(roads)
    specs = specs_of(agents.directories)
    specs["n1"] = msgspec.structs.replace(specs["n1"], workdir="/no/such/place")

    with pytest.raises(AgentRefusedError, match=r"n1 refused \(no_workdir\)"):
        await fleet.start(specs)

    assert await job_states(roads) == {"n0": [], "n1": []}
    await fleet.close()


async def test_when_one_node_is_gone_no_other_keeps_the_job(agents: PrivateAgents) -> None:
    roads = await roads_to(agents)
    await roads["n1"].request(Shutdown())
    fleet = Fleet(roads)

    with pytest.raises(AgentUnreachableError, match="n1"):
        await fleet.start(specs_of(agents.directories))

    assert await job_states({"n0": roads["n0"]}) == {"n0": []}
    await fleet.close()


@pytest.mark.ranks
async def test_a_started_job_runs_on_every_node_and_a_kill_ends_it_on_every_node(agents: PrivateAgents) -> None:
    roads = await roads_to(agents)
    fleet = Fleet(roads)
    await fleet.start(specs_of(agents.directories))
    assert await job_states(roads) == {"n0": [JobState.RUNNING], "n1": [JobState.RUNNING]}

    await fleet.kill("demo")

    async with asyncio.timeout(10):
        while await job_states(roads) != {"n0": [JobState.STOPPED], "n1": [JobState.STOPPED]}:  # noqa: ASYNC110 - agents
            await asyncio.sleep(0.02)
    await fleet.close()
