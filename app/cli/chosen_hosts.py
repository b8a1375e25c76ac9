"""Which hosts a command names, and one action on all of them.

`HostsWanted` and `reached`: how a command names the hosts of a job, and connects to all of them in parallel. Hosts
that cannot be reached are reported.

`on_each` and `print_each`: one action on many hosts in parallel; answers are printed in the order of the hosts, each
as soon as it is known.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import socket
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import click
import msgspec

from agent.wire.slurm import slurm_step
from app.cli.headless import print_line, quiet_after, waiting_for
from app.cli.inventory_file import load_inventory, named_hosts
from app.cli.options import (
    RelayWay,
    audit_log,
    exclude_option,
    link_by,
    named_python,
    on_screen,
    present,
    print_json,
    print_trouble,
    question_desk,
    reaches,
    relay_inventory,
    relay_options,
    relayed_hosts,
    through_relay,
)
from app.cli.presenting import is_terminal, show_session
from app.cli.settings_options import NO_FILES_PARAMETER
from app.errors import AppError, ExitCode, NoAgentError, UsageError
from app.fleet.agent_link import LinkGroup
from app.inventory.inventory import NO_RELAY, HostEntry, Inventory, is_meant
from app.model.new_nodes import NewNodes
from app.paths import make_room_for_nodes
from app.preflight.findings import HostStep
from app.session.audit import AuditedAction
from app.session.control import workdir_on
from app.session.hosts import Hosts
from app.session.opening import Opening, OpeningProgress
from app.slurm.client import slurm_hostnames, slurm_job, slurm_job_hosts, why_ending, why_unreachable
from app.slurm.node_watch import NodeWatch
from app.slurm.own_step import await_nodes, become_agent, refuse_several_tasks, relay_directory, serving
from app.ssh.config import THIS_MACHINE
from app.text import LINE_LIMIT, clean, nodes_text
from app.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from agent.wire.slurm import SlurmStep
    from app.fleet.agent_link import AgentLink
    from app.fleet.relay_hub import RelayHub
    from app.preflight.findings import Step
    from app.session.remote_session import RemoteSession
    from app.settings.schema import Settings
    from app.ssh.questions import QuestionDesk

_choice_options = (
    click.option(
        "--host",
        "names",
        multiple=True,
        help="An alias of ~/.ssh/config, user@host, user@host:port, a pattern of the inventory, or "
        f"{THIS_MACHINE}: this machine, without SSH; may come again [all of the inventory, without one this machine]",
    ),
    exclude_option,
)


class HostsWanted(NamedTuple):
    """The hosts that a command line chooses.

    Attributes:
        entries: The hosts with their entries of the inventory.
        typed: The options that chose them, as typed.
        is_named: Whether hosts were typed, not only exclusions.
        include: Patterns of hosts to take; empty takes all.
        exclude: Patterns of hosts to leave out.
        python: The Python, as typed or from the environment.
        named_python: The Python, as typed; empty when none was typed.
        ssh_config: File read instead of ~/.ssh/config.
        hub: The relay whose nodes the hosts are; None when SSH goes to each.
        slurm: Id of the Slurm job whose nodes the hosts are; empty when they are of none.
    """

    entries: tuple[HostEntry, ...]
    typed: str
    is_named: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    python: str
    named_python: str
    ssh_config: str
    hub: RelayHub | None = None
    slurm: str = ""

    def with_workdirs(self, workdir: str) -> HostsWanted:
        """Return the hosts with their working directories: `workdir` on all, or each host's own where it is empty."""
        entries = (
            msgspec.structs.replace(entry, workdir=workdir_on(entry.host, workdir or entry.workdir))
            for entry in self.entries
        )
        return self._replace(entries=tuple(entries))

    def narrowed(self, patterns: tuple[str, ...]) -> HostsWanted:
        """Return the hosts that match any pattern; all of them when they were named one by one.

        Raises:
            UsageError: A pattern matches no host.
        """
        if not patterns or self.is_named:
            return self
        typed = " ".join(filter(None, [shlex.join(_repeated("--host", patterns)), self.typed]))
        inventory = load_inventory() if self.hub is None else load_inventory().behind_relay(self.hub.nodes)
        return self._replace(entries=inventory.chosen(patterns, self.exclude), include=patterns, typed=typed)

    @property
    def names(self) -> list[str]:
        """Names of the hosts, as the user types them."""
        return [entry.host for entry in self.entries]


def takes_hosts(
    command: Callable[..., None], *, starts: bool = False, is_control: bool = False, goes_to_each: bool = False
) -> Callable[..., None]:
    """Add the options that choose hosts and how they are reached; the command gets the result as `wanted`.

    Args:
        command: The command.
        starts: Whether it starts a job: in a Slurm step, which names its hosts, every task of the step calls it.
        is_control: Whether it acts on a job that runs: where no agent serves, a new one would know of none.
        goes_to_each: Whether it goes to each host by SSH, also to those of a Slurm job.
    """

    @functools.wraps(command)
    def with_hosts(
        *, names: tuple[str, ...], exclude: tuple[str, ...], relay: str, relay_dir: str, slurm: str, **how: Any
    ) -> None:
        names = names or _own_host(how, relay or relay_dir or slurm)
        chosen = (("--slurm", [slurm]), ("--relay", [relay]), ("--relay-dir", [relay_dir]))
        arguments = [argument for option, values in chosen for argument in _repeated(option, filter(None, values))]
        arguments += [*_repeated("--host", names), *_repeated("--exclude", exclude)]
        python, ssh_config = how.pop("python"), how.pop("ssh_config")
        arguments += _repeated("--python", filter(None, [named_python(python)]))
        typed = shlex.join(arguments)
        has_no_files = bool(click.get_current_context().params.get(NO_FILES_PARAMETER))
        wanted = HostsWanted((), typed, bool(names), names, exclude, python, named_python(python), ssh_config)
        with ExitStack() as stack:
            step = _own_step() if starts and not (names or relay or slurm) else None
            way = RelayWay(relay, relay_dir, python)
            if step is not None:
                way = way._replace(host=THIS_MACHINE, directory=_serving(step, stack))
            elif slurm and goes_to_each:
                names, way = names or tuple(slurm_job_hosts(slurm)), way._replace(host=NO_RELAY)
            elif slurm:
                way, slurm = _way_to_relay_of(slurm, way)
            inventory = relay_inventory(way.host, way.directory, has_no_files=has_no_files)
            if inventory is None:
                known = Inventory() if has_no_files else load_inventory()
                entries = named_hosts(names, exclude, known)
                if starts and not names and not known.hosts:
                    print_line("rankdeck: on this machine (no rankdeck.toml names a host; --host does)")
                with _hinting(is_chosen=bool(names or known.hosts or has_no_files), is_control=is_control):
                    command(wanted=wanted._replace(entries=entries), **how)
                return
            hub = stack.enter_context(through_relay(inventory, way, wanted.named_python, ssh_config))
            stack.callback(_print_why_ending, slurm)
            if step is not None:
                await_nodes(hub, step, lambda sentence: print_line(f"rankdeck: {sentence}"))
            entries = relayed_hosts(inventory, hub, names, exclude)
            if step is not None:
                entries = tuple(msgspec.structs.replace(entry, workdir=str(Path.cwd())) for entry in entries)
            job_id = slurm or (step.job_id if step is not None else "")
            command(wanted=wanted._replace(entries=entries, hub=hub, slurm=job_id), **how)

    wrapped = reaches(with_hosts)
    for option in reversed((*_choice_options, *relay_options)):
        wrapped = option(wrapped)
    return wrapped


@contextmanager
def _hinting(*, is_chosen: bool, is_control: bool) -> Iterator[None]:
    """Add to the hint of an error of a missing agent that no inventory names a host, unless the hosts were chosen."""
    nowhere = "no rankdeck.toml here or above names a host"
    try:
        yield
    except NoAgentError as error:
        if not is_chosen:
            where = f"{nowhere}: run this where one does, or name the hosts of the job by --host"
            error.hint = where if is_control else f"{error.hint}; {nowhere}, --host does"
        raise


@contextmanager
def hinting_at_new_agents(wanted: HostsWanted, new: Sequence[str], sessions: Sequence[RemoteSession]) -> Iterator[None]:
    """Add to the hint of an error which agents a command has started: they stay, since others may use them by now.

    Args:
        wanted: The hosts of the command.
        new: The hosts whose agents it has started, once that is known.
        sessions: Those that it has made, once it has: where a job of one may run, nothing is added.
    """
    try:
        yield
    except AppError as error:
        if new and not any(session.farewell() for session in sessions):
            hosts = [host for host in wanted.names if host in new]
            named = [] if hosts == wanted.names and not wanted.typed else hosts
            python = _repeated("--python", filter(None, [wanted.named_python]))
            command = clean(shlex.join(["rankdeck", "down", *named, *python]), LINE_LIMIT)
            stays = f"this command has started the agent on {nodes_text(hosts)}, and leaves it running: {command}"
            error.hint = "; ".join(filter(None, [error.hint, stays]))
        raise


def _own_host(how: Mapping[str, Any], way: str) -> tuple[str, ...]:
    """Return this machine for a rehearsal that names no way to others; nothing for any other command."""
    return (THIS_MACHINE,) if how.get("rehearses") and not way else ()


def _own_step() -> SlurmStep | None:
    """Return the Slurm step that this process is a task of; None in a shell of one, whose user sees a console."""
    step = slurm_step(os.environ)
    return None if step is None or (step.num_tasks == 1 and is_terminal()) else step


def _serving(step: SlurmStep, stack: ExitStack) -> str:
    """Return the relay's directory in a Slurm step's first task; any other becomes its node's agent, and never returns.

    Raises:
        UsageError: There are several tasks on a node.
        SessionError: See `serving`.
    """
    refuse_several_tasks(step)
    if step.task:
        become_agent(step)
    return stack.enter_context(serving(step, lambda sentence: print_line(f"rankdeck: {sentence}")))


def _way_to_relay_of(slurm: str, way: RelayWay) -> tuple[RelayWay, str]:
    """Return the way to a Slurm job's relay, and the number by which its steps know it.

    Args:
        slurm: The job, as typed.
        way: As typed.

    Raises:
        UsageError: A relay was named besides, the job has no nodes now, or it is several.
        SessionError: Slurm is not here.
    """
    if way.host or way.directory:
        raise UsageError("--slurm and --relay contradict each other", "leave --relay out")
    job = slurm_job(slurm)
    first = slurm_hostnames(job.nodes)[0]
    # The nodes of a cluster share the files of this one.
    python = way.python if named_python(way.python) or "RANKDECK_PYTHON" in os.environ else sys.executable
    host = THIS_MACHINE if first == socket.gethostname() else first
    why_gone = functools.partial(why_unreachable, job, host, first)
    return RelayWay(host, relay_directory(job.step_id), python, why_gone), job.step_id


def _print_why_ending(slurm: str) -> None:
    """Print why Slurm ends the job whose nodes a command has used, where it does and that is known."""
    if slurm and (sentence := why_ending(slurm)):
        print_line(f"rankdeck: {sentence}")


def link(wanted: HostsWanted, group: LinkGroup) -> None:
    """Add a link to each host to the group, not yet connected."""
    make_room_for_nodes(len(wanted.entries))
    for number, entry in enumerate(wanted.entries):
        group.add(_link_to(entry, number, wanted))


def reach(wanted: HostsWanted, group: LinkGroup, away: Mapping[str, AppError], *, needs_all: bool) -> Hosts:
    """Return the hosts whose links are in the group, without those that are `away` and stay so; see `reached`."""
    _print_unreachable(away, wanted, is_in_the_way=needs_all or len(away) == len(group.links))
    there = [(link, entry) for link, entry in zip(group.links, wanted.entries, strict=True) if link.is_somewhere]
    still_away = {link.host: away[link.host] for link, _ in there if link.host in away}
    links, entries = tuple(link for link, _ in there), tuple(entry for _, entry in there)
    news = NodeWatch(wanted.slurm).news if wanted.slurm else tuple
    return Hosts(links, entries, wanted.typed, still_away, _new_nodes(wanted), news)


@contextmanager
def reached(wanted: HostsWanted, then: Callable[[AgentLink], object], *, needs_all: bool) -> Iterator[Hosts]:
    """Yield the connected hosts; the `with` block's end disconnects them.

    Args:
        wanted: The hosts.
        then: Called for each connected host: `AgentLink.find` or `bring_up`.
        needs_all: Whether an unreachable host ends the command; else it is reported while another is reachable.

    Raises:
        AppError: The only host is unreachable; errors of several hosts are printed before.
    """
    with LinkGroup() as group:
        link(wanted, group)
        progress = OpeningProgress(wanted.names)
        with waiting_for(lambda: progress.text):
            hosts = reach(wanted, group, progress.connect(group, then), needs_all=needs_all)
        yield hosts


@contextmanager
def looked_at(wanted: HostsWanted, job: Watch) -> Iterator[Hosts]:
    """Yield the connected hosts once they are looked at; who interrupts that reads that no job was started."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(reached(wanted, job.then, needs_all=job.needs_all))
            progress = OpeningProgress(hosts.names)
            steps: list[Step] = []

            def notify(host: str, step: Step) -> None:
                if not steps:
                    print_line(f"rankdeck: looking at {nodes_text(hosts.names)} first")
                steps.append(step)
                progress.move(host, step)

            with waiting_for(lambda: progress.text):
                job.look(hosts, notify)
        except KeyboardInterrupt:
            print_line("rankdeck: no job was started")
            raise
        yield hosts


class Watch(NamedTuple):
    """A job on some hosts that is to be watched.

    Attributes:
        then: Called for each connected host, as in `reached`.
        needs_all: Whether an unreachable host ends the command, as in `reached`.
        look: Checks the hosts before the session is made; its second argument is called with each host's step.
        make: Makes the session.
    """

    then: Callable[[AgentLink], object]
    needs_all: bool
    look: Callable[[Hosts, Callable[[str, Step], None]], None]
    make: Callable[[Hosts], RemoteSession]


def watch(wanted: HostsWanted, job: Watch, settings: Settings, *, is_json: bool, is_headless: bool) -> NoReturn:
    """Watch a job, and exit with its code; the console opens before the hosts are connected."""
    if is_headless or is_json or not is_terminal():
        with looked_at(wanted, job) as hosts:
            present(job.make(hosts), settings, is_json=is_json, is_headless=is_headless)
    with LinkGroup() as group:

        def begin() -> QuestionDesk | None:
            link(wanted, group)
            return question_desk() if any(entry.host != THIS_MACHINE for entry in wanted.entries) else None

        def go(progress: OpeningProgress) -> Hosts:
            with quiet_after(lambda: opening.is_left):
                hosts = reach(wanted, group, progress.connect(group, job.then), needs_all=job.needs_all)
                job.look(hosts, progress.move)
                return hosts

        opening = Opening(wanted.names, begin, go, lambda hosts: on_screen(job.make(hosts)))
        raise SystemExit(asyncio.run(show_session(opening, settings.console)))


def _new_nodes(wanted: HostsWanted) -> Callable[[], NewNodes]:
    """Return a function that returns the wanted nodes that came to a relay since the hosts were chosen."""
    hub, known = wanted.hub, frozenset(wanted.names)
    if hub is None:
        return NewNodes
    new_nodes, num_changes = NewNodes(), -1

    def look() -> NewNodes:
        nonlocal new_nodes, num_changes
        if hub.num_changes != num_changes:
            num_changes = hub.num_changes
            here = (node for node in hub.nodes if (entry := hub.entry(node)) is not None and entry.is_here)
            meant = (node for node in here if is_meant(HostEntry(node), wanted.include, wanted.exclude))
            new_nodes = NewNodes(hub.host, tuple(node for node in meant if node not in known))
        return new_nodes

    return look


def _link_to(entry: HostEntry, number: int, wanted: HostsWanted) -> AgentLink:
    if wanted.hub is None:
        return link_by(entry.host, wanted.named_python, entry.python, wanted.python, wanted.ssh_config)
    from app.fleet.relayed_link import RelayedLink  # noqa: PLC0415 - only who goes through one pays for paramiko

    return RelayedLink(entry.host, wanted.hub, number)


def _print_unreachable(away: Mapping[str, AppError], wanted: HostsWanted, *, is_in_the_way: bool) -> None:
    if not away:
        return
    first = next(iter(away.values()))
    if len(wanted.entries) == 1:
        raise first
    has_no_agents = wanted.hub is None and all(isinstance(error, NoAgentError) for error in away.values())
    if is_in_the_way and has_no_agents and not wanted.typed:
        none = f"{NoAgentError.head.format(nodes_text([*away]))}nothing is known of jobs there"
        failure = AppError(none, "start them: rankdeck up")
        failure.exit_code = first.exit_code
        raise failure
    for error in away.values():
        print_line(f"rankdeck: {error.whole}")
    if is_in_the_way:
        failure = AppError(f"{len(away)} of {len(wanted.entries)} hosts cannot take part", "or do without: --exclude")
        failure.exit_code = first.exit_code
        raise failure
    print_line(f"rankdeck: going on without {len(away)} of {len(wanted.entries)} hosts")


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


Answer = TypeVar("Answer")


def on_each(
    hosts: Sequence[HostEntry], python: str, ssh_config: str, do: Callable[[AgentLink], Answer]
) -> Iterator[tuple[str, Answer | AppError]]:
    """Yield each host and what `do` returned or raised for it; an error stops no other host.

    Args:
        hosts: The hosts; a limited number run at the same time.
        python: The Python of hosts whose inventory entry names none.
        ssh_config: File read instead of ~/.ssh/config.
        do: Called in a thread, with a connected link.
    """
    named = named_python(python)
    progress = OpeningProgress([entry.host for entry in hosts])

    def visit(entry: HostEntry) -> Answer:
        try:
            with link_by(entry.host, named, entry.python, python, ssh_config) as link:
                link.connect()
                return do(link)  # yielded after the link has closed: the command may end with the last answer
        finally:
            progress.move(entry.host, HostStep.READY)

    answers = run_parallel(hosts, visit)
    for entry in hosts:
        with waiting_for(lambda: progress.text):
            answer = next(answers)
        yield entry.host, answer


def print_each(
    answers: Iterator[tuple[str, Answer | AppError]],
    result_of: Callable[[str, Answer], tuple[str, Mapping[str, Any]]],
    action: str,
    *,
    is_json: bool,
) -> ExitCode:
    """Print a line a host, or one JSON object, and log it for audit; return the exit code of the first failed host.

    Args:
        answers: The pairs that `on_each` yields.
        result_of: Returns the sentence and the JSON fields of a host's answer.
        action: The name of the action, for the audit log.
        is_json: Whether to print one JSON object.
    """
    code = ExitCode.WELL
    rows: list[dict[str, Any]] = []
    audit = audit_log()
    for host, answer in answers:
        if isinstance(answer, AppError):
            code = code or ExitCode(answer.exit_code)
            rows.append({"host": host, "error": str(answer), "hint": answer.hint})
            print_line(f"rankdeck: {answer.whole}")
            audit.add(AuditedAction(action, (host,)), answer.whole, is_done=False)
            continue
        sentence, fields = result_of(host, answer)
        audit.add(AuditedAction(action, (host,)), sentence)
        rows.append({"host": host, "error": None, "hint": "", **fields})
        if not is_json:
            click.echo(sentence)
    if is_json:
        print_json({"hosts": rows})
    print_trouble(audit)
    return code
