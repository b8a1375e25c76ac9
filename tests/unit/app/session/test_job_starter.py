"""Programs that are started again from the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from agent.wire.commands import Command, Shown
from app.inventory.program import Program
from app.session.control import JobStarter
from tests.support.jobs import make_local_spec
from tests.support.node_reports import job_status, node_report

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.reports import NodeReport
    from app.fleet.fleet import Fleet
    from app.session.remote_job import RunRequest

LOSS = "loss ([0-9.]+)"


async def test_a_program_is_started_again_with_the_patterns_of_its_metrics(tmp_path: Path) -> None:
    spec = make_local_spec(tmp_path, command=["train.py", "--lr", "0.1"], metrics=[LOSS])

    class OneAgent:
        async def report(self, _: str) -> NodeReport:
            return node_report(1, [job_status()], [])

        async def ask(self, _: str, __: Command) -> Shown:
            return Shown(spec, str(tmp_path), 29_500)

    started: list[RunRequest] = []

    async def start(request: RunRequest) -> str:
        started.append(request)
        return "started"

    starter = JobStarter(["h1"], lambda: cast("Fleet", OneAgent()), lambda: "", start)
    (program,) = await starter.past()
    assert program.command == ("train.py", "--lr", "0.1")
    for command in (("train.py", "--lr", "0.2"), ("other.py",), ("-m", "train.py")):
        await starter.start(Program(command))

    assert [request.metrics for request in started] == [(LOSS,), (), ()]
