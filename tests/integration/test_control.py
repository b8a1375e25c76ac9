"""A job over two real agents: stopped, killed and begun again, also with other ranks."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from agent.wire.commands import Command, PrepareAgain, Reply, ShowJob, Shown
from agent.wire.jobs import JobSpec, JobState
from app.errors import AgentRefusedError, AppError
from app.session.control import has_ended
from app.session.demo import PrivateAgents
from app.session.session import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from agent.wire.jobs import JobStatus

NODES = ("n0", "n1")
PROGRAM = """
import os, pathlib, signal, time
if os.environ.get("OUT"):
    name = "-".join(os.environ[key] for key in ("RANKDECK_ATTEMPT", "RANK", "WORLD_SIZE", "SECRET_TOKEN"))
    pathlib.Path(os.environ["OUT"], name).touch()
signal.sigwait({signal.SIGTERM})
"""


def specs_of(directories: Mapping[str, Path], out: Path) -> dict[str, JobSpec]:
    """A program that waits to be ended, one rank a node; each rank leaves a file that says what it was given."""
    script = out / "wait.py"
    script.write_text(PROGRAM)
    return {
        node: JobSpec(
            job_id="wait",
            attempt=0,
            python=sys.executable,
            command=[str(script)],
            workdir=str(out),
            num_nodes=2,
            node_rank=node_rank,
            local_world_size=1,
            first_rank=node_rank,
            world_size=2,
            master_addr="127.0.0.1",
            interface="lo",
            env={"OUT": str(out), "SECRET_TOKEN": "hush"},
            grace_s=1.0,
            save_s=2.0,
        )
        for node_rank, node in enumerate(directories)
    }


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    """A session over two agents that run the job."""
    agents = PrivateAgents(NODES)
    agents.make_directories()
    session = Session(agents.directories)
    try:
        await agents.start()
        await session.connect()
        await session.start_job(specs_of(agents.directories, tmp_path))
        await until(lambda: ran(tmp_path, 0) == {(0, 2), (1, 2)})
        yield session
    finally:
        await session.close()
        await agents.close()


def ran(out: Path, attempt: int) -> set[tuple[int, int]]:
    """Return the (rank, world size) pairs of an attempt that have begun with the job's own environment."""
    found = {tuple(path.name.split("-")) for path in out.iterdir() if path.name.endswith("-hush")}
    return {(int(rank), int(world_size)) for number, rank, world_size, _ in found if int(number) == attempt}


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)


async def ended(session: Session) -> dict[str, JobStatus]:
    async with asyncio.timeout(30):
        while not has_ended(statuses := await session.job_control.statuses("wait")):  # noqa: ASYNC110 - agents
            await asyncio.sleep(0.05)
    return statuses


@pytest.mark.ranks
async def test_a_job_begins_again_with_what_it_was_started_with_and_with_other_ranks(
    session: Session, tmp_path: Path
) -> None:
    done = await session.job_control.restart("wait")
    assert done == "job wait restarts with 2 ranks (restart 1)"
    assert session.job_control.doing == ""
    await until(lambda: ran(tmp_path, 1) == {(0, 2), (1, 2)})

    await session.job_control.restart("wait", 3, is_immediate=True)
    await until(lambda: ran(tmp_path, 2) == {(0, 3), (1, 3), (2, 3)})
    statuses = await session.job_control.statuses("wait")
    assert [(status.first_rank, status.local_world_size) for status in statuses.values()] == [(0, 2), (2, 1)]
    told = [session.events[index].text for index in range(len(session.events))]
    asked = [text for text in told if text.startswith("on request: ")]
    assert asked == [f"on request: {done}", "on request: job wait restarts with 3 ranks (restart 2)"]


@pytest.mark.slow
@pytest.mark.ranks
async def test_a_restart_that_a_node_refuses_can_be_asked_for_once_more(session: Session, tmp_path: Path) -> None:
    await session.job_control.kill("wait")
    assert {status.state for status in (await ended(session)).values()} == {JobState.STOPPED}
    script = tmp_path / "wait.py"
    script.rename(tmp_path / "away.py")
    with pytest.raises(AgentRefusedError, match="is not a file"):
        await session.job_control.restart("wait")
    (tmp_path / "away.py").rename(script)

    await session.job_control.restart("wait")

    await until(lambda: ran(tmp_path, 1) == {(0, 2), (1, 2)})


@pytest.mark.slow
@pytest.mark.ranks
async def test_when_the_second_node_refuses_the_first_keeps_what_the_job_is_made_of(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.job_control.kill("wait")
    await ended(session)
    fleet = session.fleet
    real_ask = fleet.ask

    async def refuse(node: str, command: Command) -> Reply:
        if node == "n1" and isinstance(command, PrepareAgain):
            raise AgentRefusedError("n1", "too_few_gpus", "1 rank would share 0 GPUs")
        return await real_ask(node, command)

    before = await session.job_control.statuses("wait")
    monkeypatch.setattr(fleet, "ask", refuse)
    with pytest.raises(AgentRefusedError, match="1 rank would share 0 GPUs"):
        await session.job_control.restart("wait", 5)
    monkeypatch.undo()
    statuses = await session.job_control.statuses("wait")
    assert {node: (status.state, status.attempt) for node, status in statuses.items()} == {
        "n0": (JobState.STOPPED, 0),
        "n1": (JobState.STOPPED, 0),
    }
    shares = {node: status.local_world_size for node, status in statuses.items()}
    assert shares == {node: status.local_world_size for node, status in before.items()}, "as before, not as was wished"

    await session.job_control.restart("wait")

    await until(lambda: ran(tmp_path, 1) == {(0, 2), (1, 2)})
    shown = await fleet.ask("n0", ShowJob("wait"))
    assert isinstance(shown, Shown)
    assert shown.spec.env["SECRET_TOKEN"] != "hush", "no console is told of it"


@pytest.mark.slow
@pytest.mark.ranks
async def test_a_kill_takes_the_place_of_a_restart_that_waits_for_the_end(session: Session) -> None:
    restart = asyncio.create_task(session.job_control.restart("wait"))
    await until(lambda: session.job_control.doing == "restart: waiting for the job to end")

    await session.job_control.kill("wait")

    assert await restart == "the restart of job wait was given up for another wish"
    assert session.job_control.doing == ""
    assert {status.attempt for status in (await ended(session)).values()} == {0}


@pytest.mark.slow
@pytest.mark.ranks
async def test_what_is_not_there_is_refused_with_what_is(session: Session) -> None:
    for wish in (
        session.job_control.stop("gpt", is_agreed=True),
        session.job_control.kill("gpt"),
        session.job_control.restart("gpt"),
    ):
        with pytest.raises(AppError, match=r"there is no job gpt.*; those t?here: wait"):
            await wish
    await session.job_control.stop("wait", is_agreed=False)
    assert {status.state for status in (await ended(session)).values()} == {JobState.STOPPED}
