"""The command `rankdeck`: parses, runs one thing, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

import click

from app.commands.lazy_group import LazyGroup
from app.commands.settings_options import settings_options
from app.errors import AppError, ExitCode, UsageError

COMMANDS = {
    "attach": "app.commands.hosts",
    "config": "app.commands.config",
    "demo": "app.commands.demo",
    "doctor": "app.commands.doctor",
    "down": "app.commands.up_down",
    "evidence": "app.commands.evidence",
    "fault": "app.commands.control",
    "init": "app.commands.init",
    "install": "app.commands.install",
    "kill": "app.commands.control",
    "replay": "app.commands.evidence",
    "restart": "app.commands.control",
    "run": "app.commands.run",
    "serve": "app.commands.serve",
    "stacks": "app.commands.hosts",
    "start": "app.commands.run",
    "status": "app.commands.hosts",
    "stop": "app.commands.control",
    "up": "app.commands.up_down",
}
"""By verb, the module in which it is."""
START_OBJECTS = 50_000
"""Made between two looks of the collector: what is imported stays, and looking for garbage in it takes a fifth of a
start at Python's own pace."""


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="rankdeck", prog_name="rankdeck")
@settings_options
@click.pass_context
def rankdeck(context: click.Context, *, assignments: tuple[str, ...], has_no_files: bool) -> None:
    """Watch a PyTorch DDP job live: which rank holds the others up, at which barrier, on which line, and why.

    Alone it opens the console on the hosts of the nearest rankdeck.toml, here or above; --set and --no-config are for
    that. Without such a file it says what to type first.
    """
    if context.invoked_subcommand is not None:
        if assignments or has_no_files:
            hint = f"rankdeck {context.invoked_subcommand} --help says which it takes"
            raise UsageError("--set and --no-config stand behind the command", hint)
        return
    # Whoever types a command does not wait for these.
    from app.commands.alone import console_argv, first_lines, inventory_text  # noqa: PLC0415

    if not has_no_files and (argv := console_argv(assignments)):
        _say(f"the hosts are those of {inventory_text()}")
        rankdeck.main(list(argv), prog_name="rankdeck", standalone_mode=False)
    else:
        click.echo(first_lines(assignments, has_files=not has_no_files))


def main() -> NoReturn:
    """Run the command; an error of ours is one line on stderr, with what to do about it."""
    gc.set_threshold(START_OBJECTS)
    try:
        rankdeck.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = ExitCode.INTERRUPTED
    except click.ClickException as error:
        _say(f"{error.format_message()} (--help shows what there is)")
        code = ExitCode.USAGE
    except AppError as error:
        _say(error.whole)
        code = error.exit_code
    else:
        code = ExitCode.WELL
    sys.exit(code)


def _say(sentence: str) -> None:
    click.echo(f"rankdeck: {sentence}", err=True)
