"""`python -P -m agent VERB`: serve, and every command by hand. JSON in and out; people's words on standard error.

Exit codes: 0 well, 1 the doctor found something bad, 2 wrong use, 3 no agent answers, 4 the agent refused.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from agent.command_verbs import COMMAND_VERBS, directory_option
from agent.errors import AgentError
from agent.fan_in.verbs import relay, roster

EXIT_BAD = 1
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The node's side of rankdeck: serve, and speak to the agent that serves."""


@cli.command()
@directory_option
@click.option("--node", default=socket.gethostname, show_default="host name", help="What consoles call this node.")
@click.option("--private", "is_private", is_flag=True, help="End with the pipe on standard input, and leave nothing.")
@click.option("--daemon", "is_daemon", is_flag=True, help="Serve in the background, and outlive this session.")
@click.option("--ready-fd", type=int, hidden=True, help="Where a daemon says that it serves.")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve Prometheus there, on loopback only.")
@click.option(
    "--relay",
    "invitation",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Dial the relay that writes this invitation, now or once it is there.",
)
def serve(*, directory: Path, node: str, is_private: bool, is_daemon: bool, **how: Any) -> None:
    """Serve in the foreground, or as a daemon; says in one JSON line when it listens."""
    # The other verbs start without the daemon's imports.
    if is_daemon:
        from agent.service.daemonise import start_daemon  # noqa: PLC0415

        if is_private:
            raise click.UsageError("a private agent belongs to its console: --daemon does not go with --private")
        _print(start_daemon(directory.absolute(), node, how["metrics"], how["invitation"]))
        return
    from agent.serve import serve_until_told  # noqa: PLC0415

    serve_until_told(directory, node, is_private=is_private, **how)


@cli.command()
@directory_option
def where(directory: Path) -> None:
    """Say in one JSON line where this host's agent lives, and whether it serves."""
    from agent.service.whereabouts import look  # noqa: PLC0415

    _print(look(directory.absolute()))


@cli.command()
def unit() -> None:
    """Print a systemd unit for this user's agent."""
    from agent.service.unit import unit_text  # noqa: PLC0415

    click.echo(unit_text(sys.executable, os.environ), nl=False)


@cli.command()
@directory_option
@click.option("--python", default=sys.executable, show_default="this one", help="The interpreter of the jobs.")
@click.option("--workdir", default="", help="Where they would run: what is there is told, to be compared.")
def doctor(directory: Path, python: str, workdir: str) -> None:
    """Look at this node before a job does: one JSON row for each thing that matters, and what to do about it."""
    from agent.doctor.examine import examine  # noqa: PLC0415
    from agent.wire.examination import Health  # noqa: PLC0415

    examination = examine(directory.absolute(), python, workdir)
    _print(examination)
    if any(row.status is Health.BAD for row in examination.rows):
        sys.exit(EXIT_BAD)


@cli.command()
@click.option("--address", required=True, help="Of this node.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Without it, a free one.")
def listen(*, address: str, port: int) -> None:
    """Let other machines try to reach this one, until standard input ends; to each line there it says the time of day.

    Nothing is taken from whoever connects.
    """
    from agent.doctor.reach import attend, hold_port  # noqa: PLC0415

    listener, where = hold_port(address, port)
    attend(listener, where, sys.stdin.fileno(), sys.stdout.fileno())


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="ADDRESS:PORT...")
def reach(targets: tuple[str, ...]) -> None:
    """Try whether this node reaches others that listen; one JSON line says how each connection went."""
    from agent.doctor.reach import reach  # noqa: PLC0415
    from agent.wire.examination import MAX_TARGETS  # noqa: PLC0415

    if len(targets) > MAX_TARGETS:
        raise click.UsageError(f"at most {MAX_TARGETS} at once")
    try:
        _print(reach(targets))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@cli.command("proxy")
@directory_option
def proxy_verb(directory: Path) -> None:
    """Carry the command socket over standard input and output."""
    from agent.roads.proxy import proxy  # noqa: PLC0415

    proxy(directory, sys.stdin.fileno(), sys.stdout.fileno())


@cli.command("telemetry")
@directory_option
def telemetry_verb(directory: Path) -> None:
    """Carry the stream of reports over standard input and output."""
    from agent.roads.proxy import carry_reports  # noqa: PLC0415

    carry_reports(directory, sys.stdin.fileno(), sys.stdout.fileno())


for verb in (relay, roster, *COMMAND_VERBS):
    cli.add_command(verb)


def _print(answer: msgspec.Struct) -> None:
    """Print one JSON line."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command and exit."""
    try:
        cli.main(prog_name="agent", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except AgentError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(str(error), 1)


def _fail(message: str, exit_code: int) -> None:
    click.echo(f"agent: {message}", err=True)
    sys.exit(exit_code)
