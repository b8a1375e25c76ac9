"""The verbs that print one kind of rows of a job: `ranks`, `barriers`, `memory`, `events`, `logs`."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec
import numpy as np

from agent.wire.logs import LAUNCHER_RANK
from app.cli.chosen_hosts import HostsWanted, takes_hosts
from app.cli.hosts import POLL_S, first_view, look, looking_on
from app.cli.options import json_option, print_json, watch_option
from app.cli.settings_options import takes_settings
from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS
from app.filters.terms import NumberTerm, WrongFilter
from app.text import LINE_LIMIT, clean, clean_name, json_value
from app.view.plain_tables import barrier_lines, memory_lines, rank_lines
from app.view.rows import SEVERITY_TEXTS
from app.view.summary import is_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.wire.logs import LogLine
    from app.recording.events import Event
    from app.session.remote_session import RemoteSession
    from app.settings.schema import Settings
    from app.view.view import View

LAST_LINES_S = 0.5
"""After a job's end, for what its ranks printed last to be told of."""


class RankRanges(click.ParamType[NumberTerm, str]):
    """Ranks as in the console's filters: `0,3-5`, `8-`, `launcher`."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NumberTerm:
        """Return what says which ranks are meant."""
        if isinstance(value, NumberTerm):
            return value
        found = read_filter(f"rank={value}", LOG_KEYS)
        if isinstance(found, WrongFilter):
            self.fail(found.why, param, ctx)
        if len(found.terms) != 1 or not isinstance(found.terms[0], NumberTerm):
            self.fail("numbers and ranges, as in 0,3-5", param, ctx)
        return found.terms[0]


class Pattern(click.ParamType["re.Pattern[str]", str]):
    """A regular expression, as Python reads it."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[str]:
        """Return it compiled."""
        try:
            return re.compile(value)
        except re.error as error:
            self.fail(f"{clean(value)}: {error}", param, ctx)


rank_option = click.option(
    "--rank", "wanted_ranks", type=RankRanges(), metavar="RANKS", help="Only these, as 0,3-5 or 8- [all]"
)


def lists_rows(command: Callable[..., None]) -> Callable[..., None]:
    """Add what the verbs of rows have in common."""
    for option in (click.argument("job_id", metavar="[JOB]", required=False), takes_hosts, takes_settings, json_option):
        command = option(command)
    return command


@click.command()
@watch_option
@rank_option
@lists_rows
def ranks(*, wanted_ranks: NumberTerm | None, **how: Any) -> None:
    """Print what each rank of a job does: its step, its last call, how long it waits, its memory, its line.

    Exit codes are those of `status`. For example: `rankdeck ranks --rank 0,3-5 --watch`.
    """
    _list(_Table("ranks", lambda view: view.ranks(_chosen(view, wanted_ranks)), rank_lines), **how)


@click.command()
@watch_option
@lists_rows
def barriers(**how: Any) -> None:
    """Print the calls in which ranks of a job wait now: who waits, who is missing, where both stand.

    Exit codes are those of `status`. For example: `rankdeck barriers --watch`.
    """
    _list(_Table("barriers", lambda view: view.barriers(), barrier_lines, "no rank waits for another"), **how)


@click.command()
@watch_option
@rank_option
@lists_rows
def memory(*, wanted_ranks: NumberTerm | None, **how: Any) -> None:
    """Print what each rank of a job holds, beside the median of all, and the limit to which it comes first.

    Exit codes are those of `status`. For example: `rankdeck memory --watch`.
    """
    _list(_Table("memory", lambda view: view.memory(_chosen(view, wanted_ranks)), memory_lines), **how)


@click.command()
@lists_rows
def events(*, is_json: bool, settings: Settings, wanted: HostsWanted, job_id: str | None) -> None:
    """Print what has happened, as far as the agents remember: verdicts, nodes, checkpoints, what was done.

    For example: `rankdeck events`.
    """
    with looking_on(wanted, job_id, settings) as session:
        found = asyncio.run(_events(session))
        texts = [session.time_text(event.at_s) for event in found]
    if is_json:
        now_s = time.monotonic()
        print_json({"events": [_event_object(event, now_s) for event in found]})
        return
    for text, event in zip(texts, found, strict=True):
        click.echo(f"{text}  {SEVERITY_TEXTS[event.severity]:<8}  {event.text}")


@click.command()
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on until the job has ended")
@rank_option
@click.option("--grep", "pattern", type=Pattern(), metavar="RE", help="Only lines in which this is found")
@click.option("-n", "--tail", "num_last", type=click.IntRange(min=0), help="Of those there are, only so many [all]")
@lists_rows
def logs(*, is_json: bool, settings: Settings, wanted: HostsWanted, job_id: str | None, **how: Any) -> None:
    """Print what the ranks of a job have printed, of all hosts together: `node:rank  line`.

    The agents keep the last lines; `python -P -m agent logs` reads whole files. For example: `rankdeck logs -f --rank
    0,3-5 --grep loss`.
    """
    with looking_on(wanted, job_id, settings) as session:
        asyncio.run(_logs(session, is_json=is_json, **how))


class _Table(NamedTuple):
    """One kind of rows.

    Attributes:
        name: Of their list in JSON.
        rows: Returns them.
        lines: Returns them as text.
        nothing: What is printed without a row.
    """

    name: str
    rows: Callable[[View], Sequence[Any]]
    lines: Callable[[Sequence[Any]], list[str]]
    nothing: str = "there is no such rank"


def _list(
    table: _Table, *, is_json: bool, is_watching: bool, settings: Settings, wanted: HostsWanted, job_id: str | None
) -> None:
    """Print rows, and end with the code that `status` has."""

    def show(view: View) -> None:
        found = table.rows(view)
        if is_json:
            print_json({"job_id": view.job_id, table.name: json_value(found)})
        elif view.job() is None:
            click.echo("no job is known there")
        else:
            click.echo("\n".join(table.lines(found)) or table.nothing)

    with looking_on(wanted, job_id, settings) as session:
        raise SystemExit(look(session, show, is_watching=is_watching))


def _chosen(view: View, wanted: NumberTerm | None) -> list[int] | None:
    return None if wanted is None else np.flatnonzero(wanted.among(np.arange(view.num_ranks))).tolist()


async def _events(session: RemoteSession) -> list[Event]:
    try:
        await first_view(session)
        await session.session.reach_back()
        return [event for event in reversed([*session.events.latest_first()]) if event.text]
    finally:
        await session.close()


def _event_object(event: Event, now_s: float) -> dict[str, Any]:
    return {
        "age_s": round(now_s - event.at_s, 1),
        "kind": event.kind.value,
        "severity": event.severity.value,
        "ranks": list(event.ranks),
        "text": event.text,
    }


async def _logs(
    session: RemoteSession,
    *,
    is_json: bool,
    is_following: bool,
    wanted_ranks: NumberTerm | None,
    pattern: re.Pattern[str] | None,
    num_last: int | None,
) -> None:
    """Print the lines there are, and those that come as long as they are followed."""

    def is_wanted(line: LogLine, job_id: str) -> bool:
        if line.job_id not in ("", job_id) or (pattern is not None and not pattern.search(line.text)):
            return False
        return wanted_ranks is None or bool(wanted_ranks.among(np.array([line.rank]))[0])

    try:
        view = await first_view(session)
        kept = deque[tuple[str, "LogLine"]](maxlen=num_last)
        while not session.session.has_all_lines:
            kept.extend(pair for pair in session.drain_logs() if is_wanted(pair[1], view.job_id))
            await asyncio.sleep(POLL_S)
            view = session.view()
        kept.extend(pair for pair in session.drain_logs() if is_wanted(pair[1], view.job_id))
        _print_lines(kept, is_json=is_json)
        over_s: float | None = None
        while is_following and (over_s is None or time.monotonic() < over_s or not session.session.has_all_lines):
            await asyncio.sleep(POLL_S)
            view = session.view()
            if is_over(view) and over_s is None:
                over_s = time.monotonic() + LAST_LINES_S
            _print_lines((pair for pair in session.drain_logs() if is_wanted(pair[1], view.job_id)), is_json=is_json)
    finally:
        await session.close()


def _print_lines(pairs: Iterable[tuple[str, LogLine]], *, is_json: bool) -> None:
    for node, line in pairs:
        if is_json:
            fields = {"node": node, "rank": line.rank, "stream": line.stream, "text": line.text}
            click.echo(msgspec.json.encode(fields).decode())
            continue
        who = "launcher" if line.rank == LAUNCHER_RANK else line.rank
        click.echo(f"{click.style(f'{clean_name(node)}:{who}', dim=True)}  {clean(line.text, LINE_LIMIT)}")
    sys.stdout.flush()
