"""Collects evidence and stores it: what this console has received, and what the agents remember besides.

`ask_agents` comes first, and may be waited for; then `put_together` takes what there is by now, without waiting.

`write_evidence` and `prune` keep it, and `latest_evidence` finds it, in `$XDG_STATE_HOME/rankdeck/evidence`, for this
user alone, the latest files only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agent.wire.commands import History, PullHistory, ShowJob, Shown, Tier
from agent.wire.reports import WIRE_VERSION, encode_node_report
from agent.wire.secret_mask import masked_text
from app.errors import AppError, SessionError
from app.paths import state_directory
from app.recording.bundle import Evidence, masked, masked_values
from app.recording.recorder import MAX_AGE_S
from app.recording.records import FORMAT_VERSION, LinesRecord, Opening, Record, ReportRecord, StacksRecord
from app.text import LINE_LIMIT, clean
from app.view.summary import summary_lines, summary_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.fleet import Fleet
    from app.view.view import View

LITTLE_S = 5.0
"""Seconds; a console that has so much less than `MAX_AGE_S` of a node's reports asks its agent for the rest."""
NO_ANSWER = {"error": "its agent has not answered in time"}


class Answers(msgspec.Struct):
    """Answers of agents for an incident, as far as they have come."""

    stacks: list[StacksRecord] = []
    past: list[Record] = []
    """Reports from before this console's first ones."""
    jobs: dict[str, Any] = {}
    """Job that each node was asked to run, or why that is not known."""


async def ask_agents(
    fleet: Fleet, nodes: Sequence[str], received: Sequence[Record], job_id: str, into: Answers
) -> None:
    """Ask all agents for what they remember; what has come is in `into`, also when this is cancelled.

    Args:
        fleet: The nodes.
        nodes: Their names.
        received: Records of this console, with times of the monotonic clock.
        job_id: The job that it is about.
        into: Takes the answers.
    """
    now_s = time.monotonic()
    into.jobs = dict.fromkeys(nodes, NO_ANSWER)
    await asyncio.gather(*(_ask(fleet, node, _first_report_s(received, node, now_s), job_id, into) for node in nodes))


async def put_together(
    nodes: Sequence[str], view: View, received: Sequence[Record], answers: Answers, about: tuple[str, str]
) -> Evidence:
    """Return the evidence up to now, masked.

    Args:
        nodes: Their names.
        view: The rows of now.
        received: Records of this console, with times of the monotonic clock.
        answers: Answers of the agents.
        about: The job, and a sentence that explains why evidence is kept.
    """
    job_id, why = about
    summary = summary_object(view)
    made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    why = masked_text(why)[:4096]
    opening = Opening(FORMAT_VERSION, WIRE_VERSION, version("rankdeck"), made_at, list(nodes), job_id, why)
    records = _in_order([*received, *answers.past, *answers.stacks])
    return Evidence(
        opening=opening,
        records=await asyncio.to_thread(_kept, records),
        status=masked_values(summary),
        summary=[masked_text(line) for line in summary_lines(summary)],
        jobs=dict(answers.jobs),
    )


def _in_order(records: list[Record]) -> list[Record]:
    """Return records by their time; lines from before the first report as if they came with that.

    The last output before a hang may be an hour old, and that hour is not worth playing.
    """
    begin_s = min((record.at_s for record in records if isinstance(record, ReportRecord)), default=0.0)
    in_range = (
        msgspec.structs.replace(record, at_s=max(record.at_s, begin_s)) if isinstance(record, LinesRecord) else record
        for record in records
    )
    return sorted(in_range, key=lambda record: record.at_s)


def _kept(records: Sequence[Record]) -> list[Record]:
    """Return records that may be passed on, with times relative to the first."""
    begin_s = records[0].at_s if records else 0.0
    return [masked(msgspec.structs.replace(record, at_s=record.at_s - begin_s)) for record in records]


def _first_report_s(received: Sequence[Record], node: str, now_s: float) -> float:
    reports = (record.at_s for record in received if isinstance(record, ReportRecord) and record.node == node)
    return next(reports, now_s)


async def _ask(fleet: Fleet, node: str, first_s: float, job_id: str, into: Answers) -> None:
    try:
        reply = await fleet.ask(node, ShowJob(job_id))
        is_shown = isinstance(reply, Shown)
        into.jobs[node] = msgspec.to_builtins(reply) if is_shown else {"error": "it answered something else"}
        if time.monotonic() - first_s < MAX_AGE_S - LITTLE_S:
            await _ask_past(fleet, node, first_s, into)
    except AppError as error:
        if into.jobs[node] is NO_ANSWER:
            into.jobs[node] = {"error": clean(str(error), LINE_LIMIT)}


async def _ask_past(fleet: Fleet, node: str, first_s: float, into: Answers) -> None:
    """Take what a node's agent remembers from before this console's first report of it."""
    since_seq = 0
    while True:
        reply = await fleet.ask(node, PullHistory(Tier.RECENT, since_seq, MAX_AGE_S))
        if not isinstance(reply, History) or not reply.reports:
            return
        for past in reply.reports:
            at_s = time.monotonic() - past.age_s
            if at_s >= first_s or past.seq <= since_seq:
                return
            since_seq = past.seq
            if past.age_s <= MAX_AGE_S + LITTLE_S:
                into.past.append(ReportRecord(max(0.0, at_s), node, encode_node_report(past.report)))


MAX_FILES = 20
MAX_BYTES = 2**30
"""Bytes of all files together; the latest one is kept whatever its size."""
SKEW_S = 60.0
"""Seconds by which a file server's clock may be ahead. A later file is from before this machine's was set back."""
_NAME = re.compile(r"-\d{8}-\d{6}(-\d+)?\.zip\Z")
"""File names of `bundle_name`, and of `write_evidence` from it."""


def default_directory() -> Path:
    """Return the default directory for evidence."""
    return state_directory() / "evidence"


def check_directory(directory: Path) -> None:
    """Create a directory for evidence, or check that it can be written.

    Raises:
        SessionError: It cannot.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SessionError(
            f"evidence cannot be kept in {directory}: {error.strerror}", "name another place with --evidence"
        ) from error


def write_evidence(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all, beside one of the same name if there is one; return where it is.

    Raises:
        SessionError: It cannot be written; nothing is left of it.
    """
    made = place = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, made = tempfile.mkstemp(prefix=".evidence-", dir=path.parent)  # 0600
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        place = _reserved(path)
        Path(made).replace(place)
    except OSError as error:
        if place is not None:
            place.unlink(missing_ok=True)
        raise SessionError(
            f"evidence cannot be written to {path}: {error.strerror}", "name another place: --output, --evidence"
        ) from error
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)
    return place


def latest_evidence(directory: Path, job_id: str, since_s: float) -> Path | None:
    """Return the latest evidence of a job in a directory, if it was written after `since_s` of the wall clock."""
    until_s = time.time() + SKEW_S  # noqa: TID251 - files are dated by it
    found = []
    with contextlib.suppress(OSError):
        for path in directory.glob("*.zip"):
            is_own = _NAME.fullmatch(path.name.removeprefix(job_id)) is not None
            if is_own and path.name.startswith(job_id) and since_s <= (written_s := path.stat().st_mtime) <= until_s:
                found.append((written_s, path))
    return max(found)[1] if found else None


def prune(directory: Path) -> None:
    """Remove the oldest evidence of a directory, so that it stays within its bounds; files with other names stay."""
    found = (path for path in directory.glob("*.zip") if _NAME.search(path.name) and not path.is_symlink())
    files = [(path.stat(), path) for path in found if path.is_file()]
    files.sort(key=lambda one: one[0].st_mtime, reverse=True)
    num_bytes = 0
    for index, (status, path) in enumerate(files):
        num_bytes += status.st_size
        if index and (index >= MAX_FILES or num_bytes > MAX_BYTES):
            with contextlib.suppress(OSError):
                path.unlink()


def _reserved(path: Path) -> Path:
    """Reserve a name, or the next one that is free, and return it: evidence never replaces another file."""
    for number in range(1, 1000):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            free.touch(mode=0o600, exist_ok=False)
            return free
    raise FileExistsError(errno.EEXIST, "there are a thousand of that name", str(path))
