"""The commands that start a job: `run` any program, `start` one of the inventory's jobs, `demo` an example.

`demo` runs on this machine, over two private agents.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.shell_completion import CompletionItem

from agent.wire.jobs import MAX_LOCAL_WORLD_SIZE, MAX_RESTARTS
from app.cli.chosen_hosts import HostsWanted, Watch, hinting_at_new_agents, looked_at, takes_hosts, watch
from app.cli.headless import print_line, with_progress
from app.cli.inventory_file import expanded, load_inventory
from app.cli.options import (
    SESSION_OPTIONS,
    agrees_to_share,
    beside_option,
    evidence_option,
    json_option,
    no_evidence_option,
    print_json,
    print_trouble,
    read_only_option,
    record_option,
    session_options,
)
from app.cli.presenting import is_terminal, print_session, show_session
from app.cli.settings_options import NO_FILES_PARAMETER, takes_settings
from app.errors import AgentRefusedError, AppError, HostsBusyError, UsageError
from app.fleet.local_link import LocalLink
from app.inventory.jobs import is_variable
from app.inventory.program import (
    INSTEAD_OF_GUESSES,
    INSTEAD_OF_OPTIONS,
    check_command,
    check_job_id,
    check_utf8,
    make_job_id,
    own_options_text,
)
from app.preflight.examining import preflight, refuse_before_examining
from app.recording.evidence import check_directory
from app.session.audit import AuditedAction
from app.session.demo import CONSOLE_STEPS, DEFAULT_RANKS, HEADLESS_STEPS, MAX_RANKS, Demo, DemoOptions, check_options
from app.session.hosts import wanted_of
from app.session.options import SessionOptions
from app.session.remote_job import RunRequest, check_metrics, check_room, own_variables
from app.session.remote_session import RemoteSession
from app.settings.keys import nearest_text
from app.ssh.config import THIS_MACHINE
from app.text import LINE_LIMIT, clean
from app.view.actions import AT_START, parse_fault
from ddpcore.wire_launch import rehearsal_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.fleet.agent_link import AgentLink
    from app.inventory.jobs import JobEntry
    from app.preflight.findings import Step
    from app.session.hosts import Hosts

REHEARSED_RANKS = 2
TYPED = "rankdeck.typed"
"""Key of the typed arguments in a context's `meta`."""
MAX_NAMED = 6
"""Limit of variables that are named."""
NPROC_KINDS = ("gpu", "cpu", "auto")

_watch_options = (
    click.option("--detach", is_flag=True, help="Start it, print its name and what to type next, and leave"),
    beside_option,
    click.option("--no-doctor", "skips_doctor", is_flag=True, help="Do not look at several hosts beforehand"),
    evidence_option,
    no_evidence_option,
    record_option,
    read_only_option,
    click.option("--headless", is_flag=True, help="No screen: lines on stderr, a summary on stdout"),
    json_option,
    takes_settings,
    functools.partial(takes_hosts, starts=True),
)


def _starts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of where a job is started, and how it is watched."""
    for option in reversed(_watch_options):
        command = option(command)
    return command


class _NumRanks(click.IntRange):
    """A number of ranks, or what torchrun counts instead."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the word."""
        if value in NPROC_KINDS:
            return value
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            self.fail(f"{clean(value)} is neither a number nor {', '.join(NPROC_KINDS)}", param, ctx)
        return super().convert(value, param, ctx)


def _one_node(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value not in (None, "1", "1:1"):
        hint = "name the hosts: --host gpu1 --host gpu2"
        raise UsageError("--nnodes is an option of torchrun, not of rankdeck", hint)


class ProgramCommand(click.Command):
    """A command whose first argument that is no option of its own begins the program's command line, as in torchrun."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Treat `-m MODULE` as the beginning of the program; name the replacement for torchrun's other options."""
        try:
            ctx.meta[TYPED] = args
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            if error.option_name == "-m":
                at, module = _module_in(args)
                return self.parse_args(ctx, [*args[:at], "--", "-m", *module, *args[at + 1 :]])
            if instead := INSTEAD_OF_GUESSES.get(error.option_name.replace("_", "-")):
                raise UsageError(f"there is no {error.option_name} here", instead) from None
            if instead := INSTEAD_OF_OPTIONS.get(error.option_name.replace("_", "-")):
                raise UsageError(f"{error.option_name} is an option of torchrun, not of rankdeck", instead) from None
            raise


def complete_files(_context: click.Context, _parameter: click.Parameter, text: str) -> list[CompletionItem]:
    """Have the shell complete the program, and files among its arguments."""
    return [CompletionItem(text, type="file")]


def _module_in(args: list[str]) -> tuple[int, list[str]]:
    """Return the index of `-m`, and the module if it is in the same argument, as Python accepts it."""
    at = next(at for at, word in enumerate(args) if word.startswith("-m"))
    return at, [args[at][2:]] if len(args[at]) > 2 else []


@click.command(cls=ProgramCommand)
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    "num_ranks",
    type=_NumRanks(1, MAX_LOCAL_WORLD_SIZE),
    metavar="N|gpu|cpu|auto",
    help="Ranks of each host; the words count as torchrun's do [the inventory's number, else one for each GPU, "
    "without GPUs one for every two cores]",
)
@click.option("--share-gpus", "shares_gpus", is_flag=True, help="Let there be more ranks than GPUs")
@click.option(
    "--workdir",
    default="",
    help=f"Directory there that the program runs in [the inventory's, else home; on {THIS_MACHINE} this one]",
)
@click.option("--job-python", default="", help="The Python there that has torch [the agent's own]")
@click.option(
    "--master-addr", "--master_addr", default="", help="Under which the other hosts reach the first one [those it has]"
)
@click.option("--name", default="", help="Its name [the program's and a number]; that of an ended job restarts it")
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0, MAX_RESTARTS),
    default=0,
    show_default=True,
    help="After a failure",
)
@click.option(
    "--abandon-after",
    "abandon_s",
    type=click.FloatRange(0),
    default=0.0,
    help="End ranks that hang for so many seconds while nobody watches [never]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="REGEX",
    help="Find figures in what the ranks print: 'loss=([0-9.e+-]+)' is the loss, (?P<step>...) its step, (?P<NAME>...)"
    " any other; as often as you like; RE2's syntax",
)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="For the ranks; without a value, the one here"
)
@click.option("--no-probe", is_flag=True, help="Leave the ranks as they are: watch their processes and output only")
@click.option(
    "--rehearse",
    "rehearses",
    is_flag=True,
    help=f"Run a program for GPUs on this machine's CPU, as {REHEARSED_RANKS} ranks: cuda is the CPU, nccl is gloo",
)
@click.option("--allow-faults", is_flag=True, help="Let harm be done to its ranks, by `fault` or in the console")
@click.option("--standalone", is_flag=True, hidden=True)  # torchrun's, for a job of one host: so is each here
@click.option("--nnodes", callback=_one_node, expose_value=False, hidden=True)
@_starts
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_files)
def run(*, wanted: HostsWanted, **job: Any) -> None:
    """Start a program under torchrun, and watch it.

    As in `run train.py --epochs 3`, or `run --host gpu1 --host gpu2 -m train`. Without --host it runs on the hosts of
    rankdeck.toml, or on this machine when that names none.
    """
    command, num_ranks = check_command(tuple(job["command"])), job["num_ranks"]
    job_id = make_job_id(command, secrets.token_hex(2))
    variables = [_variable(text) for text in job["variables"]]
    check_utf8(job["job_python"], *(entry.workdir for entry in wanted.with_workdirs(job["workdir"]).entries))
    if job["rehearses"]:
        if job["no_probe"]:
            raise UsageError("--rehearse and --no-probe contradict each other", "leave --no-probe out")
        num_ranks = num_ranks or REHEARSED_RANKS
        job_id = f"rehearsal-{job_id}"
        variables += rehearsal_variables(num_ranks if isinstance(num_ranks, int) else 1).items()
    request = RunRequest(
        command=command,
        job_id=check_job_id(job["name"] or job_id),
        num_ranks=None if num_ranks in NPROC_KINDS else num_ranks,
        nproc=num_ranks if num_ranks in NPROC_KINDS else "",
        python=job["job_python"],
        master_addr=job["master_addr"],
        max_restarts=job["max_restarts"],
        abandon_s=job["abandon_s"],
        shares_gpus=job["shares_gpus"],
        metrics=check_metrics(job["metrics"]),
        is_probed=not job["no_probe"],
        allow_faults=job["allow_faults"],
        env=tuple(variables),
        is_beside=job["is_beside"],
    )
    if job["rehearses"]:
        print_line("rankdeck: a rehearsal on the CPU: cuda is the CPU, nccl is gloo (rankdeck help rehearsal)")
    before = click.get_current_context().meta[TYPED][: -len(job["command"])]
    if note := own_options_text(command, [word for word in before if word != "--"]):
        print_line(f"rankdeck: {note}")
    try:
        _start_and_watch(wanted.with_workdirs(job["workdir"]), request, **job)
    except AgentRefusedError as error:
        if error.reason in {"no_script", "no_workdir"} and (slip := _slip(wanted, job["workdir"], command)):
            error.hint = "; ".join([slip, *error.hint.split("; ")[1:]])  # what has become of other hosts stays
        raise


def _slip(wanted: HostsWanted, workdir: str, command: Sequence[str]) -> str:
    """Return what was typed amiss where a host lacks the program: a `~` for this shell, or a host; empty if neither."""
    home, program = expanded("~"), command[0]
    if THIS_MACHINE not in wanted.names and len(home.parts) > 1 and Path(workdir).is_relative_to(home):
        there = Path("~") / Path(workdir).relative_to(home)
        return f"if ~ was typed, this shell has expanded it; quote it: --workdir {shlex.quote(clean(str(there)))}"
    is_before_program = any(word == "-m" or word.endswith(".py") for word in command[1:])
    if wanted.is_named and is_before_program and not program.endswith(".py") and "/" not in program:
        return f"if {clean(program)} is a host: --host {clean(program)}, one --host for each"
    return ""


@click.command()
@_starts
@click.argument("name", metavar="[JOB]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def start(*, wanted: HostsWanted, name: str | None, arguments: tuple[str, ...], **job: Any) -> None:
    """Start a job of rankdeck.toml, and watch it.

    ARGUMENTS come behind its own: `start gpt -- --lr 1e-4`. Without a name it lists the jobs.
    """
    if click.get_current_context().params.get(NO_FILES_PARAMETER):
        raise UsageError("jobs are those of rankdeck.toml, which is left out", "rankdeck run starts any program")
    jobs = {entry.name: entry for entry in load_inventory().jobs}
    if name is None:
        _print_jobs(jobs, is_json=job["is_json"])
        return
    if name not in jobs:
        near = nearest_text(name, list(jobs))
        there = f"; those there: {', '.join(jobs)}{near}" if jobs else ""
        todo = f"write [job.{clean(name)}] with its command; one that has run before: rankdeck restart {clean(name)}"
        raise UsageError(f"rankdeck.toml has no job {clean(name)}{there}", todo)
    entry = jobs[name]
    request = RunRequest(
        command=check_command((*entry.command, *arguments)),
        job_id=entry.name,
        num_ranks=entry.num_ranks,
        python=entry.python,
        master_addr=entry.master_addr,
        max_restarts=entry.max_restarts,
        abandon_s=entry.abandon_s,
        shares_gpus=entry.shares_gpus,
        metrics=entry.metrics,
        is_probed=entry.is_probed,
        allow_faults=entry.allow_faults,
        env=entry.env,
        grace_s=entry.grace_s,
        save_s=entry.save_s,
        is_beside=job["is_beside"],
    )
    _start_and_watch(wanted.narrowed(entry.hosts).with_workdirs(entry.workdir), request, **job)


def _start_and_watch(wanted: HostsWanted, request: RunRequest, *, is_json: bool, **how: Any) -> None:
    """Start a job and watch it; where others run on its hosts, ask first, or refuse where nobody can be asked."""
    made: list[RemoteSession] = []
    try:
        _start_and_watch_alone(wanted, request, made, is_json=is_json, **how)
    except HostsBusyError as error:
        if is_json or not agrees_to_share(request.job_id, error):
            raise
        if made and how["recording"] is not None:
            how["recording"].unlink(missing_ok=True)  # the session began it, and it holds nothing of this job
        beside = msgspec.structs.replace(request, is_beside=True)
        _start_and_watch_alone(wanted, beside, [], is_json=is_json, **how)


def _start_and_watch_alone(
    wanted: HostsWanted,
    request: RunRequest,
    made: list[RemoteSession],
    *,
    is_json: bool,
    headless: bool,
    detach: bool,
    **how: Any,
) -> None:
    if detach and how["recording"] is not None:
        raise click.UsageError("--detach leaves, so there is nothing to --record")
    if request.max_restarts and len(wanted.entries) > 1:
        again = f"rankdeck restart {request.job_id}"
        todo = f"leave max_restarts at 0; what is left of it when it fails is ended, and then: {again}"
        raise UsageError("a job over several hosts is not restarted by itself", todo)
    options = session_options(**{name: how[name] for name in SESSION_OPTIONS})
    new: list[str] = []

    def bring_up(link: AgentLink) -> None:
        if (place := link.bring_up()).is_new:
            new.append(link.host)
            options.audit.add(AuditedAction("up", (link.host,)), f"the agent on {link.host} is up (pid {place.pid})")

    def look(hosts: Hosts, notify: Callable[[str, Step], None]) -> None:
        for link in hosts.links:
            if link.place is not None and link.place.is_new:
                print_line(f"rankdeck: the agent on {link.host} is up (pid {link.place.pid})")
        print_trouble(options.audit)
        if len(hosts.links) > 1 and not how["skips_doctor"]:
            _look_first(hosts, request, notify)

    is_screen = is_terminal() and not (headless or detach or is_json)
    make = functools.partial(_session, request, options, made, is_screen=is_screen)
    job = Watch(bring_up, needs_all=True, look=look, make=make)
    with hinting_at_new_agents(wanted, new, made):
        if not detach:
            watch(wanted, job, how["settings"], is_json=is_json, is_headless=headless)
        with looked_at(wanted, job) as hosts:
            _start_and_leave(job.make(hosts), hosts, request.job_id, is_json=is_json)


def _session(
    request: RunRequest, options: SessionOptions, made: list[RemoteSession], hosts: Hosts, *, is_screen: bool = False
) -> RemoteSession:
    if len(hosts.links) == 1 and isinstance(hosts.links[0], LocalLink):  # other hosts have variables of their own
        request = _of_this_shell(request, hosts.links[0])
    made.append(session := RemoteSession(hosts, request, options))
    if (note := own_options_text(request.command)) and is_screen:
        session.take_notices([note])
    return session


def _of_this_shell(request: RunRequest, link: LocalLink) -> RunRequest:
    """Return a request with what this shell has, and the agent of this machine, of another shell, has not."""
    if "/" in request.python and not request.python.startswith("~"):
        request = msgspec.structs.replace(request, python=str(Path(request.python).absolute()))
    if link.place is None or link.place.is_new:
        return request
    variables = own_variables(os.environ, link.agent_environ())
    if names := sorted(variables.keys() - dict(request.env).keys()):
        named = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
        print_line(f"rankdeck: the agent was started from another shell; the job gets from this one: {named}")
    return msgspec.structs.replace(request, env=(*variables.items(), *request.env))


def _start_and_leave(session: RemoteSession, hosts: Hosts, job_id: str, *, is_json: bool) -> None:
    asyncio.run(_start(session))
    if is_json:
        print_json({"hosts": hosts.names, "job_id": job_id})
    else:
        click.echo(job_id)
    print_line(session.farewell())


async def _start(session: RemoteSession) -> None:
    try:
        await with_progress(session.start(), session)
    except asyncio.CancelledError:
        print_line(f"rankdeck: {session.farewell().removeprefix('rankdeck: ') or session.leaving}")
        raise
    finally:
        await session.close()
        print_trouble(session.audit)


def _look_first(hosts: Hosts, request: RunRequest, notify: Callable[[str, Step], None]) -> None:
    """Return if several hosts are fit for a job together.

    Raises:
        HostsBusyError: Other jobs run there.
        AppError: The hosts are not fit; each problem was printed.
    """
    if not all(link.runs_programs for link in hosts.links):
        print_line("rankdeck: nodes behind a relay are not examined; each tries the way to the first one")
        return
    workdirs = [entry.workdir for entry in hosts.entries]
    links = [*zip(hosts.links, workdirs, strict=True)]
    reports = refuse_before_examining(links, request.job_id, request.command)
    check_room(request.job_id, reports, is_beside=request.is_beside)
    found = preflight([*zip(wanted_of(hosts, request), hosts.links, strict=True)], notify=notify)
    if request.master_addr:
        found = found.without("reach")  # the job uses another address than was tried; its nodes will try that one
    for problem in found.problems:
        print_line(f"rankdeck: {problem}")
    if found.exit_code:
        things = "thing is" if len(found.problems) == 1 else "things are"
        hint = "rankdeck doctor shows more; --no-doctor starts all the same"
        failure = AppError(f"{len(found.problems)} {things} in the way of job {request.job_id}", hint)
        failure.exit_code = found.exit_code
        raise failure


def _print_jobs(jobs: dict[str, JobEntry], *, is_json: bool) -> None:
    if not jobs:
        raise UsageError("there is no job in rankdeck.toml", "write [job.NAME] with its command, or: rankdeck run")
    if is_json:
        print_json({"jobs": [{"name": name, "command": [*entry.command]} for name, entry in jobs.items()]})
        return
    width = max(len(name) for name in jobs)
    for name, entry in jobs.items():
        click.echo(f"{name:<{width}}  {clean(' '.join(entry.command), LINE_LIMIT)}")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not is_variable(name):
        raise UsageError(f"--env {clean(name)}: that is no name of a variable", "as NAME=VALUE, or NAME alone")
    if not equals and name not in os.environ:
        raise UsageError(f"--env {name}: there is no such variable here", "give its value: NAME=VALUE")
    value = value if equals else os.environ[name]
    check_utf8(value)
    return name, value


@click.command()
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
    """Train a small GPT on this machine, and watch it.

    Two private agents stand for two nodes; nothing is left behind.
    """
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
