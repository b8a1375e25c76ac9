"""The command `rankdeck`: parses, runs one command, and turns errors into one line and an exit code.

`LazyGroup` imports a command only when it is used, so that a user waits for one import, not for all.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import get_completion_class

from app.cli.settings_options import settings_options
from app.errors import AppError, ExitCode, UsageError
from app.manual import TOPICS, markdown, rendered, summary
from app.settings.keys import nearest, nearest_text
from app.text import LINE_LIMIT, clean, own_color

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class LazyGroup(click.Group):
    """A group that imports its commands from given modules.

    Source: Click's documentation, "Lazily Loading Subcommands".
    """

    def __init__(self, *args: Any, places: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        """Create the group; `places` maps each command to its module and an example.

        The module has a function of the command's name; `exec_` is that of a name which is Python's too.
        """
        super().__init__(*args, **kwargs)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted({*super().list_commands(ctx), *self.places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported now; None if there is no such command."""
        if cmd_name not in self.places:
            return super().get_command(ctx, cmd_name)
        module, example = self.places[cmd_name]
        found = importlib.import_module(module)
        command: click.Command = getattr(found, cmd_name, None) or getattr(found, f"{cmd_name}_")
        command.epilog = f"For example: rankdeck {cmd_name} {example}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that was typed.

        Raises:
            UsageError: There is no such command; the hint names the nearest.
        """
        if not ctx.resilient_parsing and args[0] not in self.list_commands(ctx):
            raise _no_command(args, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


_MEANINGS = {
    "rankdeck status --watch, or rankdeck alone for the console": ("htop", "monitor", "top", "watch"),
    "rankdeck status": ("hosts", "info", "jobs", "list", "ls", "nodes", "show", "squeue"),
    "rankdeck ranks": ("ps",),
    "rankdeck logs -f": ("tail",),
    "rankdeck attach": ("console", "dashboard", "gui", "open", "ui", "view"),
    "rankdeck run train.py": ("launch", "submit", "train"),
    "rankdeck stop, or rankdeck kill": ("abort", "cancel", "scancel", "terminate"),
    "rankdeck doctor": ("check", "diagnose", "test"),
    "rankdeck init, then rankdeck install": ("deploy", "setup"),
    "rankdeck down ends the agents; then, on each host: pip uninstall rankdeck": ("remove", "rm", "uninstall"),
    "rankdeck memory": ("gpu", "gpus", "nvidia-smi"),
    "rankdeck --version": ("version",),
}
OF_OTHERS = {word: command for command, others in _MEANINGS.items() for word in others}
"""What is meant by a command that other programs have: the nearest name may do harm."""


def _no_command(args: list[str], commands: list[str]) -> UsageError:
    # Imported late: other commands do not wait for these.
    from app.inventory.program import without_launcher  # noqa: PLC0415

    program, near = without_launcher(tuple(args)), nearest(args[0], commands)
    hint = OF_OTHERS.get(args[0]) or (f"did you mean {near}?" if near else "rankdeck --help lists them")
    if len(program) < len(args) or args[0].endswith(".py"):
        hint = f"rankdeck run {clean(shlex.join(program), LINE_LIMIT)}"
    return UsageError(f"{clean(args[0])} is no command of rankdeck", hint)


COMMANDS = {
    "attach": ("app.cli.hosts", "gpt --host gpu1"),
    "barriers": ("app.cli.listing", "--watch"),
    "completion": ("app.cli.main", "bash > ~/.local/share/bash-completion/completions/rankdeck"),
    "config": ("app.cli.config", "--show-origin"),
    "demo": ("app.cli.run", "--fault freeze:2@10"),
    "doctor": ("app.cli.agents", "gpu1 gpu2 --all"),
    "down": ("app.cli.agents", "--kill-jobs"),
    "events": ("app.cli.listing", "gpt --since 10m -f"),
    "env": ("app.cli.exec", "--name gpt"),
    "evidence": ("app.cli.evidence", "gpt --output hang.zip"),
    "exec": ("app.cli.exec", "-- torchrun --nproc-per-node 4 train.py"),
    "fault": ("app.cli.control", "freeze --rank 2 --job gpt"),
    "help": ("app.cli.main", "verdicts"),
    "init": ("app.cli.config", "--hostfile hosts"),
    "inspect": ("app.cli.hosts", "--host gpu1 --host gpu2"),
    "install": ("app.cli.agents", "gpu1 --venv ~/venvs/rankdeck"),
    "kill": ("app.cli.control", "gpt"),
    "logs": ("app.cli.listing", "-f --since 10m --rank 0,3-5 --grep loss"),
    "memory": ("app.cli.listing", "--rank 0-7"),
    "ranks": ("app.cli.listing", "--rank 0,3-5 --watch"),
    "record": ("app.cli.evidence", "night.rdk gpt"),
    "replay": ("app.cli.evidence", "hang.zip --speed 4"),
    "restart": ("app.cli.control", "gpt --nproc-per-node 4"),
    "run": ("app.cli.run", "--nproc-per-node 2 train.py --epochs 3"),
    "serve": ("app.cli.hosts", "-- attach --host gpu1"),
    "stacks": ("app.cli.hosts", "gpt --native"),
    "start": ("app.cli.run", "gpt -- --lr 1e-4"),
    "status": ("app.cli.hosts", "--watch"),
    "stragglers": ("app.cli.listing", "--rank 0-7 --json"),
    "stop": ("app.cli.control", "gpt"),
    "up": ("app.cli.agents", "gpu1 gpu2"),
}
"""Module of each command, and example arguments."""
START_OBJECTS = 200_000
"""New objects between two garbage collections: imported objects stay, and at Python's own pace the search for garbage
takes a fifth of a start."""
NEXT_STEPS = {
    ExitCode.UNREACHABLE: "rankdeck doctor looks at each host",
}
"""Hints of errors that have none of their own, by exit code."""
HOST_OPTIONS = ("--node", "--nodes", "--hosts")
"""Options of other tools, in place of which stands `--host`."""


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

    Alone it opens the console on the hosts of the nearest rankdeck.toml, here or above; --set and --no-config
    are for that. Without such a file it prints what to type first.
    """
    if context.invoked_subcommand is not None:
        if assignments or has_no_files:
            hint = f"rankdeck {context.invoked_subcommand} --help shows which it takes"
            raise UsageError("--set and --no-config stand behind the command", hint)
        return
    # Imported late: other commands do not wait for these.
    from app.cli.inventory_file import console_argv, first_lines, inventory_text  # noqa: PLC0415

    if not has_no_files and (argv := console_argv(assignments)):
        _print_error(f"the hosts are those of {inventory_text()}")
        rankdeck.main(list(argv), prog_name="rankdeck", standalone_mode=False)
    else:
        click.echo(first_lines(assignments, has_files=not has_no_files))


@click.command()
@click.argument("topic", required=False)
@click.pass_context
def help(context: click.Context, topic: str | None) -> None:  # noqa: A001 - a verb is found by its function's name
    """Print the manual, one TOPIC of it, or a command's options."""
    if topic is None:
        width = max(map(len, TOPICS))
        click.echo("rankdeck help TOPIC prints a topic, rankdeck help VERB a command's options.\n")
        for name in TOPICS:
            click.echo(f"  {name:<{width}}  {summary(name)}")
        click.echo("\nrankdeck --help lists the commands.")
    elif topic in TOPICS:
        # less exits by itself and leaves the text on the screen when it fits.
        os.environ.setdefault("LESS", "-FRX")
        lines = [*rendered(markdown(topic))]
        if topic in COMMANDS:
            lines += [f"The command's options: rankdeck {topic} --help"]
        click.echo_via_pager("\n".join(lines), color=own_color(os.environ))
    else:
        click.echo(_options_of(context, topic))


def _options_of(context: click.Context, name: str) -> str:
    root = context.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, name)
    if command is None:
        near = nearest_text(name, [*TOPICS, *group.list_commands(root)])
        raise UsageError(f"{clean(name)} is no topic and no command{near}", "rankdeck help lists the topics")
    return command.get_help(click.Context(command, info_name=name, parent=root))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and options.

    Save it where the shell reads it at its start.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "rankdeck", "_RANKDECK_COMPLETE").source())


def main() -> NoReturn:
    """Run the command; print an `AppError` as one line on stderr, with its hint."""
    gc.set_threshold(START_OBJECTS)
    _make_streams_usable()
    try:
        rankdeck.main(standalone_mode=False)
    except click.exceptions.Abort:
        _print_error("interrupted")
        code = ExitCode.INTERRUPTED
    except click.NoSuchOption as error:
        _print_error(_option_text(error))
        code = ExitCode.USAGE
    except click.ClickException as error:
        _print_error(f"{error.format_message()} (--help shows what there is)")
        code = ExitCode.USAGE
    except AppError as error:
        hint = error.hint or NEXT_STEPS.get(error.exit_code, "")
        _print_error(f"{error} ({hint})" if hint else str(error))
        code = error.exit_code
    else:
        code = ExitCode.WELL
    sys.exit(code)


def _option_text(error: click.NoSuchOption) -> str:
    """Return what is wrong with an option, and where it stands or which is meant."""
    name = error.option_name
    if error.ctx is None or error.ctx.parent is None:
        return f"no such option: {name} (a command's options stand behind it: rankdeck COMMAND --help)"
    if name in HOST_OPTIONS:
        return f"no such option: {name} (--host names a host)"
    return f"{error.format_message()} (--help shows what there is)"


def _make_streams_usable() -> None:
    """Open what was closed, and let no character that a terminal's encoding lacks end a command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_error(sentence: str) -> None:
    click.echo(f"rankdeck: {sentence}", err=True)
