"""The command `rankdeck`: parses, runs one thing, and turns errors into one line and an exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec

from app.demo import (
    CONSOLE_STEPS,
    DEFAULT_RANKS,
    HEADLESS_STEPS,
    MAX_RANKS,
    Demo,
    DemoOptions,
    check_options,
    parse_fault,
)
from app.errors import AppError, ExitCode
from app.headless import Headless, exit_code, print_line, summary_lines, summary_object

if TYPE_CHECKING:
    from collections.abc import Callable

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("rankdeck"), prog_name="rankdeck")
def rankdeck() -> None:
    """Watch a PyTorch DDP job live: which rank holds the others up, at which barrier, on which line, and why."""


@rankdeck.command()
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=10_000_000),
    help=f"Training steps [{HEADLESS_STEPS}; {CONSOLE_STEPS} in the console]",
)
@click.option(
    "--ranks", type=click.IntRange(1, MAX_RANKS), default=DEFAULT_RANKS, show_default=True, help="Ranks, over two nodes"
)
@click.option(
    "--fault", metavar="KIND:RANK@STEP", help="Do harm to a rank at a step: freeze, kill or slow, as freeze:2@10"
)
@click.option("--headless", is_flag=True, help="No screen: lines on stderr, a summary on stdout")
@click.option("--json", "is_json", is_flag=True, help="The summary as one JSON object (implies --headless)")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Rendezvous port on loopback [a free one]")
def demo(*, steps: int | None, ranks: int, fault: str | None, headless: bool, is_json: bool, port: int) -> None:
    """Train a small GPT on this machine, over two private agents, and watch it; nothing is left behind."""
    is_headless = headless or is_json or not _is_terminal()
    options = DemoOptions(
        num_ranks=ranks,
        steps=steps or (HEADLESS_STEPS if is_headless else CONSOLE_STEPS),
        fault=parse_fault(fault) if fault else None,
        port=port,
    )
    check_options(options)
    code = _run_headless(options, is_json=is_json) if is_headless else _run_console(options)
    raise SystemExit(code)


def main() -> NoReturn:
    """Run the command; an error of ours is one line on stderr, with what to do about it."""
    try:
        rankdeck.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = ExitCode.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = ExitCode.USAGE
    except click.ClickException as error:
        print_line(f"rankdeck: {error.format_message()} (--help shows what there is)")
        code = ExitCode.USAGE
    except AppError as error:
        print_line(f"rankdeck: {error}" + (f" ({error.hint})" if error.hint else ""))
        code = error.exit_code
    else:
        code = ExitCode.WELL
    sys.exit(code)


def _is_terminal() -> bool:
    """Say whether there is a terminal that a screen can be drawn on."""
    streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on the last
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def _run_console(options: DemoOptions) -> ExitCode:
    return asyncio.run(_show(options))


async def _show(options: DemoOptions) -> ExitCode:
    """Open the console at once, and start the demo beside it."""
    from app.tui.console import Console  # noqa: PLC0415 - only the screen pays for Textual

    demo = Demo(options)
    console = Console(demo)
    is_interrupted = False

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        console.exit()

    _on_ending_signals(interrupt)

    def leave_if_failed(start: asyncio.Task[None]) -> None:
        if not start.cancelled() and start.exception() is not None:
            console.exit()

    starting = asyncio.create_task(demo.start())
    starting.add_done_callback(leave_if_failed)
    try:
        await console.run_async()
    finally:
        starting.cancel()
        (failure,) = await asyncio.gather(starting, return_exceptions=True)
        await demo.close()
    if is_interrupted:
        return ExitCode.INTERRUPTED
    for error in (failure, console.failure):
        if isinstance(error, Exception):
            raise error
    last = console.stage.view
    return ExitCode.WELL if last is None else exit_code(last)


def _run_headless(options: DemoOptions, *, is_json: bool) -> ExitCode:
    return asyncio.run(_follow(options, is_json=is_json))


async def _follow(options: DemoOptions, *, is_json: bool) -> ExitCode:
    demo = Demo(options)
    following = asyncio.create_task(Headless(demo, options.fault).run())
    _on_ending_signals(following.cancel)
    try:
        view, is_fault_unnamed = await following
    except asyncio.CancelledError:
        print_line("rankdeck: interrupted, ending the job")
        return ExitCode.INTERRUPTED
    finally:
        await demo.close()
    summary = summary_object(view)
    text = msgspec.json.encode(summary).decode() if is_json else "\n".join(summary_lines(summary))
    click.echo(text)
    return exit_code(view, is_fault_unnamed=is_fault_unnamed)


def _on_ending_signals(end: Callable[[], object]) -> None:
    """Let a signal end the session in an orderly way instead of the process."""
    loop = asyncio.get_running_loop()
    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, end)
