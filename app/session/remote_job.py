"""Turns a user's run request into each node's job spec: ranks, attempt and master address.

Pure.

`job_specs` gives each node its part of a job. `even_split`, `next_split` and `next_attempt` decide which ranks each
node gets, in a job and in its next attempt.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.codec import LOSS_METRIC
from agent.wire.commands import PrepareAgain
from agent.wire.jobs import ENDED_STATES, MAX_PATTERN_CHARS, MAX_PATTERNS, JobSpec, JobState
from app.errors import HostsBusyError, UsageError
from app.inventory.jobs import is_variable
from app.inventory.program import is_utf8
from app.settings.keys import nearest_text
from app.ssh.config import LOOPBACK
from app.text import NAME_LIMIT, attempt_text, clean, clean_name, nodes_text, seconds_text
from app.view.actions import max_ranks
from ddpcore.wire_launch import is_of_launcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import NodeReport
    from app.fleet.agent_link import AgentPlace
    from app.inventory.inventory import HostEntry


class RunRequest(msgspec.Struct, frozen=True):
    """A job to run."""

    command: tuple[str, ...]
    """`train.py ...` or `-m pkg.train ...`, as after torchrun's own options."""
    job_id: str
    num_ranks: int | None = None
    """Ranks of each node; None is the inventory's number, else one a GPU, without GPUs one for every two cores."""
    nproc: str = ""
    """What torchrun would count on each node instead: `gpu`, `cpu` or `auto`; empty for `num_ranks`."""
    python: str = ""
    """Python of the job; empty is the agent's own. May begin with `~/`."""
    workdir: str = ""
    """Working directory; empty is the inventory's, else the home."""
    master_addr: str = ""
    """Address under which the other hosts reach the first one; empty tries those that it has."""
    max_restarts: int = 0
    abandon_s: float = 0.0
    """Seconds for which ranks may hang while no console watches; 0 is for ever."""
    shares_gpus: bool = False
    """Allows more ranks than GPUs."""
    metrics: tuple[str, ...] = ()
    """Patterns that find metrics in the output of the ranks."""
    is_probed: bool = True
    allow_faults: bool = False
    """Allows faults to be injected into its ranks."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables added to those of the agents."""
    grace_s: float | None = None
    """Seconds between SIGTERM and SIGKILL; None is the agent's default, as for `save_s`."""
    save_s: float | None = None
    """Seconds for a step and a checkpoint before SIGTERM."""
    is_beside: bool = False
    """Whether it may share its hosts with other jobs."""


def check_metrics(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns for metrics in log lines; the agent checks whether they are valid.

    Raises:
        UsageError: They are too many or too long, or one has no group.
    """
    if len(patterns) > MAX_PATTERNS or any(not 0 < len(text) <= MAX_PATTERN_CHARS for text in patterns):
        raise UsageError(f"at most {MAX_PATTERNS} patterns of at most {MAX_PATTERN_CHARS} characters are taken")
    for text in patterns:
        if not _GROUP.search(_ESCAPED.sub("", text)):
            shown = clean(text, NAME_LIMIT)
            todo = f"put what is to be read in a group, as in '{shown} ([0-9.]+)'"
            raise UsageError(f"--metric '{shown}' finds no value: {todo}")
    return patterns


_ESCAPED = re.compile(r"\\.", re.DOTALL)
_GROUP = re.compile(r"\((?!\?)|\(\?P?<")
_GROUP_NAME = re.compile(r"\(\?P?<(\w+)>")
_NO_NAME = re.compile(r"(?<!\\)\((?!\?)")


def has_loss_pattern(patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns for metrics finds the loss; see `agent.wire.jobs.JobSpec.metrics`."""
    return any(
        LOSS_METRIC in _GROUP_NAME.findall(pattern) or len(_NO_NAME.findall(pattern)) == 1 for pattern in patterns
    )


def unknown_job_text(job_id: str, known: Sequence[str], asked: Sequence[str], away: Sequence[str] = ()) -> str:
    """Return the text for an unknown job: the known jobs, the nearest name, and the nodes that cannot be asked."""
    there = f"those there: {', '.join(known)}" if known else "none is there"
    unasked = f"; {nodes_text(away)} cannot be asked" if away else ""
    return f"there is no job {job_id} on {nodes_text(asked)}; {there}{nearest_text(job_id, known)}{unasked}"


def running_jobs(reports: Mapping[str, NodeReport]) -> list[str]:
    """Return the ids of the jobs that run on any of some nodes, each once."""
    jobs = (job for report in reports.values() for job in report.jobs)
    return list(dict.fromkeys(clean_name(job.job_id) for job in jobs if job.state not in ENDED_STATES))


def check_room(job_id: str, reports: Mapping[str, NodeReport], *, is_beside: bool) -> None:
    """Return if a job has its hosts for itself, runs there already, or may share them.

    Raises:
        HostsBusyError: Other jobs run there.
    """
    running = running_jobs(reports)
    if not running or is_beside or job_id in running:
        return
    text = "; ".join(f"job {other} runs on {nodes_text(_nodes_of(other, reports))}" for other in running)
    raise HostsBusyError(text, f"--beside starts {job_id} there too; rankdeck stop {running[0]} ends the other")


def _nodes_of(job_id: str, reports: Mapping[str, NodeReport]) -> list[str]:
    return [node for node, report in reports.items() if job_id in running_jobs({node: report})]


WHERE_NONE_RUNS = "rankdeck run starts one; rankdeck status shows what has ended"


def ended_jobs(reports: Mapping[str, NodeReport]) -> list[str]:
    """Return the ids of the jobs that run on none of some nodes any more, each once."""
    running = running_jobs(reports)
    known = dict.fromkeys(clean_name(job.job_id) for report in reports.values() for job in report.jobs)
    return [job_id for job_id in known if job_id not in running]


def only_running_job(
    reports: Mapping[str, NodeReport],
    how_to_name: str = "choose one by --job",
    where_none_runs: str = WHERE_NONE_RUNS,
) -> str:
    """Return the id of the job that runs on some nodes.

    Args:
        reports: Report of each node.
        how_to_name: Hint where several run.
        where_none_runs: Hint where none does.

    Raises:
        UsageError: None does, or several do.
    """
    jobs = (job for report in reports.values() for job in report.jobs)
    begun = {clean_name(job.job_id) for job in jobs if job.state is not JobState.PREPARED}
    running, where = [job_id for job_id in running_jobs(reports) if job_id in begun], nodes_text(list(reports))
    if len(running) == 1:
        return running[0]
    if not running:
        raise UsageError(f"no job runs on {where}", where_none_runs)
    raise UsageError(f"several jobs run on {where}: {', '.join(running)}", how_to_name)


def node_of_rank(statuses: Mapping[str, JobStatus], rank: int) -> str:
    """Return the node on which a rank of a job runs.

    Raises:
        UsageError: None of them has it.
    """
    for node, status in statuses.items():
        if rank in status.own_ranks:
            return node
    raise UsageError(f"no node has rank {rank}", f"it would be on {nodes_text(list(statuses))}")


def usual_num_ranks(report: NodeReport) -> int:
    """Return how many ranks a node runs by default."""
    return len(report.gpus.gpus) or max(1, report.num_cpus // 2)


def counted_num_ranks(host: str, nproc: str, report: NodeReport) -> int:
    """Return how many ranks torchrun's `--nproc-per-node gpu`, `cpu` or `auto` stands for on a host.

    Raises:
        UsageError: The host has no GPU to count.
    """
    num_gpus = len(report.gpus.gpus)
    if nproc == "gpu" and not num_gpus:
        raise UsageError(f"--nproc-per-node gpu: {host} has no GPU", "a number, or auto: without GPUs one a core")
    return num_gpus if num_gpus and nproc != "cpu" else report.num_cpus


class JobHost(NamedTuple):
    """A host that takes part in a job.

    Attributes:
        entry: Its inventory entry.
        place: Where its agent serves.
        report: Report of its agent, after the first look at its GPUs.
    """

    entry: HostEntry
    place: AgentPlace
    report: NodeReport


def _num_ranks(request: RunRequest, host: JobHost) -> int:
    if request.nproc:
        return counted_num_ranks(host.entry.host, request.nproc, host.report)
    return request.num_ranks or host.entry.num_ranks or usual_num_ranks(host.report)


def next_number(job_id: str, reports: Iterable[NodeReport]) -> int:
    """Return the attempt number of a new start: above all that the nodes know of this job."""
    attempts = (job.attempt for report in reports for job in report.jobs if job.job_id == job_id)
    return 1 + max(attempts, default=-1)


def job_specs(
    request: RunRequest, hosts: Sequence[JobHost], master_addr: str = "", free_attempt: int = 0
) -> dict[str, JobSpec]:
    """Return the job spec of each host, the first host first.

    Args:
        request: What is to run.
        hosts: In the order in which they get their ranks.
        master_addr: Address of the first host. Ignored for a single host: its ranks meet on its loopback, which nobody
            else can reach.
        free_attempt: Lowest attempt that it may be; the hosts keep logs of those below.
    """
    patience = {name: value for name in ("grace_s", "save_s") if (value := getattr(request, name)) is not None}
    attempt = max(free_attempt, next_number(request.job_id, (host.report for host in hosts)))
    local_sizes = [_num_ranks(request, host) for host in hosts]
    return {
        host.entry.host: JobSpec(
            job_id=request.job_id,
            attempt=attempt,
            python=_python(request.python, host.place),
            command=list(request.command),
            workdir=_workdir(request.workdir or host.entry.workdir, host.place.home),
            num_nodes=len(hosts),
            node_rank=node_rank,
            local_world_size=local_sizes[node_rank],
            first_rank=sum(local_sizes[:node_rank]),
            world_size=sum(local_sizes),
            master_addr=LOOPBACK if len(hosts) == 1 else master_addr,
            max_restarts=request.max_restarts,
            abandon_s=request.abandon_s,
            shares_gpus=request.shares_gpus,
            metrics=list(request.metrics),
            is_probed=request.is_probed,
            allow_faults=request.allow_faults,
            env=dict(request.env),
            **patience,
        )
        for node_rank, host in enumerate(hosts)
    }


_OF_SHELL = re.compile(
    "_|SHLVL|PWD|OLDPWD|TERM|TERM_.*|COLORTERM|COLUMNS|LINES|WINDOWID|STY|(DBUS|SSH|TMUX|VTE|XDG|KONSOLE|GNOME).*"
)
"""Variables of a shell or a terminal, of no interest to a program."""


def own_variables(environ: Mapping[str, str], of_agent: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program gets under torchrun here, and would not get from an agent. Pure.

    Args:
        environ: The environment of whoever starts the program.
        of_agent: That of the agent, which may be of another shell, and days old.
    """
    return {
        name: value
        for name, value in environ.items()
        if of_agent.get(name) != value
        and is_variable(name)
        and not _OF_SHELL.fullmatch(name)
        and not is_of_launcher(name)
        and is_utf8(value)
    }


def _python(python: str, place: AgentPlace) -> str:
    expanded = _expanded(python, place.home)
    if "/" in expanded:
        return str(PurePosixPath(place.home, expanded))
    return expanded or place.python


def _workdir(workdir: str, home: str) -> str:
    return str(PurePosixPath(home, _expanded(workdir or "~", home)))


def _expanded(path: str, home: str) -> str:
    """Return a path of the host with a leading `~` replaced by its home."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path


def even_split(num_ranks: int, num_nodes: int) -> list[int]:
    """Return how many ranks each node gets: as even as possible, the first ones more."""
    num_local, rest = divmod(num_ranks, num_nodes)
    return [num_local + (index < rest) for index in range(num_nodes)]


def latest_status(statuses: Mapping[str, JobStatus]) -> JobStatus:
    """Return the status of a job on a node of its latest attempt; a node left out of it reports an earlier one."""
    return max(statuses.values(), key=lambda status: status.attempt)


def of_latest_attempt(statuses: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """Return the status of a job on the known nodes of its latest attempt."""
    attempt = latest_status(statuses).attempt
    return {node: status for node, status in statuses.items() if status.attempt == attempt}


STOP_MARGIN_S = 40.0
"""Seconds by which ranks that lose their stopped peers may fail before the peers' launcher has ended."""


def end_states(statuses: Mapping[str, JobStatus]) -> dict[str, JobState]:
    """Return the state of an ended job on each node; a node that failed since its peers were stopped was stopped."""
    stopped_s = [one.state_s for one in statuses.values() if one.state is JobState.STOPPED]

    def is_stopped(one: JobStatus) -> bool:
        is_victim = one.state is JobState.FAILED and one.root_cause is not None and one.root_cause.is_consequence
        return is_victim and bool(stopped_s) and one.state_s < max(stopped_s) + STOP_MARGIN_S

    return {node: JobState.STOPPED if is_stopped(one) else one.state for node, one in statuses.items()}


_ENDED_TEXTS = {
    JobState.FAILED: "failed before",
    JobState.LOST: "was lost before",
    JobState.STOPPED: "was stopped before",
    JobState.SUCCEEDED: "succeeded before",
}
"""States of an ended job on one node, the worst first, as an answer to who stops it."""


def ended_before_text(statuses: Mapping[str, JobStatus]) -> str:
    """Return `was stopped before, 12 s ago` of an ended job; without the time where a node has booted since."""
    states = set(end_states(statuses).values())
    how = next(text for state, text in _ENDED_TEXTS.items() if state in states)
    is_known = all(one.age_s is not None for one in statuses.values())
    return f"{how}, {seconds_text(min(one.state_s for one in statuses.values()))} ago" if is_known else how


def in_order(statuses: Mapping[str, JobStatus]) -> list[str]:
    """Return the nodes of a job, the one with node rank 0 first."""
    return sorted(statuses, key=lambda node: statuses[node].node_rank)


def next_split(statuses: Mapping[str, JobStatus], num_ranks: int | None, *, takes_any: bool = False) -> dict[str, int]:
    """Return how many ranks each node of a job gets in its next attempt, the one with node rank 0 first.

    Args:
        statuses: By node, whether it has ended or not.
        num_ranks: None keeps the number of each node; else they are spread evenly.
        takes_any: All nodes given form the next attempt; else those of the last one do.

    Raises:
        UsageError: A node of the last attempt is missing, or the ranks are too few or too many for the nodes.
    """
    first = latest_status(statuses)
    chosen = statuses if takes_any else of_latest_attempt(statuses)
    nodes = in_order(chosen)
    count = len(nodes)
    if count < first.num_nodes and not takes_any:
        raise UsageError(
            f"only {count} of the {first.num_nodes} nodes of job {first.job_id} can be asked",
            "name the others, or wait until they are reached; to go on without them: rankdeck restart --on-these-hosts",
        )
    local_sizes: Sequence[int] = [statuses[node].local_world_size for node in nodes]
    wanted = sum(local_sizes) if num_ranks is None else num_ranks
    if not count <= wanted <= max_ranks(count):
        where = f"job {first.job_id} runs on {count} node{'' if count == 1 else 's'}"
        wrong = "few" if wanted < count else "many"
        raise UsageError(
            f"{where}: {wanted} rank{' is' if wanted == 1 else 's are'} too {wrong}",
            f"it can have {count} to {max_ranks(count)}",
        )
    if num_ranks is not None:
        local_sizes = even_split(num_ranks, count)
    return dict(zip(nodes, local_sizes, strict=True))


def started_text(spec: JobSpec, hosts: str) -> str:
    """Return that a job has started on `hosts`, which are named clean; a name that is used again counts on."""
    ranks = f"{spec.world_size} rank{'' if spec.world_size == 1 else 's'}"
    again = f" ({attempt_text(spec.attempt)}: a job of this name ran there before)" if spec.attempt else ""
    return f"job {spec.job_id} started on {hosts} with {ranks}{again}"


def next_attempt(
    statuses: Mapping[str, JobStatus], num_ranks: int | None, meet_at: str | None = None, free_attempt: int = 0
) -> dict[str, PrepareAgain]:
    """Return the prepare command for each node of an ended job, the one with node rank 0 first.

    Args:
        statuses: By node.
        num_ranks: None keeps the number of each node; else they are spread evenly.
        meet_at: None keeps the nodes of the last attempt. Else all nodes given form the next one, and reach the first
            of them at this address; empty is where they met before.
        free_attempt: Lowest attempt that it may be; the nodes keep logs of those below.

    Raises:
        UsageError: The job still runs, or see `next_split`.
    """
    job_id = next(iter(statuses.values())).job_id
    local_sizes = next_split(statuses, num_ranks, takes_any=meet_at is not None)
    if any(statuses[node].state not in ENDED_STATES for node in local_sizes):
        raise UsageError(f"job {job_id} has not ended", f"rankdeck stop {job_id}")
    attempt = max(free_attempt, 1 + latest_status(statuses).attempt)
    commands, first_rank = {}, 0
    for node_rank, (node, num_local) in enumerate(local_sizes.items()):
        command = PrepareAgain(job_id, attempt, first_rank, num_local, sum(local_sizes.values()))
        if meet_at is not None:
            command = msgspec.structs.replace(command, num_nodes=len(local_sizes), node_rank=node_rank)
        if meet_at:
            command = msgspec.structs.replace(command, master_addr=meet_at, master_port=0)
        commands[node] = command
        first_rank += num_local
    return commands
