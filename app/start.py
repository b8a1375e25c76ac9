"""What somebody who has typed `rankdeck` alone can do here: a pure function of what is there."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from app.errors import UsageError
from app.safe_text import LINE_LIMIT, clean
from app.ssh.config import THIS_MACHINE, parse_destination
from app.words import bytes_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ROWS = 200
"""Of a list that is narrowed by typing."""
HELP = ("--help",)
DEMO = ("demo",)


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


class Way(StrEnum):
    """How to begin."""

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
        shell: What does the same in a shell, as far as it is known.
        is_there: False where something is missing.
    """

    way: Way
    title: str
    note: str
    shell: str
    is_there: bool = True


class Choice(NamedTuple):
    """A row of a list.

    Attributes:
        value: A host, or a path.
        note: What is to be said of it.
    """

    value: str
    note: str = ""


def offers(facts: StartFacts) -> list[Offer]:
    """Return all ways to begin, in the order of their keys."""
    demo = "A small GPT trains here, in 4 ranks. Freeze one (F) and read who is blamed; nothing stays behind."
    if not facts.has_torch:
        python = clean(facts.python, LINE_LIMIT)
        demo = f"Not yet: {python} has no PyTorch. Install it: pip install 'rankdeck[train]' (or torch itself)"
    num_kept = len(facts.kept)
    kept = f"{num_kept} in {facts.evidence_dir}, the newest first" if num_kept else f"None in {facts.evidence_dir} yet"
    return [
        Offer(Way.DEMO, "Watch a demo on this machine", demo, "rankdeck demo", is_there=facts.has_torch),
        Offer(
            Way.ATTACH,
            "Watch the job of a host",
            f"{_hosts_text(facts)}, or on this machine.",
            "rankdeck attach --host HOST",
        ),
        Offer(
            Way.RUN,
            "Start a program on a host, or here",
            "torchrun starts it, unchanged, and the console opens. Leaving the console does not end it.",
            "rankdeck run --host HOST -- train.py",
        ),
        Offer(
            Way.REPLAY,
            "Look at evidence or a recording",
            f"As if it happened now. {clean(kept, LINE_LIMIT)}; or any other file.",
            "rankdeck replay FILE",
        ),
        Offer(
            Way.HELP,
            "See all commands",
            "Each has a --help of its own; README.md tells more.",
            "rankdeck --help",
        ),
    ]


def _hosts_text(facts: StartFacts) -> str:
    if facts.hosts is None:
        return f"On any host that SSH reaches ({clean(facts.config_file, LINE_LIMIT)} is not there)"
    if not facts.hosts:
        return f"On any host that SSH reaches ({clean(facts.config_file, LINE_LIMIT)} names none)"
    count = "one host" if len(facts.hosts) == 1 else f"{len(facts.hosts):,} hosts"
    return f"On {count} of {clean(facts.config_file, LINE_LIMIT)}, on another that SSH reaches"


def host_choices(facts: StartFacts, typed: str, here: str) -> list[Choice]:
    """Return the hosts that fit what is typed, this machine first; and what is typed itself, where it can be a host.

    Args:
        facts: What is there.
        typed: A part of a name, or a whole destination.
        here: What is known of this machine.
    """
    wanted = typed.strip().lower()
    known = [Choice(THIS_MACHINE, here), *(Choice(host) for host in facts.hosts or ())]
    fitting = [choice for choice in known if wanted in choice.value.lower()]
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


def attach_argv(host: str) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that open a host's job."""
    return ("attach", "--host", host)


def replay_argv(path: str, home: str) -> tuple[str, ...]:
    """Return the arguments of `rankdeck` that show a file; `~/` is what it is in a shell."""
    whole = home + path[1:] if path.startswith("~/") else path
    return ("replay", *(("--",) if whole.startswith("-") else ()), whole)


def empty_text(way: Way, facts: StartFacts, typed: str) -> str:
    """Return what stands in the place of a list without rows."""
    if way is Way.REPLAY:
        return f"No evidence in {clean(facts.evidence_dir, LINE_LIMIT)} yet: attach and run keep some of each incident."
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
