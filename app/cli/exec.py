"""The commands for launchers of the user's own: `exec` runs one, `env` prints what `exec` sets.

Their ranks load the probe, and the agent of their host takes them in as a job that it has not launched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import click

from app.cli.headless import print_line
from app.cli.run import REHEARSED_RANKS, ProgramCommand, complete_files
from app.errors import AppError, UsageError
from app.fleet.local_link import LocalLink
from app.inventory.program import check_job_id
from app.text import clean
from ddpcore.wire_launch import (
    ADOPTED_DIR,
    ENV_AGENT_DIR,
    ENV_EXEC_PID,
    EXEC_SUFFIX,
    INBOX_SOCKET,
    JOB_VARIABLES,
    agent_directories,
    prepared_env,
    rehearsal_variables,
    taking_directory,
)

EXIT_NO_COMMAND, EXIT_CANNOT_EXECUTE = 127, 126
"""As a shell has them."""

_rehearse = click.option(
    "--rehearse",
    "rehearses",
    is_flag=True,
    help=f"Let programs for GPUs run on the CPU and see {REHEARSED_RANKS} GPUs: cuda is the CPU, nccl is gloo",
)
_job_name = click.option("--name", default="", help="Name of the job [by what its launcher calls it]")


@click.command("exec", cls=ProgramCommand)
@_job_name
@_rehearse
@click.option(
    "--relay",
    "invitation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="INVITATION",
    help="Let the agent that is started dial a relay, by its invitation; one that serves already stays as it is",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...", shell_complete=complete_files)
def exec_(*, name: str, rehearses: bool, invitation: Path | None, command: tuple[str, ...]) -> None:
    """Run a launcher of your own so that its ranks are watched.

    Output, exit code, signals and terminal are the command's own. Starts this node's agent if none serves; without one
    the command runs all the same. Over several hosts give each the same --name.
    """
    if not command:
        raise UsageError("exec wants a command", "rankdeck exec -- torchrun --nproc-per-node 4 train.py")
    if name:
        check_job_id(name)
    if shutil.which(command[0]) is None:  # no agent is started for it
        _refuse(command[0], _why_not(command[0]))
    if _start_agent(invitation) and sys.stderr.isatty():
        print_line("rankdeck: the ranks of this command are watched; see them by rankdeck attach")
    _leave_mark()
    environ = {**_prepared(name, rehearses=rehearses), ENV_EXEC_PID: str(os.getpid())}
    # Python ignores these two; a command has to have them as from a shell.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606 - the command is the user's, and no shell reads it
    except OSError as error:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        _refuse(command[0], error.errno)


@click.command()
@_job_name
@_rehearse
def env(*, name: str, rehearses: bool) -> None:
    """Print what `exec` sets, for a shell or a batch script.

    All that is started after it is watched, on this host and where its environment goes. The agent of each host has to
    serve: `rankdeck up`.
    """
    if name:
        check_job_id(name)
    now = _prepared(name, rehearses=rehearses)
    changed = {key: value for key, value in now.items() if os.environ.get(key) != value}
    for key in sorted(JOB_VARIABLES & os.environ.keys() - now.keys()):
        click.echo(f"unset {key}")
    for key, value in sorted(changed.items()):
        click.echo(f"export {key}={shlex.quote(value)}")
    try:
        is_served = LocalLink().serving() is not None
    except AppError:
        is_served = False
    if not is_served:
        print_line("rankdeck: no agent runs on this machine: rankdeck up")


def _why_not(command: str) -> int | None:
    """Return the error number of a command that is not to be found, or is no program."""
    if "/" not in command:
        return errno.ENOENT
    try:
        Path(command).stat()
    except OSError as error:
        return error.errno
    return errno.EACCES


def _refuse(command: str, number: int | None) -> NoReturn:
    """Print why a command cannot be run, and exit as a shell does."""
    is_program = number == errno.ENOENT and command.endswith(".py") and os.path.lexists(command)
    hint = f" (rankdeck exec -- python3 {clean(shlex.quote(command))})" if is_program else ""
    print_line(f"rankdeck: {clean(command)} cannot be run: {os.strerror(number or 0)}{hint}")
    raise SystemExit(EXIT_NO_COMMAND if number == errno.ENOENT else EXIT_CANNOT_EXECUTE)


def _prepared(name: str, *, rehearses: bool) -> dict[str, str]:
    rehearsal = rehearsal_variables(REHEARSED_RANKS) if rehearses else {}
    return {**prepared_env(os.environ, name), **rehearsal}


def _leave_mark() -> None:
    """Leave who this process is for the agent that its ranks report to: they may have no probe."""
    given = os.environ.get(ENV_AGENT_DIR)
    directories = [Path(given)] if given else agent_directories(os.environ, socket.gethostname())
    with contextlib.suppress(OSError):  # without it the command runs all the same
        directory = taking_directory(directories, _serves)
        if directory is not None and directory.is_dir():
            (directory / ADOPTED_DIR).mkdir(mode=0o700, exist_ok=True)
            started_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
            (directory / ADOPTED_DIR / f"{os.getpid()}-{started_ticks}{EXEC_SUFFIX}").touch(mode=0o600)


def _serves(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.connect(str(directory / INBOX_SOCKET))  # sends nothing
        return True
    return False


def _start_agent(invitation: Path | None) -> bool:
    """Start this machine's agent unless it serves; return False, and print why, where there is none."""
    options = () if invitation is None else ("--relay", str(invitation))
    # Also in a step of a Slurm job: consoles find this host's usual agent, not one of the step's own.
    for directory in agent_directories(os.environ, socket.gethostname())[-1:]:
        options = ("--dir", os.environ.get(ENV_AGENT_DIR) or str(directory), *options)
    try:
        LocalLink().ask_verb("serve", "--daemon", *options)
    except AppError as error:
        print_line(f"rankdeck: not watched: {error.whole}")
        return False
    return True
