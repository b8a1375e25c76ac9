"""The command `inspect`: training that anything has launched, looked at from outside, on this machine or on hosts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from app.cli.chosen_hosts import HostsWanted, on_each, takes_hosts
from app.cli.headless import print_line
from app.cli.options import json_option, print_json
from app.diagnosis.causes import Severity
from app.errors import AppError, ExitCode, UsageError
from app.inspect.comparison import finding_of, standing_of
from app.inspect.inspection_text import job_lines, job_object, unseen_lines
from app.inspect.inspector import look_at_host, own_py_spy
from app.inspect.seen import jobs_of
from app.text import clean, nodes_text

if TYPE_CHECKING:
    from app.inspect.seen import HostSeen, SeenJob

PERIOD_S = 1.0
"""Between two looks."""


@click.command()
@click.option("--looks", type=click.IntRange(2, 60), default=3, show_default=True, help="How often to look, 1 s apart")
@click.option("--watch", "is_watching", is_flag=True, help="Inspect again and again, until Ctrl-C")
@click.option(
    "--evidence",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write everything that was seen into a new file, as JSON",
)
@json_option
@takes_hosts
@click.argument("which", metavar="[PID|JOB]", required=False)
def inspect(*, wanted: HostsWanted, which: str | None, is_json: bool, **how: Any) -> None:
    """Name the rank that holds up training that anything has launched; nothing has to be prepared.

    Reads /proc and, by py-spy, the stacks of all ranks, several times; pauses nothing. Exit code 10 when a rank holds
    the others up.
    """
    if wanted.hub is not None:
        raise UsageError("inspect does not go through a relay", "name the hosts: --relay none --host gpu1")
    spy = own_py_spy()
    while True:
        code = _inspect(wanted, which, spy, is_json=is_json, num_looks=how["looks"], evidence=how["evidence"])
        if not how["is_watching"]:
            raise SystemExit(code)
        time.sleep(PERIOD_S)


def _inspect(
    wanted: HostsWanted, which: str | None, spy: str, *, is_json: bool, num_looks: int, evidence: Path | None
) -> ExitCode:
    seen: dict[str, HostSeen] = {}
    code = ExitCode.WELL
    answers = on_each(
        wanted.entries, wanted.python, wanted.ssh_config, lambda link: look_at_host(link, spy, num_looks, PERIOD_S)
    )
    for host, answer in answers:
        if isinstance(answer, AppError):
            code = code or ExitCode(answer.exit_code)
            print_line(f"rankdeck: {answer.whole}")
        else:
            seen[host] = answer
    jobs = [job for job in jobs_of(seen.items()) if which is None or _is_meant(job, which)]
    if which is not None and not jobs:
        raise UsageError(f"no rank of {clean(which)} runs on {nodes_text(list(seen))}", "rankdeck inspect shows all")
    if evidence is not None:
        _write(evidence, seen)
    found = [(job, [standing_of(rank) for rank in job.ranks]) for job in jobs]
    findings = [(job, standings, finding_of(job, standings)) for job, standings in found]
    if is_json:
        print_json({"jobs": [job_object(*one) for one in findings], "unseen": unseen_lines(seen)})
    else:
        for one in findings:
            click.echo("\n".join(job_lines(*one)))
        if not findings and seen:
            click.echo(f"no training ranks run on {nodes_text(list(seen))}")
        for line in unseen_lines(seen):
            print_line(f"rankdeck: {line}")
    if any(finding.severity is Severity.CRITICAL for _, _, finding in findings):
        return ExitCode.VERDICT_STANDS
    return code


def _is_meant(job: SeenJob, which: str) -> bool:
    return which in (job.name, job.ranks[0].program) or any(which == str(rank.pid) for rank in job.ranks)


def _write(path: Path, seen: dict[str, HostSeen]) -> None:
    text = msgspec.json.format(msgspec.json.encode(seen))
    try:
        path.touch(0o600, exist_ok=False)
        path.write_bytes(text)
    except OSError as error:
        raise UsageError(f"{clean(str(path))} cannot be written: {error.strerror}", "name a new file") from error
