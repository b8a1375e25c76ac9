"""The command `rankdeck`: parses, runs one thing, and turns errors into one line and an exit code."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click

from app.commands.config import config
from app.commands.control import CONTROL_VERBS
from app.commands.doctor import doctor
from app.commands.evidence import evidence, replay
from app.commands.host_options import read_only_option, record_option
from app.commands.hosts import HOST_VERBS
from app.commands.init import init
from app.commands.install import install
from app.commands.run import START_VERBS
from app.commands.serve import serve
from app.commands.settings_options import settings_options, takes_settings
from app.commands.start import ask_what_to_do
from app.commands.up_down import down, up
from app.errors import AppError, ExitCode, UsageError
from app.evidence.store import check_directory
from app.faults import AT_START, parse_fault
from app.headless import print_line
from app.presenting import is_terminal, print_session, show_session
from app.program import shell_text
from app.sessions.demo import (
    CONSOLE_STEPS,
    DEFAULT_RANKS,
    HEADLESS_STEPS,
    MAX_RANKS,
    Demo,
    DemoOptions,
    check_options,
)
from app.sessions.options import SessionOptions


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(version("rankdeck"), prog_name="rankdeck")
@settings_options
@click.pass_context
def rankdeck(context: click.Context, *, assignments: tuple[str, ...], has_no_files: bool) -> None:
    """Watch a PyTorch DDP job live: which rank holds the others up, at which barrier, on which line, and why.

    Alone, in a terminal, it asks what to do; --set and --no-config are for that, and for what is chosen.
    """
    if context.invoked_subcommand is not None:
        if assignments or has_no_files:
            hint = f"rankdeck {context.invoked_subcommand} --help says which it takes"
            raise UsageError("--set and --no-config stand behind the command", hint)
        return
    if not is_terminal():
        raise click.exceptions.NoArgsIsHelpError(context)
    if chosen := ask_what_to_do(assignments, has_files=not has_no_files):
        print_line(f"rankdeck: {shell_text(chosen)}")
        rankdeck.main(list(chosen), prog_name="rankdeck", standalone_mode=False)


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
    "--fault", metavar="KIND:RANK@STEP", help=f"Do harm to a rank at a step, as freeze:2@10: {', '.join(AT_START)}"
)
@click.option("--headless", is_flag=True, help="No screen: lines on stderr, a summary on stdout")
@click.option("--json", "is_json", is_flag=True, help="The summary as one JSON object (implies --headless)")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Rendezvous port on loopback [a free one]")
@click.option(
    "--evidence",
    "evidence_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep evidence of each incident there [none is kept]",
)
@record_option
@read_only_option
@takes_settings
def demo(*, headless: bool, is_json: bool, fault: str | None, steps: int | None, **how: Any) -> None:
    """Train a small GPT on this machine, over two private agents, and watch it; nothing is left behind."""
    is_headless = headless or is_json or not is_terminal()
    options = DemoOptions(
        num_ranks=how["ranks"],
        steps=steps or (HEADLESS_STEPS if is_headless else CONSOLE_STEPS),
        fault=parse_fault(fault) if fault else None,
        port=how["port"],
        session=SessionOptions(how["evidence_dir"], how["recording"], how["is_read_only"], how["settings"].thresholds),
    )
    check_options(options)
    if options.session.evidence_dir is not None:
        check_directory(options.session.evidence_dir)
    if is_headless:
        raise SystemExit(asyncio.run(print_session(Demo(options), options.fault, is_json=is_json)))
    raise SystemExit(asyncio.run(show_session(Demo(options), how["settings"].console)))


for verb in (
    init,
    install,
    doctor,
    up,
    down,
    *START_VERBS,
    *HOST_VERBS,
    *CONTROL_VERBS,
    config,
    evidence,
    replay,
    serve,
):
    rankdeck.add_command(verb)


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
        print_line(f"rankdeck: {error.whole}")
        code = error.exit_code
    else:
        code = ExitCode.WELL
    sys.exit(code)
