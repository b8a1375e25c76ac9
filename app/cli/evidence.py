"""The commands `evidence` and `record`, which save what is known of a job, and `replay`, which shows it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.cli.chosen_hosts import HostsWanted, reached, takes_hosts
from app.cli.headless import print_line, waiting_for
from app.cli.options import audit_log, job_argument, job_under_way, json_option, present, print_json
from app.cli.presenting import is_terminal, print_summary, show_session
from app.cli.settings_options import takes_settings
from app.errors import ExitCode, UsageError
from app.fleet.agent_link import AgentLink
from app.paths import NotRegularError, TooLargeError, read_regular_file
from app.recording.bundle import bundle_name, encode_bundle, recording_of
from app.recording.evidence import Answers, default_directory, latest_evidence, write_evidence
from app.recording.incident_recorder import PATIENCE_S
from app.recording.playback import clock_text, from_its_job_on
from app.recording.records import MAX_RECORDING_BYTES, MalformedRecordingError, decode_recording
from app.recording.replay import ON_REQUEST, SPEEDS, Replay
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from app.text import LINE_LIMIT, clean
from app.view.summary import exit_code

if TYPE_CHECKING:
    from app.recording.bundle import Evidence
    from app.recording.records import Recording
    from app.settings.schema import Settings

LISTENING_S = 2.0
"""Seconds of current reports that are collected after the agent's history."""
MAX_LISTENING_S = 15.0
"""Limit of seconds until all lines that the agent keeps have come; the last lines come last."""
POLL_S = 0.1
EVIDENCE_HINT = "rankdeck evidence JOB writes what can be replayed, and so does rankdeck record FILE"


@click.command()
@job_argument
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write [JOB-TIME.zip in this directory]",
)
@json_option
@takes_settings
@takes_hosts
def evidence(*, job_id: str, wanted: HostsWanted, output: Path | None, is_json: bool, settings: Settings) -> None:
    """Save what is known of a job in one file.

    Reports, stacks, output and versions, for `rankdeck replay`. Without JOB it is the only one under way.
    """
    options = SessionOptions(thresholds=settings.thresholds, audit=audit_log())
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        found = asyncio.run(_collect(RemoteSession(hosts, None, options, job_id), job_id))
    path = write_evidence(output or Path(bundle_name(found.opening)), encode_bundle(found))
    shown = str(path).encode(errors="backslashreplace").decode()
    if is_json:
        fields = {"job_id": found.opening.job_id, "path": shown, "num_records": len(found.records)}
        print_json({"hosts": wanted.names, **fields})
        return
    print_line(f"rankdeck: look at it again: rankdeck replay {clean(str(path), LINE_LIMIT)}")
    click.echo(shown)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
@takes_settings
@takes_hosts
@job_argument
def record(*, wanted: HostsWanted, file: Path, job_id: str, is_json: bool, settings: Settings) -> None:
    """Record a job into FILE until it ends.

    All of its reports, for `rankdeck replay`; a full file becomes FILE.1. Status lines are printed, as with `attach
    --headless`.
    """
    options = SessionOptions(recording=file, thresholds=settings.thresholds, audit=audit_log())
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        present(RemoteSession(hosts, None, options, job_id), settings, is_json=is_json, is_headless=True)


@click.command()
@click.argument("file", metavar="FILE|JOB", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--speed",
    type=click.FloatRange(SPEEDS[0], SPEEDS[-1]),
    default=1.0,
    show_default=True,
    help="On the screen: times the real pace",
)
@click.option(
    "--at",
    "start_s",
    type=click.FloatRange(min=0),
    help="On the screen: begin at this second of it [of evidence: at its incident, paused]",
)
@click.option("--headless", is_flag=True, help="No screen: the messages with their times, and how it stood at the end")
@click.option("--json", "is_json", is_flag=True, help="How it stood at the end as one JSON object (implies --headless)")
@takes_settings
def replay(
    *, file: Path, speed: float, start_s: float | None, headless: bool, is_json: bool, settings: Settings
) -> None:
    """Show evidence or a recording, as if it happened now.

    Of a JOB it is the latest in the directory where evidence is kept without --evidence.
    """
    kept = None if os.path.lexists(file) else latest_evidence(default_directory(), str(file), since_s=0.0)
    if kept is not None:
        print_line(f"rankdeck: replaying {kept}")
    recording = _read(kept or file)
    session = Replay(recording, speed=speed, start_s=start_s, thresholds=settings.thresholds)
    if headless or is_json or not is_terminal():
        raise SystemExit(_print(session, recording, is_json=is_json))
    # The end of the recorded job is no failure of this command.
    shown = asyncio.run(show_session(session, settings.console))
    raise SystemExit(ExitCode.INTERRUPTED if shown is ExitCode.INTERRUPTED else ExitCode.WELL)


def _print(session: Replay, recording: Recording, *, is_json: bool) -> ExitCode:
    for at_s, text in session.play_to_end():
        print_line(f"{clock_text(recording, at_s)} {at_s:6.1f} s  {clean(text, LINE_LIMIT)}")
    view = session.view()
    print_summary(view, is_json=is_json)
    if farewell := session.farewell():
        print_line(farewell)
    if not recording.records:
        print_line("rankdeck: nothing was recorded in it")
    return exit_code(view)


async def _collect(session: RemoteSession, job_id: str) -> Evidence:
    try:
        await session.connect()
        job_id = await job_under_way(session, job_id, "evidence")
        with waiting_for(lambda: f"{session.title}: collecting the evidence of job {job_id}"):
            return await _evidence_of(session, job_id)
    finally:
        await session.close()


async def _evidence_of(session: RemoteSession, job_id: str) -> Evidence:
    await session.job_control.statuses(job_id)  # refuses an unknown job immediately
    answers = Answers()
    await session.take_stacks(job_id, answers)
    await session.replay_history()
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < LISTENING_S or not session.has_all_lines:
        session.view()
        await asyncio.sleep(POLL_S)
        if waited_s > MAX_LISTENING_S:
            break
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await session.ask_agents(job_id, answers)
    return await session.evidence(job_id, ON_REQUEST, answers)


def _read(path: Path) -> Recording:
    try:
        content = read_regular_file(path, MAX_RECORDING_BYTES)
        return from_its_job_on(decode_recording(recording_of(content)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", EVIDENCE_HINT) from error
    except NotRegularError:
        raise UsageError(f"{path} is not a file: copy what is to be replayed into one") from None
    except TooLargeError:
        size = MAX_RECORDING_BYTES >> 20
        raise UsageError(f"{path} is larger than any evidence: more than {size} MiB", EVIDENCE_HINT) from None
    except MalformedRecordingError as error:
        raise UsageError(f"{path} cannot be replayed: {error}", EVIDENCE_HINT) from error
