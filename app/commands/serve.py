"""The verb `serve`: the console in a browser."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import signal
import sys

import click

from app.commands.settings_options import NO_FILES, read_settings, settings_options
from app.errors import ExitCode, SessionError, UsageError
from app.headless import print_line

SERVED_VERBS = ("attach", "demo", "replay")
"""Verbs that open a console, and may be opened once more with each page."""


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On loopback [a free one]")
@click.option("--control", is_flag=True, help="Let the page act on the job too; without this it only looks on")
@settings_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def serve(
    *, port: int, control: bool, command: tuple[str, ...], assignments: tuple[str, ...], has_no_files: bool
) -> None:
    """Serve the console to a browser of this machine: `serve -- attach --host gpu1`, `serve -- replay FILE`.

    The address that is printed holds a secret; whoever has it may look on. From another machine: `ssh -L`.
    """
    # A page could not say it: what is wrong with the settings is said here, before there is one.
    read_settings(assignments, has_files=not has_no_files and NO_FILES not in command)
    verb, *others = served_command(command, may_control=control)
    chosen = [*([NO_FILES] if has_no_files else []), *(f"--set={assignment}" for assignment in assignments)]
    # No shell stays between: a console notices when its server is gone.
    line = "exec " + shlex.join([sys.executable, "-P", "-m", "app", verb, *chosen, *others])
    if importlib.util.find_spec("textual_serve") is None:
        raise SessionError("textual-serve is not installed", "pip install 'rankdeck[web]'")
    try:
        raise SystemExit(asyncio.run(_serve(line, " ".join(("rankdeck", *command)), port)))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UsageError(f"port {port} cannot be listened on: {why}", "name another, or none") from error


def served_command(command: tuple[str, ...], *, may_control: bool) -> list[str]:
    """Return the command that each page runs.

    Raises:
        UsageError: It opens no console, or one that cannot be opened twice.
    """
    verb, *others = command
    if verb not in SERVED_VERBS:
        raise UsageError(f"serve shows {', '.join(SERVED_VERBS)}, not {verb!r}", "serve -- attach --host gpu1")
    for option in ("--headless", "--json"):
        if option in others:
            raise UsageError(f"{option} opens no screen that could be served")
    only_looks = verb != "replay" and not may_control and "--read-only" not in others
    return [verb, *(["--read-only"] if only_looks else []), *others]


async def _serve(line: str, title: str, port: int) -> ExitCode:
    from app.web.server import WebConsole  # noqa: PLC0415 - only who serves pays for it

    def told(address: str) -> None:
        click.echo(address)
        print_line("rankdeck: open it in a browser of this machine; Ctrl-C ends it")

    serving = asyncio.create_task(WebConsole(line, title).run(port, told))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return ExitCode.INTERRUPTED
    return ExitCode.WELL
