"""The commands that print one kind of rows of a job: `ranks`, `barriers`, `stragglers`, `memory`, `events`, `logs`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec
import numpy as np

from agent.wire.logs import LAUNCHER_RANK
from app.cli.chosen_hosts import HostsWanted, takes_hosts
from app.cli.headless import CAUSE_PATIENCE_S, print_line, waiting_for
from app.cli.hosts import POLL_S, first_view, look, looking_on
from app.cli.options import (
    follow_one_job,
    follow_option,
    grep_option,
    job_argument,
    json_option,
    last_option,
    print_json,
    rank_option,
    since_option,
    watch_option,
)
from app.cli.settings_options import takes_settings
from app.errors import ExitCode, UsageError
from app.recording.events import SEAM_S, EventKind
from app.session.log_files import FilesWish, LogFiles
from app.session.log_pulls import AttemptMarks, in_time_order
from app.text import LINE_LIMIT, clean, clean_name, json_value, nodes_text, own_color, ranks_text, seconds_text
from app.view.pace import window_text
from app.view.plain_tables import barrier_lines, memory_lines, rank_lines, straggler_lines
from app.view.rows import SEVERITY_TEXTS
from app.view.summary import ENDED, headline_text, is_over, no_job_text

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from app.filters.terms import NumberTerm
    from app.recording.events import Event
    from app.session.log_pulls import Begun, DatedLine
    from app.session.remote_session import RemoteSession
    from app.settings.schema import Settings
    from app.view.pace import PaceRow
    from app.view.view import View

LAST_LINES_S = 0.5
"""Seconds to wait after a job's end for the last lines of its ranks."""
SILENT_S = 5.0
"""Seconds to wait for lines that a node announced; the node may have gone."""
NO_ROW = "nothing is known of these ranks yet"


def _json_option(help_text: str) -> Callable[..., Any]:
    return click.option("--json", "is_json", is_flag=True, help=help_text)


def lists_rows(command: Callable[..., None], json_option: Callable[..., Any] = json_option) -> Callable[..., None]:
    """Add the options that the commands of rows share."""
    for option in (job_argument, takes_hosts, takes_settings, json_option):
        command = option(command)
    return command


@click.command()
@watch_option
@rank_option
@lists_rows
def ranks(*, wanted_ranks: NumberTerm | None, **how: Any) -> None:
    """Print what each rank of a job does.

    Its step, its last call, how long it waits, its memory, its line. Exit codes are those of `status`.
    """
    _list(_Table("ranks", lambda view: view.ranks(_chosen(view, wanted_ranks)), rank_lines), **how)


@click.command()
@watch_option
@lists_rows
def barriers(**how: Any) -> None:
    """Print the calls in which ranks of a job wait now.

    Who waits, who is missing, where both stand. Exit codes are those of `status`.
    """
    _list(
        _Table(
            "barriers",
            lambda view: view.barriers(),
            barrier_lines,
            _no_wait,
        ),
        **how,
    )


@click.command()
@watch_option
@rank_option
@lists_rows
def stragglers(*, wanted_ranks: NumberTerm | None, **how: Any) -> None:
    """Print which rank costs the others time, and in which phase.

    The costliest comes first. Shares of the time observed: COST is how much less a rank waits than the others, LAST ON
    NODE how often it comes last of the ranks on its own node, which are not compared with those of other nodes. MORE
    TIME IN names the phases that take it longer than the others; OTHER is time in none of them, outside the model. Exit
    codes are those of `status`.
    """
    _list(_Table("stragglers", lambda view: _pace(view, wanted_ranks), straggler_lines, about=_pace_text), **how)


@click.command()
@watch_option
@rank_option
@lists_rows
def memory(*, wanted_ranks: NumberTerm | None, **how: Any) -> None:
    """Print what each rank of a job holds.

    It is compared with the median, and with the limit that it reaches first. Exit codes are those of `status`.
    """
    _list(_Table("memory", lambda view: view.memory(_chosen(view, wanted_ranks)), memory_lines), **how)


@click.command()
@follow_option
@since_option
@last_option("")
@partial(lists_rows, json_option=_json_option("One JSON object on stdout; with -f another one whenever there is news"))
def events(*, settings: Settings, wanted: HostsWanted, job_id: str, **how: Any) -> None:
    """Print what has happened, as far as the agents remember.

    Verdicts, nodes, checkpoints, actions; without JOB those of all jobs, each with its job. With -f new ones are of the
    job that `status` shows.
    """
    wish = _EventWish(how["is_json"], job_id, how["max_age_s"])
    with looking_on(wanted, job_id, settings) as session:
        asyncio.run(_events(session, wish, num_last=how["num_last"], is_following=how["is_following"]))


class _EventWish(NamedTuple):
    """The events that the user wants, and whether as JSON.

    Attributes:
        job_id: Job that was named; empty where events of all jobs are wanted.
    """

    is_json: bool
    job_id: str
    max_age_s: float | None

    def among(self, found: Iterable[Event]) -> list[Event]:
        """Return the events that are wanted, in their order: without lines about jobs whose own events are there."""
        from_s = -math.inf if self.max_age_s is None else time.monotonic() - self.max_age_s
        recent = [event for event in found if event.at_s >= from_s]
        if self.job_id:
            return [event for event in recent if event.job_id in ("", clean_name(self.job_id))]
        own = {event.job_id for event in recent if event.kind is not EventKind.BESIDE}
        return [event for event in recent if event.kind is not EventKind.BESIDE or event.job_id not in own]


@click.command()
@follow_option
@rank_option
@grep_option
@since_option
@last_option(" of all ranks together, of log files N of each")
@partial(lists_rows, json_option=_json_option("One JSON object for each line"))
def logs(*, settings: Settings, wanted: HostsWanted, job_id: str, **how: Any) -> None:
    """Print what the ranks of a job have printed.

    Of all hosts together, as `gpu1:r0  line`, with a line where a restart began. The agents keep the last lines, which
    are merged by time. Older ones, and those of a job that ended before its agent began, are read from the files, rank
    after rank, since files have no times. A line is as old as an agent has known it.
    """
    wish = _LineWish(how["is_json"], how["wanted_ranks"], how["pattern"], how["max_age_s"], set(), job_id)
    with looking_on(wanted, job_id, settings) as session:
        asyncio.run(_logs(session, wish, num_last=how["num_last"], is_following=how["is_following"]))


class _LineWish(NamedTuple):
    """The lines that the user wants, and whether as JSON.

    Attributes:
        untimed: Nodes whose agents report no line ages; all their lines are printed.
        job_id: Job that was named; empty for whichever is shown.
    """

    is_json: bool
    ranks: NumberTerm | None
    pattern: re.Pattern[str] | None
    max_age_s: float | None
    untimed: set[str]
    job_id: str = ""

    def among(self, lines: Iterable[DatedLine], job_id: str) -> Iterator[DatedLine]:
        """Yield the lines of a job that match."""
        for at_s, node, line in lines:
            if line.age_s is None:
                self.untimed.add(node)
            elif self.max_age_s is not None and line.age_s > self.max_age_s:
                continue
            is_its = line.job_id in ("", job_id) and (self.pattern is None or self.pattern.search(line.text))
            if is_its and self.takes(line.rank):
                yield at_s, node, line

    @property
    def chooses(self) -> bool:
        """Whether not all lines of the job are wanted."""
        return not (self.ranks is None and self.pattern is None and self.max_age_s is None)

    @property
    def marks_attempts(self) -> bool:
        """Whether restarts are marked between the lines: not in JSON, nor where `--grep` chooses."""
        return not self.is_json and self.pattern is None

    def of_files(self, num_last: int | None, num_kept: int) -> FilesWish:
        """Return what is wanted of the files, of the last lines beside those that agents keep."""
        more = None if num_last is None else max(0, num_last - num_kept)
        return FilesWish(self.takes, self.pattern, more, self.max_age_s)

    def takes(self, rank: int) -> bool:
        """Return whether the lines of a rank, or of the launcher, are wanted."""
        return self.ranks is None or any(first <= rank <= last for first, last in self.ranks.ranges)

    def attempts(self, session: RemoteSession, job_id: str) -> list[Begun]:
        """Return the restart of a job that is marked between its lines."""
        if not self.marks_attempts:
            return []
        from_s = -math.inf if self.max_age_s is None else time.monotonic() - self.max_age_s
        return [one for one in session.later_attempts() if one.job_id == job_id and one.at_s >= from_s]


class _Table(NamedTuple):
    """One kind of rows: name in JSON, functions for rows, lines, the text without a row, and a note above them."""

    name: str
    rows: Callable[[View], Sequence[Any]]
    lines: Callable[[Sequence[Any], dict[str, int]], list[str]]
    nothing: Callable[[View], str] = lambda _view: NO_ROW
    about: Callable[[View], str] = lambda _view: ""


def _list(
    table: _Table, *, is_json: bool, is_watching: bool, settings: Settings, wanted: HostsWanted, job_id: str
) -> None:
    """Print rows, and end with the exit code of `status`; what it stands for is printed on standard error.

    So is, where no job was named, which of several jobs the rows are of.
    """
    widths: dict[str, int] = {}
    headline = chosen = ""

    def show(view: View) -> None:
        nonlocal headline, chosen
        found, headline = table.rows(view), headline_text(view)
        before, chosen = chosen, _beside_text(view, table.name)
        if not (job_id or is_json) and chosen not in ("", before):
            print_line(f"rankdeck: {chosen}")
        if is_json:
            print_json({"job_id": view.job_id, table.name: json_value(found)})
        elif view.job() is None:
            click.echo(no_job_text(view, session.attach_command, table.name))
        else:
            if about := table.about(view):
                print_line(f"rankdeck: {about}")
            click.echo("\n".join(table.lines(found, widths)) or table.nothing(view))

    with looking_on(wanted, job_id, settings) as session:
        code = asyncio.run(look(session, show, is_watching=is_watching))
    if code is not ExitCode.WELL and not is_json:
        print_line(f"rankdeck: exit code {int(code)}: {headline}")
    raise SystemExit(code)


def _beside_text(view: View, verb: str) -> str:
    """Return the line about other jobs, with the command that prints the same of one of them; empty without any."""
    return view.other_jobs_text.replace("rankdeck attach", f"rankdeck {verb}", 1)


def _chosen(view: View, wanted: NumberTerm | None) -> list[int] | None:
    """Return the ranks of the job that were chosen; None where all are.

    Raises:
        UsageError: The job has none of them.
    """
    if wanted is None:
        return None
    chosen: list[int] = np.flatnonzero(wanted.among(np.arange(view.num_ranks))).tolist()
    if view.num_ranks and not chosen:
        has = f"job {clean_name(view.job_id)} has {ranks_text(range(view.num_ranks))}"
        raise UsageError(has, "--rank names others")
    return chosen


def _pace(view: View, wanted: NumberTerm | None) -> list[PaceRow]:
    pace, chosen = view.pace, _chosen(view, wanted)
    rows = [] if pace is None else pace.rows(range(view.num_ranks))
    asked = [row for row in rows if chosen is None or row.rank in chosen]
    return asked if pace is None else [msgspec.structs.replace(row, signals=pace.signals(row.rank)) for row in asked]


def _no_wait(view: View) -> str:
    job = view.job()
    if job is None or job.state not in ENDED:
        return "no rank waits long for another; rankdeck stragglers shows who comes late"
    how = f"{'was ' if job.state in {'stopped', 'lost'} else ''}{job.state}"
    return f"job {job.job_id} {how}: no rank waits any more; rankdeck events {job.job_id} shows what happened"


def _pace_text(view: View) -> str:
    """Return who holds the others up, and of which time the shares are."""
    summary = None if view.pace is None else view.pace.summary()
    if summary is None:
        return ""
    return f"{summary.text}; {window_text(summary)}" if summary.num_rows else summary.text


async def _events(session: RemoteSession, wish: _EventWish, *, num_last: int | None, is_following: bool) -> None:
    """Print the events that the nodes remember, and with `is_following` new ones until the job has ended."""
    if is_following:
        follow_one_job(session)
    try:
        found = await _past_events(session, is_of_all=not wish.job_id)
        if not (wanted := wish.among(found)) and wish.max_age_s is not None:
            print_line(f"rankdeck: no event in the last {seconds_text(wish.max_age_s)}")
        latest = _last(wanted, num_last)
        _print_events(session, latest, is_json=wish.is_json, names_jobs=_are_of_several(wanted))
        if (seam := session.events.seam) is not None:
            reach = seam.text.removeprefix("attached; ")
            print_line(f"rankdeck: {reach if wish.max_age_s is None else reach.replace('above are', 'of', 1)}")
        if is_following:
            await _follow_events(session, wish, set(found))
    finally:
        await session.close()


async def _past_events(session: RemoteSession, *, is_of_all: bool = False) -> list[Event]:
    """Connect, and return the events that the nodes remember; the caller closes the session."""
    await first_view(session, replays=False)  # what the nodes remember is replayed once, for the events
    reported_s = (event.at_s for event in session.events.latest_first() if event.kind is EventKind.NODE)
    with waiting_for(lambda: session.reading or session.title):
        await session.reach_back(max(reported_s, default=0.0) + SEAM_S, is_of_all=is_of_all)
    return [event for event in session.events.latest_first() if event is not session.events.seam][::-1]


async def _follow_events(session: RemoteSession, wish: _EventWish, seen: set[Event]) -> None:
    """Print events that were not seen until the job has ended, and for as long as a verdict on a death may take."""
    deadline_s = math.inf
    while time.monotonic() < deadline_s:
        if is_over(session.view()):
            deadline_s = min(deadline_s, time.monotonic() + CAUSE_PATIENCE_S)
        session.drain_notices()  # they become events
        fresh = (event for event in session.events.latest_first() if event is not session.events.seam)
        news = [event for event in fresh if event not in seen][::-1]
        seen.update(news)
        if wanted := wish.among(news):
            _print_events(session, wanted, is_json=wish.is_json, names_jobs=_are_of_several(seen))
        await asyncio.sleep(POLL_S)


def _last(found: list[Any], number: int | None) -> list[Any]:
    return found if number is None else found[max(0, len(found) - number) :]


def _are_of_several(events: Iterable[Event]) -> bool:
    """Return whether events are of more than one job."""
    return len({event.job_id for event in events if event.job_id}) > 1


def _print_events(session: RemoteSession, found: Sequence[Event], *, is_json: bool, names_jobs: bool) -> None:
    if is_json:
        now_s = time.monotonic()
        rows = [{"age_s": round(now_s - event.at_s, 1), **msgspec.structs.asdict(event)} for event in found]
        clocks = {"at_s", "wall_offset_s"}
        print_json({"events": [{key: value for key, value in row.items() if key not in clocks} for row in rows]})
        return
    times = [session.time_text(event) for event in found]
    width = max(map(len, times), default=0)
    for event, at in zip(found, times, strict=True):
        whose = f"job {event.job_id}"
        is_bare = names_jobs and event.job_id and not event.text.startswith(whose)
        click.echo(f"{at:{width}}  {SEVERITY_TEXTS[event.severity]:<8}  {f'{whose}: ' if is_bare else ''}{event.text}")
    sys.stdout.flush()


async def _logs(session: RemoteSession, wish: _LineWish, *, num_last: int | None, is_following: bool) -> None:
    """Print the existing lines, and with `is_following` new ones until the job has ended."""
    if is_following:
        follow_one_job(session)
    try:
        view = await first_view(session, replays=False)
        if not (job_id := view.job_id):
            print_line(f"rankdeck: {no_job_text(view, session.attach_command, 'logs')}")
            return
        _print_notes("" if wish.job_id or wish.is_json else _beside_text(view, "logs"))
        there = await _lines_there(session, wish, job_id)
        marks, merged = AttemptMarks(), in_time_order(wish.among(there, job_id))
        is_past = is_over(session.view())
        older = LogFiles(session.fleet, job_id, wish.of_files(num_last, len(merged)))
        if (is_past or not is_following) and older.wants_some:
            with waiting_for(lambda: f"{session.title}: {older.progress_text}"):
                await older.read(session.assignments(), there)
            _print_notes(*older.notices())
            merged = older.beside(merged)
        latest = _last(merged, num_last)
        begun = [one for one in wish.attempts(session, job_id) if one.attempt not in older.attempts]
        found = older.dated(marks_attempts=wish.marks_attempts) + (marks.marked(latest, begun) if latest else [])
        if found:
            _print_lines(found, wish)
        elif not merged and is_past and not wish.chooses and not older.failures:
            print_line(f"rankdeck: no line of job {job_id} is known: it has printed nothing, or its files are gone")
        _print_notes(*_after_lines(session.view(), wish))
        if is_following:
            await _follow_lines(session, wish, job_id, marks)
        _print_notes(_end_text(session.view(), wish))
    finally:
        await session.close()


def _print_notes(*sentences: str) -> None:
    """Print sentences on standard error; an empty one is none."""
    for sentence in filter(None, sentences):
        print_line(f"rankdeck: {sentence}")


def _after_lines(view: View, wish: _LineWish) -> Iterator[str]:
    """Yield what the lines do not show: how old they are, where others are."""
    if wish.untimed and wish.max_age_s is not None:
        yield f"the agent on {nodes_text(sorted(wish.untimed))} does not know how old its lines are: all are printed"
    job = view.job()
    if job is not None and job.is_adopted:
        yield f"what the ranks of {job.job_id} print stays where their launcher puts it"


def _end_text(view: View, wish: _LineWish) -> str:
    """Return how the job ended, where not by itself: torchrun's own lines end in a traceback then."""
    job = view.job()
    is_shown = job is not None and is_over(view) and job.state in ENDED - {"succeeded"} and not wish.is_json
    return headline_text(view) if is_shown else ""


async def _follow_lines(session: RemoteSession, wish: _LineWish, job_id: str, marks: AttemptMarks) -> None:
    """Print new lines until the job has ended."""
    is_over_there = False
    while not is_over_there:
        is_over_there = is_over(session.view())
        await asyncio.sleep(LAST_LINES_S if is_over_there else POLL_S)
        _print_notes(*session.drain_notices())
        while lines := await _more_lines(session):
            _print_lines(marks.marked(list(wish.among(lines, job_id)), wish.attempts(session, job_id)), wish)


async def _lines_there(session: RemoteSession, wish: _LineWish, job_id: str) -> list[DatedLine]:
    """Return the existing lines that the agents keep.

    Raises:
        UsageError: None of them is wanted, and the job has none of the ranks.
    """
    there: list[DatedLine] = []
    with waiting_for(lambda: f"{session.title}: waiting for what the ranks have printed"):
        while lines := await _more_lines(session):
            there += lines
    if not wish.takes(LAUNCHER_RANK) and not any(wish.among(there, job_id)):
        _chosen(session.view(), wish.ranks)  # an earlier attempt with more ranks has lines
    return there


async def _more_lines(session: RemoteSession) -> list[DatedLine]:
    """Return new lines; empty once all announced lines have come, or when no more come."""
    deadline_s = time.monotonic() + SILENT_S
    session.view()
    while not (lines := session.drain_dated_logs()) and not session.has_all_lines and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        session.view()
    return lines


def _print_lines(lines: Iterable[DatedLine], wish: _LineWish) -> None:
    for _, node, line in lines:
        if wish.is_json:
            fields = {"node": node, "rank": line.rank, "stream": line.stream, "text": line.text, "age_s": line.age_s}
            click.echo(json.dumps(fields))  # ASCII only: a line may contain terminal escapes
            continue
        who = "launcher" if line.rank == LAUNCHER_RANK else f"r{line.rank}"
        head = click.style(f"{clean_name(node)}:{who}", dim=True)
        click.echo(f"{head}  {clean(line.text, LINE_LIMIT)}", color=own_color(os.environ))
    sys.stdout.flush()
