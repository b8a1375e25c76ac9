"""What somebody who has typed `rankdeck` alone can do here: a pure function of what is there."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from app.errors import UsageError
from app.inventory.inventory import NO_RELAY, Inventory
from app.program import run_argv
from app.safe_text import LINE_LIMIT, clean
from app.ssh.config import THIS_MACHINE, parse_destination
from app.words import bytes_text, nodes_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.inventory.jobs import JobEntry
    from app.program import Program

MAX_ROWS = 200
"""Of a list that is narrowed by typing."""
MAX_NAMED_JOBS = 3
"""In a sentence that says which there are."""


class KeptFile(msgspec.Struct, frozen=True):
    """A file that `rankdeck replay` can show."""

    path: str
    age_s: float
    size_bytes: int


class StartFacts(msgspec.Struct, frozen=True):
    """What is there to begin with."""

    home: str
    has_torch: bool
    """For the interpreter that runs this."""
    python: str
    """That interpreter."""
    config_file: str
    """Of ssh, as a person writes it."""
    hosts: tuple[str, ...] | None
    """That it names; None where it cannot be read."""
    evidence_dir: str
    kept: tuple[KeptFile, ...] = ()
    """Evidence there, the newest first."""
    inventory: Inventory = Inventory()
    """The cluster of this directory, and its jobs."""
    inventory_file: str = ""
    """Which says so, as a person writes it; empty where there is none."""
    inventory_trouble: str = ""
    """What is wrong with it; empty where nothing is."""
    settings: tuple[str, ...] = ()
    """Options for settings that were typed; they hold for what is chosen, too."""
    has_no_files: bool = False
    """Whether files of settings and hosts are left out, as was typed."""

    @property
    def has_cluster(self) -> bool:
        """Whether there is an inventory with hosts, or with a relay that knows them."""
        return bool(self.inventory.hosts or self.inventory.relay)

    @property
    def hosts_of_cluster(self) -> list[str]:
        """The hosts of the inventory, in its order."""
        return [entry.host for entry in self.inventory.hosts]

    def argv(self, verb: str, *words: str) -> tuple[str, ...]:
        """Return the arguments of `rankdeck` for a command that takes settings."""
        return (verb, *self.settings, *words)

    def way_to(self, host: str) -> tuple[str, ...]:
        """Return the options for a host that is named alone: one that the inventory's relay knows goes through that."""
        return ("--relay", NO_RELAY) if self.inventory.relay and host not in self.hosts_of_cluster else ()


class Way(StrEnum):
    """How to begin."""

    CLUSTER = "cluster"
    JOB = "job"
    RUN_ON_ALL = "run on all"
    EXAMINE = "examine"
    DEMO = "demo"
    ATTACH = "attach"
    RUN = "run"
    REPLAY = "replay"
    HELP = "help"


class Offer(NamedTuple):
    """A way to begin.

    Attributes:
        way: Which.
        title: What it is.
        note: A sentence about it, or why it is not there and what to do.
        argv: What does it in a shell, as far as it is known.
        is_there: False where something is missing.
    """

    way: Way
    title: str
    note: str
    argv: tuple[str, ...]
    is_there: bool = True


class Choice(NamedTuple):
    """A row of a list.

    Attributes:
        value: A host, a path, or a job.
        note: What is to be said of it.
    """

    value: str
    note: str = ""


def offers(facts: StartFacts) -> list[Offer]:
    """Return all ways to begin, in the order of their keys: where there is a cluster, it comes first."""
    attach = Offer(
        Way.ATTACH,
        "Watch the job of one host" if facts.has_cluster else "Watch the job of a host",
        f"{_hosts_text(facts)}, or on this machine.",
        facts.argv("attach", *facts.way_to("HOST"), "--host", "HOST"),
    )
    run = Offer(
        Way.RUN,
        "Start a program on one host, or here" if facts.has_cluster else "Start a program on a host, or here",
        "torchrun starts it, unchanged, and the console opens. Leaving the console does not end it.",
        facts.argv("run", *facts.way_to("HOST"), "--host", "HOST", "--", "train.py"),
    )
    few = [attach, run, _demo(facts)] if facts.has_cluster else [_demo(facts), attach, run]
    num_kept = len(facts.kept)
    kept = f"{num_kept} in {facts.evidence_dir}, the newest first" if num_kept else f"None in {facts.evidence_dir} yet"
    return [
        *_of_cluster(facts),
        *few,
        Offer(
            Way.REPLAY,
            "Look at evidence or a recording",
            f"As if it happened now. {clean(kept, LINE_LIMIT)}; or any other file.",
            facts.argv("replay", "FILE"),
        ),
        Offer(
            Way.HELP,
            "See all commands",
            "Each has a --help of its own; README.md tells more.",
            ("--help",),
        ),
    ]


def _demo(facts: StartFacts) -> Offer:
    note = "A small GPT trains here, in 4 ranks. Freeze one (F) and read who is blamed; nothing stays behind."
    if not facts.has_torch:
        python = clean(facts.python, LINE_LIMIT)
        note = f"Not yet: {python} has no PyTorch. Install it: pip install 'rankdeck[train]' (or torch itself)"
    return Offer(Way.DEMO, "Watch a demo on this machine", note, facts.argv("demo"), is_there=facts.has_torch)


def _of_cluster(facts: StartFacts) -> list[Offer]:
    """Return what can be done with all hosts of the inventory; nothing where there is none."""
    hosts, jobs = facts.hosts_of_cluster, facts.inventory.jobs
    if not facts.has_cluster:
        return []
    name = f"cluster {clean(facts.inventory.name)}" if facts.inventory.name else "the cluster"
    relay = clean(facts.inventory.relay)
    nodes = f"the nodes behind the relay on {relay}" if relay else clean(nodes_text(hosts), LINE_LIMIT)
    where = f"{nodes}, of {clean(facts.inventory_file, LINE_LIMIT)}"
    watch = Offer(
        Way.CLUSTER,
        f"Watch {name}: {nodes if relay else _count(len(hosts), 'host')}",
        f"The job of {where}. A host that is away is tried again.",
        facts.argv("attach"),
    )
    run = Offer(
        Way.RUN_ON_ALL,
        f"Run a program on {all_hosts_text(facts)}",
        "One job: torchrun starts it on each, unchanged, and the console opens. Leaving the console does not end it.",
        facts.argv("run", "--", "train.py"),
    )
    examine = Offer(
        Way.EXAMINE,
        "Examine the hosts" if len(hosts) > 1 else "Examine the host",
        "Before a job: what is wrong with any of them, or differs, and what to do about it. It changes nothing.",
        ("doctor",),
    )
    return [watch, *([_start_job(facts, jobs)] if jobs else []), run, *([] if relay else [examine])]


def _start_job(facts: StartFacts, jobs: Sequence[JobEntry]) -> Offer:
    if len(jobs) == 1:
        (job,) = jobs
        argv = facts.argv("start", job.name)
        return Offer(Way.JOB, f"Start job {job.name} of rankdeck.toml", f"{_job_text(job)}.", argv)
    more = f" and {len(jobs) - MAX_NAMED_JOBS} more" if len(jobs) > MAX_NAMED_JOBS else ""
    names = ", ".join(job.name for job in jobs[:MAX_NAMED_JOBS])
    note = f"{names}{more}, each with its command and its hosts."
    return Offer(Way.JOB, f"Start one of {len(jobs)} jobs of rankdeck.toml", note, facts.argv("start", "JOB"))


def _job_text(job: JobEntry) -> str:
    where = f", on {' '.join(job.hosts)}" if job.hosts else ""
    return clean(shlex.join(job.command) + where, LINE_LIMIT)


def all_hosts_text(facts: StartFacts) -> str:
    """Return what all hosts of the inventory are called: of one its name."""
    if facts.inventory.relay:
        return "all nodes of the relay"
    hosts = facts.hosts_of_cluster
    return clean(hosts[0]) if len(hosts) == 1 else f"all {len(hosts):,} hosts"


def aside(facts: StartFacts) -> tuple[str, bool]:
    """Return a sentence about the inventory, empty where there is nothing to say; and whether it tells of trouble."""
    if facts.inventory_trouble:
        return f"Without the cluster of this directory: {clean(facts.inventory_trouble, LINE_LIMIT)}", True
    if facts.has_cluster:
        return "", False
    if facts.has_no_files:
        return "Settings and hosts of files are left out (--no-config).", False
    if facts.inventory_file:
        return (
            f"{clean(facts.inventory_file, LINE_LIMIT)} names no hosts: `rankdeck init` adds those of a cluster.",
            False,
        )
    return "Several hosts? `rankdeck init` writes them down; then they lead here.", False


def _hosts_text(facts: StartFacts) -> str:
    config_file = clean(facts.config_file, LINE_LIMIT)
    if facts.has_cluster:
        others = f", of {config_file}" if facts.hosts else ""
        return f"On one of rankdeck.toml{others}, on another that SSH reaches"
    if facts.hosts is None:
        return f"On any host that SSH reaches ({config_file} is not there)"
    if not facts.hosts:
        return f"On any host that SSH reaches ({config_file} names none)"
    count = "one host" if len(facts.hosts) == 1 else _count(len(facts.hosts), "host")
    return f"On {count} of {config_file}, on another that SSH reaches"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def host_choices(facts: StartFacts, typed: str, here: str) -> list[Choice]:
    """Return the hosts that fit what is typed: those of the inventory first, this machine, those that ssh knows.

    What is typed itself is the last one, where it can be a host.

    Args:
        facts: What is there.
        typed: A part of a name, or a whole destination.
        here: What is known of this machine.
    """
    wanted = typed.strip().lower()
    names = dict.fromkeys([*facts.hosts_of_cluster, THIS_MACHINE, *(facts.hosts or ())])
    notes = dict.fromkeys(facts.hosts_of_cluster, "rankdeck.toml") | {THIS_MACHINE: here}
    fitting = [Choice(name, notes.get(name, "")) for name in names if wanted in name.lower()]
    fitting.sort(key=lambda choice: choice.value.lower() != wanted)  # what is typed whole comes first
    if typed.strip() and _is_host(typed.strip()) and all(choice.value != typed.strip() for choice in fitting):
        fitting.append(Choice(typed.strip(), "another host"))
    return fitting[:MAX_ROWS]


def file_choices(facts: StartFacts, typed: str) -> list[Choice]:
    """Return the files that fit what is typed, the newest first; and what is typed itself."""
    wanted = typed.strip()
    fitting = [
        Choice(file.path, f"{seconds_text(file.age_s)} ago, {bytes_text(file.size_bytes)}")
        for file in facts.kept
        if wanted.lower() in file.path.lower()
    ]
    if wanted and all(choice.value != wanted for choice in fitting):
        other = Choice(wanted, "another file")
        fitting = [other, *fitting] if "/" in wanted else [*fitting, other]
    return fitting[:MAX_ROWS]


def job_choices(facts: StartFacts, typed: str) -> list[Choice]:
    """Return the jobs of the inventory that fit what is typed: in their name, their command or their hosts."""
    wanted = typed.strip().lower()
    known = [Choice(job.name, _job_text(job)) for job in facts.inventory.jobs]
    fitting = [choice for choice in known if wanted in f"{choice.value} {choice.note}".lower()]
    fitting.sort(key=lambda choice: not choice.value.startswith(wanted))  # who types a name means it
    return fitting[:MAX_ROWS]


def attach_argv(facts: StartFacts, host: str) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that open a host's job."""
    return facts.argv("attach", *facts.way_to(host), "--host", host)


def start_argv(facts: StartFacts, job: str) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that start a job of the inventory."""
    return facts.argv("start", job)


def replay_argv(facts: StartFacts, path: str) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that show a file; `~/` is what it is in a shell."""
    whole = facts.home + path[1:] if path.startswith("~/") else path
    return facts.argv("replay", *(("--",) if whole.startswith("-") else ()), whole)


def program_argv(facts: StartFacts, host: str | None, program: Program) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that start a program: on a host, or on all of the inventory."""
    verb, *words = run_argv(host, program)
    return facts.argv(verb, *(() if host is None else facts.way_to(host)), *words)


def empty_text(way: Way, facts: StartFacts, typed: str) -> str:
    """Return what stands in the place of a list without rows."""
    if way is Way.REPLAY:
        return f"No evidence in {clean(facts.evidence_dir, LINE_LIMIT)} yet: attach and run keep some of each incident."
    if way is Way.JOB:
        return f"'{clean(typed)}' is in no job of {clean(facts.inventory_file, LINE_LIMIT)}: type a part of a name."
    return f"'{clean(typed)}' is no host: name an alias of ssh, user@host, or user@host:port."


def shown_choices(choices: Sequence[Choice]) -> list[tuple[str, str]]:
    """Return (value, note) pairs that are safe to show."""
    return [(clean(choice.value, LINE_LIMIT), clean(choice.note, LINE_LIMIT)) for choice in choices]


def _is_host(text: str) -> bool:
    try:
        parse_destination(text)
    except UsageError:
        return False
    return True
