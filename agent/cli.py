"""The command line of the agent: `python -P -m agent VERB` serves, or sends one command to the agent that serves.

Input and output are JSON; texts for people go to standard error. `COMMAND_VERBS` are the commands to the agent that
serves: each prints the agent's reply, and exits by it.

Exit codes: 0 well, 1 the doctor found something bad, 2 wrong use, 3 no agent answers, 4 the agent refused.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent.errors import AgentError, FrozenAgentError, StateDirError
from agent.relay.verbs import relay, roster
from agent.service.agent_info import frozen_holder
from agent.state_dir import default_directory, is_served
from agent.transport.command_socket import ask
from agent.wire.codec import MAX_COMMAND_BYTES, MalformedMessageError
from agent.wire.commands import (
    Abort,
    Claim,
    CleanLeftovers,
    Command,
    Commit,
    FindLeftovers,
    GetStatus,
    InjectFault,
    Kill,
    PullHistory,
    RefusalReason,
    Refused,
    ShowJob,
    Shutdown,
    Stop,
    Tier,
    decode_command,
)
from agent.wire.logs import LogStream, PullLogs, ReadLog
from agent.wire.stacks import GetStacks
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable

END_S = 15.0
"""How long `shutdown` waits for the agent to be gone."""
EXIT_REFUSED = 4


def _usual_directory() -> Path:
    return default_directory(os.environ, socket.gethostname())


directory_option = click.option(
    "--dir",
    "directory",
    default=_usual_directory,
    show_default="$XDG_STATE_HOME/rankdeck/HOSTNAME",
    type=click.Path(path_type=Path),
    help="The agent's own 0700 directory.",
)
_job = click.option("--job", "job_id", help="Id of the job; without it the command is read from standard input.")


@click.command()
@directory_option
def prepare(directory: Path) -> None:
    """Check a job and reserve what it needs; the command is read from standard input."""
    _ask(directory, _read_command("prepare"))


@click.command("prepare-again")
@directory_option
def prepare_again(directory: Path) -> None:
    """Prepare the next attempt of a job that has ended; the command is read from standard input."""
    _ask(directory, _read_command("prepare_again"))


def _job_verb(verb: str, command_type: Callable[[str], Command], help_text: str) -> click.Command:
    @click.command(verb, help=help_text)
    @directory_option
    @_job
    def run(directory: Path, job_id: str | None) -> None:
        _ask(directory, _checked(command_type(job_id)) if job_id else _read_command(verb))

    return run


@click.command()
@directory_option
@_job
@click.option("--kind", type=click.Choice([kind.value for kind in FaultKind]), help="What to do to the rank.")
@click.option("--rank", type=click.IntRange(min=0), help="Global rank.")
@click.option("--at-step", type=click.IntRange(min=0), help="Strike at this step; without it now, or at the next step.")
@click.option(
    "--factor",
    type=float,
    default=DEFAULT_SLOW_FACTOR,
    show_default=True,
    help="For slow: how many times as long a step takes.",
)
@click.option(
    "--for", "duration_s", type=float, default=DEFAULT_HOLD_S, show_default=True, help="For gil: how many seconds."
)
def fault(directory: Path, job_id: str | None, kind: str | None, rank: int | None, **how: Any) -> None:
    """Do harm to one rank of a job that allows it."""
    if not job_id:
        _ask(directory, _read_command("fault"))
        return
    if kind is None or rank is None:
        raise click.UsageError("fault --job wants --kind and --rank too")
    _ask(directory, _checked(InjectFault(job_id, FaultKind(kind), rank, **how)))


@click.command()
@directory_option
@click.option("--since-seq", type=click.IntRange(min=0), help="Number of the last line that is known.")
@_job
@click.option("--rank", type=click.IntRange(min=-1), help="A piece of this rank's file instead; -1 is the launcher.")
@click.option("--attempt", type=click.IntRange(min=0), help="Without it, the latest.")
@click.option("--stream", type=click.Choice([stream.value for stream in LogStream]), default="stderr")
@click.option("--offset", type=int, default=0, help="In bytes; a negative one counts from the end.")
def logs(since_seq: int | None, rank: int | None, *, directory: Path, **piece: Any) -> None:
    """Print log lines, oldest first; with --job and --rank, a piece of a file and where the next one begins."""
    if rank is not None:
        if not piece["job_id"]:
            raise click.UsageError("logs --rank wants --job too")
        piece["stream"] = LogStream(piece["stream"])
        _ask(directory, _checked(ReadLog(rank=rank, **piece)))
        return
    if since_seq is None:
        _ask(directory, PullLogs() if sys.stdin.isatty() else _read_command("logs", empty=PullLogs()))
        return
    _ask(directory, PullLogs(since_seq))


@click.command()
@directory_option
@click.option("--generation", type=click.IntRange(min=1), required=True, help="Above the node's latest.")
@click.option("--holder", required=True, help="Who claims it, for people.")
def claim(directory: Path, generation: int, holder: str) -> None:
    """Take control of this node from whoever holds it."""
    _ask(directory, _checked(Claim(generation, holder)))


@click.command()
@directory_option
@click.option("--job", "job_id", required=True, help="Id of the job.")
def show(directory: Path, job_id: str) -> None:
    """Print what a job is made of: command, environment without its secrets, where its logs are."""
    _ask(directory, _checked(ShowJob(job_id)))


@click.command()
@directory_option
@_job
@click.option("--native", "is_native", is_flag=True, help="With C and C++ frames, by py-spy; stops each rank shortly.")
def stacks(*, directory: Path, job_id: str | None, is_native: bool) -> None:
    """Print where every rank of a job stands, down to each frame."""
    _ask(directory, _checked(GetStacks(job_id, is_native)) if job_id else _read_command("stacks"))


@click.command()
@directory_option
@click.option("--tier", type=click.Choice([tier.value for tier in Tier]), default="recent", show_default=True)
@click.option("--since-seq", type=click.IntRange(min=0), default=0, help="Number of the last report that is known.")
@click.option("--max-age", "max_age_s", type=click.FloatRange(min=0), help="In seconds.")
def history(directory: Path, tier: str, since_seq: int, max_age_s: float | None) -> None:
    """Print reports of the past, oldest first."""
    _ask(directory, PullHistory(Tier(tier), since_seq, max_age_s))


@click.command()
@directory_option
@click.option("--script", help="Refuse where this is no file.")
@click.option("--workdir", default="~", help="From where it is seen.")
def status(directory: Path, script: str | None, workdir: str) -> None:
    """Print the node's report."""
    seen_from = Path.home() / Path(workdir).expanduser()
    if script is not None and not (seen_from / script).is_file():
        refused = Refused(RefusalReason.NO_SCRIPT, f"{script} is not a file (seen from {seen_from})")
        if not seen_from.is_dir():
            why = f"{seen_from} is not a directory that can be entered: create it there"
            refused = Refused(RefusalReason.NO_WORKDIR, why)
        click.echo(msgspec.json.encode(refused))
        sys.exit(EXIT_REFUSED)
    _ask(directory, GetStatus())


@click.command()
@directory_option
@click.option("--clean", "is_clean", is_flag=True, help="End them: rankdeck's own, or those that are named.")
@click.option("--name", "names", multiple=True, help="One to clean, by the name in the list; may be repeated.")
@click.option("--foreign", "is_confirmed", is_flag=True, help="Named ones that rankdeck has not started, too.")
def leftovers(directory: Path, is_clean: bool, names: tuple[str, ...], is_confirmed: bool) -> None:  # noqa: FBT001
    """List what earlier runs of this user have left: processes with their ports, shared memory."""
    if not is_clean and (names or is_confirmed):
        raise click.UsageError("--name and --foreign go with --clean")
    _ask(directory, _checked(CleanLeftovers(list(names), is_confirmed)) if is_clean else FindLeftovers())


@click.command()
@directory_option
@click.option("--kill-jobs", is_flag=True, help="Kill them first; without this they go on.")
def shutdown(directory: Path, *, kill_jobs: bool) -> None:
    """End the agent; its jobs go on, until another agent in the same directory takes them up."""
    _ask(directory, Shutdown(kill_jobs))
    deadline_s = time.monotonic() + END_S
    while is_served(directory):
        if time.monotonic() > deadline_s:
            raise StateDirError(f"the agent in {directory} has agreed to end and has not done so in {END_S:.0f} s")
        time.sleep(0.02)


def _read_command(verb: str, empty: Command | None = None) -> Command:
    """Return the command on standard input; the verb need not be repeated in it."""
    text = sys.stdin.buffer.read(MAX_COMMAND_BYTES + 1)
    if not text.strip() and empty is not None:
        return empty
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.UsageError(f"standard input is not a JSON command: {error}") from error
    if not isinstance(fields, dict) or fields.setdefault("type", verb) != verb:
        raise click.UsageError(f"standard input is not a {verb} command")
    return _checked(fields)


def _checked(command: object) -> Command:
    """Return a command as the agent will understand it."""
    try:
        return decode_command(msgspec.json.encode(command))
    except MalformedMessageError as error:
        raise click.UsageError(str(error)) from error


def _ask(directory: Path, command: Command) -> None:
    """Send a command, print the reply, and exit by it."""
    if (pid := frozen_holder(directory)) is not None:
        raise FrozenAgentError(directory, pid)
    line, reply = ask(directory, command)
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
    if isinstance(reply, Refused):
        click.echo(f"agent: refused ({reply.reason}): {reply.message}", err=True)
        sys.exit(EXIT_REFUSED)


COMMAND_VERBS: tuple[click.Command, ...] = (
    prepare,
    prepare_again,
    fault,
    logs,
    claim,
    show,
    stacks,
    history,
    status,
    leftovers,
    shutdown,
    _job_verb("commit", Commit, "Start a prepared job."),
    _job_verb("abort", Abort, "Forget a prepared job."),
    _job_verb(
        "stop",
        Stop,
        "End a job: after a step and a checkpoint if its ranks can; else SIGTERM, a grace period, SIGKILL.",
    ),
    _job_verb("kill", Kill, "End a job at once."),
)


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
@click.option("--ready-fd", type=int, hidden=True, help="Where a daemon reports that it serves.")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve Prometheus there, on loopback only.")
@click.option(
    "--relay",
    "invitation",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Dial the relay that writes this invitation, now or once it is there.",
)
@click.option("--until-relay-ends", "ends_with_relay", is_flag=True, help="Stop the jobs and end once the relay has.")
def serve(*, directory: Path, node: str, is_private: bool, is_daemon: bool, **how: Any) -> None:
    """Serve in the foreground, or as a daemon; prints one JSON line once it listens."""
    if how["ends_with_relay"] and (is_daemon or how["invitation"] is None):
        raise click.UsageError("--until-relay-ends is for an agent in the foreground, with --relay")
    # The other verbs start without the daemon's imports.
    if is_daemon:
        from agent.service.daemonise import start_daemon  # noqa: PLC0415

        if is_private:
            raise click.UsageError("a private agent belongs to its console: --daemon does not go with --private")
        _print(start_daemon(directory.absolute(), node, how["metrics"], how["invitation"]))
        return
    from agent.serve import ServeOptions, serve_until_stopped  # noqa: PLC0415

    serve_until_stopped(directory, node, ServeOptions(**how), is_private=is_private)


@cli.command()
@directory_option
def where(directory: Path) -> None:
    """Print in one JSON line where this host's agent lives, and whether it serves."""
    from agent.service.agent_info import look  # noqa: PLC0415

    _print(look(directory.absolute()))


@cli.command()
def unit() -> None:
    """Print a systemd unit for this user's agent."""
    from agent.service.systemd import unit_text  # noqa: PLC0415

    click.echo(unit_text(sys.executable, os.environ), nl=False)


@cli.command()
@directory_option
@click.option("--python", default=sys.executable, show_default="this one", help="The interpreter of the jobs.")
@click.option("--workdir", default="", help="Where they would run: what is there is reported, to be compared.")
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
    """Let other machines try to reach this one, until standard input ends; to each line there it answers the time.

    Nothing is taken from whoever connects.
    """
    from agent.doctor.network import attend, hold_port  # noqa: PLC0415

    server_socket, where = hold_port(address, port)
    attend(server_socket, where, sys.stdin.fileno(), sys.stdout.fileno())


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="ADDRESS:PORT...")
def reach(targets: tuple[str, ...]) -> None:
    """Try whether this node reaches others that listen; one JSON line shows how each connection went."""
    from agent.doctor.network import reach  # noqa: PLC0415
    from agent.wire.examination import MAX_TARGETS  # noqa: PLC0415

    if len(targets) > MAX_TARGETS:
        raise click.UsageError(f"at most {MAX_TARGETS} at once")
    try:
        _print(reach(targets))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@cli.command("proxy")
@directory_option
@click.option("--reports", is_flag=True, help="Carry the reports socket, of an agent or a relay.")
def proxy_verb(directory: Path, *, reports: bool) -> None:
    """Carry the command socket over standard input and output."""
    from agent.transport.proxy import carry_commands, carry_reports  # noqa: PLC0415

    carry = carry_reports if reports else carry_commands
    carry(directory, sys.stdin.fileno(), sys.stdout.fileno())


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
