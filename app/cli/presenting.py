"""Presents a session to the user, on the screen or as printed lines, and handles signals."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import click
import msgspec

from agent.wire.slurm import slurm_step
from app.cli.headless import Followed, Headless, print_line
from app.errors import ExitCode
from app.session.opening import Opening
from app.tui.source import ConsoleSource
from app.view.rows import SEVERITY_TEXTS
from app.view.summary import exit_code, headline_text, is_over, summary_lines, summary_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.settings.schema import ConsoleSettings
    from app.tui.console import Console
    from app.view.view import View
    from ddpcore.wire import Fault

LEAVE_S = 3.0
"""Seconds for a page's console to leave in an orderly way. A private agent ends by itself when its console has."""


class Presented(ConsoleSource, Followed, Protocol):
    """A session that the screen and the printed lines can show.

    Attributes:
        must_succeed: Whether the session has started its job: a job that is stopped is no success then.
        cut_off: What is missing where no host of the shown job answers: whether it goes on is not known then.
    """

    must_succeed: bool
    cut_off: str

    @property
    def evidence_notices(self) -> Sequence[str]:
        """Clean sentences about all evidence that was kept."""

    def farewell(self) -> str:
        """Return the text for a user who leaves: what keeps running, and how to come back; empty when nothing does."""


def is_terminal() -> bool:
    """Return whether a terminal for a screen exists, or a browser in its place."""
    if is_served():
        return True
    streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on stderr
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def is_served() -> bool:
    """Return whether the screen is a page of `rankdeck serve`."""
    return bool(os.environ.get("TEXTUAL_DRIVER"))


async def show_session(session: Presented, settings: ConsoleSettings) -> ExitCode:
    """Open the console immediately, with the user's settings, and start the session in parallel."""
    from app.tui.console import Console  # noqa: PLC0415 - only the screen pays for Textual

    console = Console(session, settings=settings)
    is_interrupted = False

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        console.exit()

    _on_ending_signals(interrupt)

    def leave_if_failed(start: asyncio.Task[None]) -> None:
        if not start.cancelled() and start.exception() is not None:
            console.exit()

    if is_served() and not _leave_with_page(interrupt):
        await session.close()
        return ExitCode.INTERRUPTED

    async def start() -> None:
        nonlocal session
        session = await _opened(console, session)
        await session.start()

    starting = asyncio.create_task(start())
    starting.add_done_callback(leave_if_failed)
    is_begun = False
    try:
        await console.run_async()
        is_begun = starting.done()
    finally:
        starting.cancel()
        (failure,) = await asyncio.gather(starting, return_exceptions=True)
        await session.close()
    click.echo("".join(console.printed) if isinstance(session, Opening) else "", err=True, nl=False)
    for sentence in session.evidence_notices:  # their paths may not have fitted on the screen
        print_line(f"rankdeck: {sentence}")
    for error in (failure, console.failure):
        if isinstance(error, Exception) and not is_interrupted:
            raise error
    last = console.ui.own_view
    _print_farewell(session, last, is_begun=is_begun)
    if is_interrupted or isinstance(session, Opening):  # who leaves an opening breaks it off
        return ExitCode.INTERRUPTED
    code = ExitCode.WELL if last is None else exit_code(last, must_succeed=session.must_succeed)
    return ExitCode.UNREACHABLE if session.cut_off and code is ExitCode.WELL else code


async def _opened(console: Console, session: Presented) -> Presented:
    """Return the session once its hosts are connected; it takes over the console. Other sessions are returned as is."""
    if not isinstance(session, Opening):
        return session
    await console.has_painted.wait()
    console.begin_capture_print(console)
    console.ui.source = opened = await session.opened()
    console.end_capture_print(console)
    return opened


def _leave_with_page(leave: Callable[[], object]) -> bool:
    """Have `leave` called in the loop once the server has closed a pipe of this process, or is gone.

    A killed server sends no signal. What is stuck by then, the loop too, ends with the process, `LEAVE_S` later.

    Returns:
        False if a pipe has ended already; then nothing is called.

    Source: poll(2); POLLHUP and POLLERR are reported unasked.
    """
    loop = asyncio.get_running_loop()
    pipes = select.poll()
    for stream in (sys.__stdin__, sys.__stdout__):
        assert stream is not None
        pipes.register(stream.fileno(), 0)

    def wait() -> None:
        pipes.poll()
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(leave)
        time.sleep(LEAVE_S)
        os._exit(ExitCode.INTERRUPTED)

    if pipes.poll(0):
        return False
    threading.Thread(target=wait, name="rankdeck-page", daemon=True).start()
    return True


async def print_session(session: Presented, fault: Fault | None = None, *, is_json: bool) -> ExitCode:
    """Follow a session in printed lines, and print its summary."""
    following = asyncio.create_task(Headless(session, fault).run())
    _on_ending_signals(following.cancel)
    try:
        view, is_fault_unnamed = await following
    except asyncio.CancelledError:
        print_line(f"rankdeck: interrupted, {session.leaving}")
        return ExitCode.INTERRUPTED
    finally:
        await session.close()
        for notice in session.drain_notices():
            print_line(f"rankdeck: {notice}")
        _print_farewell(session)
    print_summary(view, is_json=is_json)
    return exit_code(view, is_fault_unnamed=is_fault_unnamed, must_succeed=session.must_succeed)


def print_summary(view: View, *, is_json: bool) -> None:
    """Print the job's summary, as text or JSON."""
    summary = summary_object(view)
    click.echo(msgspec.json.encode(summary).decode() if is_json else "\n".join(summary_lines(summary)))


def _print_farewell(session: Presented, last: View | None = None, *, is_begun: bool = True) -> None:
    """Print what keeps running and how to come back; after a console, whose last view is given, how the job ended."""
    if text := session.farewell() or ("" if is_begun else f"rankdeck: {session.leaving}"):
        print_line(text)
    if last is not None and session.player is None and is_over(last):
        if last.verdicts():  # the first line is about the cause then
            print_line(f"rankdeck: {summary_lines(summary_object(last))[0]}")
        print_line(f"rankdeck: {headline_text(last)}")
    elif last is not None and session.player is None and exit_code(last) is ExitCode.VERDICT_STANDS:
        verdict = last.verdicts()[0]
        print_line(f"rankdeck: exit code 10: {SEVERITY_TEXTS[verdict.severity]}  {verdict.text}")


def ending_signals() -> set[signal.Signals]:
    """Return SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {signal.SIGINT, signal.SIGTERM} | (set() if is_ignored else {signal.SIGHUP})


def _on_ending_signals(end: Callable[[], object]) -> None:
    """Make signals end the session in an orderly way instead of ending the process.

    Where this process serves a Slurm step SIGTERM is for the job: who follows it sees its end (`app.slurm.own_step`).
    """
    loop = asyncio.get_running_loop()
    is_taken = slurm_step(os.environ) is not None and callable(signal.getsignal(signal.SIGTERM))
    for number in ending_signals() - ({signal.SIGTERM} if is_taken else set()):
        loop.add_signal_handler(number, end)
