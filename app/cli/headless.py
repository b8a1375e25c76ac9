"""A job without a terminal: a line on stderr whenever something has changed, a summary on stdout.

`waiting_for` shows a user at a terminal what a command waits for, on a line that is erased again; elsewhere a long wait
is a line of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from app.diagnosis.causes import Cause
from app.errors import ExitCode
from app.recording.note_watch import NoteWatch
from app.view.summary import exit_code, headline_hint, headline_text, is_over
from ddpcore.wire import FaultKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from app.view.nodes import Progress
    from app.view.rows import VerdictRow
    from app.view.view import View
    from ddpcore.wire import Fault

Answer = TypeVar("Answer")

_LINE_AWAY = "\r\x1b[K"
LINE_GAP_S = 2.0
"""Least seconds between two lines about the state of the job."""
LINE_PERIOD_S = 30.0
"""Seconds until such a line comes although only its figures have changed."""
_FIGURES = re.compile(r"\d[\d.,\s-]*")
FRAME_PERIOD_S = 0.1
VERDICT_DEADLINE_S = 60.0
"""Seconds from the step of a fault until a verdict must name it."""
SETTLE_S = 1.0
"""Seconds from a verdict to the summary: by then the waiting ranks have reported that they wait for the culprit."""
EXPLANATION_PATIENCE_S = 8.0
"""Seconds to wait for a verdict after a job failed; a node whose agent died counts as lost within this time."""
CAUSE_PATIENCE_S = 2.0
"""Seconds to wait likewise where the nodes know why the job failed: a verdict on a death comes within this time."""
END_PATIENCE_S = 5.0
"""Seconds after a rank ended, for torchrun to end the others on all nodes and for the job to have an exit code."""

CAUSES_OF_FAULT = {
    FaultKind.FREEZE: frozenset({Cause.FROZEN}),
    FaultKind.KILL: frozenset({Cause.EXITED, Cause.OOM}),
    FaultKind.SLOW: frozenset({Cause.STRAGGLER}),
    FaultKind.GIL: frozenset({Cause.SILENT}),
    FaultKind.SKIP_BARRIER: frozenset({Cause.MISMATCH, Cause.FEWER_CALLS}),
    FaultKind.MISMATCH: frozenset({Cause.MISMATCH}),
    FaultKind.OOM: frozenset({Cause.OOM}),
    # An engine rank that leaves waits for the others when it closes the process group.
    FaultKind.LEAVE: frozenset({Cause.FEWER_CALLS, Cause.MISMATCH}),
}
ENDING_FAULTS = frozenset({FaultKind.KILL, FaultKind.OOM, FaultKind.LEAVE})
"""Faults that end the job."""


class Followed(Protocol):
    """The source that `Headless` follows; the methods are those of `app.tui.source.ConsoleSource`."""

    started_at_s: float

    @property
    def watched_job(self) -> str:
        """Id of the job whose end ends the session; empty for whichever is shown."""

    async def start(self) -> None:
        """Start the job, or connect to it."""

    def view(self) -> View:
        """Return the current rows."""

    def drain_notices(self) -> Sequence[str]:
        """Return clean sentences about the session since the last call."""

    @property
    def starting(self) -> Progress | None:
        """Progress of a start; None while no start is in progress."""


class Headless:
    """Follows a job until it ends, an injected fault is named, or a signal comes."""

    def __init__(self, followed: Followed, fault: Fault | None = None) -> None:
        self._followed = followed
        self._fault = fault
        self._struck_at_s: float | None = None
        self._named_at_s: float | None = None
        self._over_at_s: float | None = None
        self._printed_at_s = float("-inf")
        self._printed: object = None
        """Severity, causes and culprits of the last line printed."""
        self._line = ""
        """Its text."""
        self._waiting_since_s: float | None = None
        """Time from which a job, whichever comes, is waited for; infinite once that is printed, or there was one."""
        self._notes = NoteWatch()
        self._hint = ""
        """Last hint printed; it is printed again only when it changes."""
        self._progress = UpdatingLine()

    async def run(self) -> tuple[View, bool]:
        """Start the job and follow it; return the last view and whether an injected fault went unnamed.

        Raises:
            AppError: The job could not be started, or cannot be followed.
        """
        starting = asyncio.create_task(self._followed.start())
        try:
            while True:
                view = self._followed.view()
                now_s = time.monotonic()
                self._print_view(view, now_s)
                if starting.done():
                    starting.result()
                    self._print_how_it_ends(view, now_s)
                if self._is_settled(view, now_s):
                    return view, False
                # Until the job has started, an earlier job of the same name may be shown.
                if starting.done() and (self._is_explained(view, now_s) or self._is_overdue(view, now_s)):
                    self._print_headline(view, now_s)
                    return view, self._fault is not None
                await asyncio.sleep(FRAME_PERIOD_S)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self._progress.clear()

    def _print_view(self, view: View, now_s: float) -> None:
        elapsed = f"{now_s - self._followed.started_at_s:6.1f} s"
        self._progress.clear()
        for notice in self._followed.drain_notices():
            print_line(f"{elapsed}  {notice}")
        for note in self._notes.news({**view.remarks(), **{text: text for text in view.beside()}}, now_s):
            print_line(f"{elapsed}  note: {note}")
        is_waiting = view.job() is None and headline_text(view) == self._line
        if not is_waiting and now_s - self._printed_at_s >= (
            LINE_PERIOD_S if _state(view) == self._printed else LINE_GAP_S
        ):
            self._printed = None
            self._print_headline(view, now_s)
        if (starting := self._followed.starting) is not None:
            self._progress.show(f"{elapsed}  {starting.text}")

    def _print_headline(self, view: View, now_s: float) -> None:
        """Print the headline, with a hint that is news; not where the last line was about the same."""
        if (state := _state(view)) == self._printed:
            return
        elapsed = f"{now_s - self._followed.started_at_s:6.1f} s"
        self._printed, self._printed_at_s, self._line = state, now_s, headline_text(view)
        print_line(f"{elapsed}  {self._line}")
        hint, self._hint = self._hint, headline_hint(view)
        if self._hint and self._hint != hint:
            print_line(f"{elapsed}    {self._hint}")

    def _print_how_it_ends(self, view: View, now_s: float) -> None:
        """Print once that a job is waited for: without one nothing ends this."""
        if view.job() is not None or self._followed.watched_job:
            self._waiting_since_s = math.inf
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s
        elif now_s - self._waiting_since_s >= LINE_GAP_S:
            self._waiting_since_s = math.inf
            print_line(f"{now_s - self._followed.started_at_s:6.1f} s    waiting for a job; Ctrl-C ends")

    def _is_settled(self, view: View, now_s: float) -> bool:
        """Return whether the injected fault is named and its effect is known."""
        fault = self._fault
        if fault is None or not any(_names(verdict, fault) for verdict in view.verdicts()):
            self._named_at_s = None
            return False
        if self._named_at_s is None:
            self._named_at_s = now_s
        named_s = now_s - self._named_at_s
        has_ended = (
            fault.kind not in ENDING_FAULTS or is_over(view, self._followed.watched_job) or named_s > END_PATIENCE_S
        )
        return named_s > SETTLE_S and has_ended

    def _is_explained(self, view: View, now_s: float) -> bool:
        """Return whether the job has ended on all nodes, and after a failure whether the reason is known."""
        if not is_over(view, self._followed.watched_job) or self._named_at_s is not None:
            return False
        if self._over_at_s is None:
            self._over_at_s = now_s
        if not view.is_over_everywhere and now_s - self._over_at_s < END_PATIENCE_S:
            return False
        if exit_code(view) is not ExitCode.JOB_FAILED:
            return True
        job = view.job()
        cause = None if job is None else job.root_cause
        patience_s = EXPLANATION_PATIENCE_S if cause is None or cause.is_consequence else CAUSE_PATIENCE_S
        return now_s - self._over_at_s > patience_s

    def _is_overdue(self, view: View, now_s: float) -> bool:
        if self._fault is None or self._fault.at_step is None:
            return False
        if self._struck_at_s is None:
            (row,) = view.ranks([self._fault.rank]) or (None,)
            if row is not None and row.step is not None and row.step >= self._fault.at_step - 1:
                self._struck_at_s = now_s
            return False
        return now_s - self._struck_at_s > VERDICT_DEADLINE_S


class _Terminal:
    """The one line of standard error that is overwritten, whichever threads write there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._is_there = False
        self._num_questions = 0

    def show(self, text: str) -> None:
        """Overwrite the line, unless the user is asked a question."""
        with self.lock:
            if not self._num_questions:
                width = shutil.get_terminal_size().columns - 1
                self._write(f"{_LINE_AWAY}{text[:width]}")
                self._is_there = True

    def clear(self) -> None:
        """Erase the line."""
        with self.lock:
            if self._is_there:
                self._write(_LINE_AWAY)
                self._is_there = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Erase the line, and show none while the user is asked a question."""
        with self.lock:
            self.clear()
            self._num_questions += 1
        try:
            yield
        finally:
            with self.lock:
                self._num_questions -= 1

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201 - as `print_line`


_TERMINAL = _Terminal()
asking = _TERMINAL.asking


class UpdatingLine:
    """A line on standard error that is overwritten, for progress; not written without a terminal."""

    def __init__(self) -> None:
        self.is_possible = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Overwrite the line with `text`, which must be clean."""
        if self.is_possible:
            _TERMINAL.show(text)

    def clear(self) -> None:
        """Erase the line; permanent output is printed in its place."""
        _TERMINAL.clear()


_BEGAN_S = time.monotonic()
SILENT_S = 1.5
"""Seconds from the begin of a command for which it may show nothing."""
BRIEF_S = 0.3
"""Seconds of a wait that is never shown: a line that flashes up is not read."""
REDRAW_S = 0.2
LONG_WAIT_S = 5.0
"""Seconds of a wait until a line is printed where none can be overwritten."""


class WaitingLines:
    """Lines on standard error about a long wait: where it is no terminal, or the output goes elsewhere."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + LONG_WAIT_S
        self._text = ""

    def show(self, text: str) -> None:
        """Print what is waited for, clean: after `LONG_WAIT_S`, then at most every `LINE_PERIOD_S` what has changed."""
        now_s = time.monotonic()
        if now_s >= self._due_s and text != self._text:
            print_line(f"rankdeck: {text}")
            self._text, self._due_s = text, now_s + LINE_PERIOD_S


@contextmanager
def waiting_for(what: Callable[[], str]) -> Iterator[None]:
    """Show what the block waits for, on a line that is erased at its end; else by `WaitingLines`, not with `--json`.

    Args:
        what: Returns the line, clean; called in a thread of its own.
    """
    context, line = click.get_current_context(silent=True), UpdatingLine()
    is_json = context is not None and context.params.get("is_json")
    if is_json:
        yield
        return
    is_over = threading.Event()
    lines = None if line.is_possible and sys.stdout.isatty() else WaitingLines()

    def show() -> None:
        wait_s = max(BRIEF_S, _BEGAN_S + SILENT_S - time.monotonic())
        while not is_over.wait(wait_s):
            (lines or line).show(what())
            wait_s = REDRAW_S

    showing = threading.Thread(target=show, name="rankdeck-waiting", daemon=True)
    showing.start()
    try:
        yield
    finally:
        is_over.set()
        showing.join()
        line.clear()


async def with_progress(doing: Awaitable[Answer], followed: Followed) -> Answer:
    """Await the start of a job, and print its progress until it is done."""
    line = UpdatingLine()
    lines = None if line.is_possible else WaitingLines()
    task = asyncio.ensure_future(doing)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=FRAME_PERIOD_S)
            line.clear()
            for notice in followed.drain_notices():
                print_line(f"rankdeck: {notice}")
            if (starting := followed.starting) is not None and not task.done():
                (lines or line).show(starting.text)
        return await task
    finally:
        line.clear()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


_thread = threading.local()


@contextmanager
def quiet_after(has_left: Callable[[], bool]) -> Iterator[None]:
    """Let `print_line` print nothing from this thread once the user has left: what fails then is no news."""
    _thread.has_left = has_left
    try:
        yield
    finally:
        del _thread.has_left


def print_line(text: str) -> None:
    """Print a line to standard error, for the user."""
    has_left: Callable[[], bool] | None = getattr(_thread, "has_left", None)
    if has_left is not None and has_left():
        return
    with _TERMINAL.lock:
        _TERMINAL.clear()
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the printed face of a session


def _state(view: View) -> object:
    """Return what a line is about, without its figures."""
    headline = view.headline()
    verdicts = [(row.severity, row.cause, row.culprits) for row in view.verdicts()]
    return headline.severity, verdicts or _FIGURES.sub("", headline.text)


def _names(verdict: VerdictRow, fault: Fault) -> bool:
    return verdict.cause in CAUSES_OF_FAULT[fault.kind] and fault.rank in verdict.culprits
