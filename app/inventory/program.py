"""A program that a user wants to start: the typed fields, parsed and checked."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.jobs import MAX_LOCAL_WORLD_SIZE, MAX_RESTARTS
from agent.wire.secret_mask import MASK
from app.errors import UsageError
from app.ssh.config import THIS_MACHINE
from app.text import LINE_LIMIT, NAME_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAUNCHER = re.compile(r"(?:.*/)?(?:python[0-9.]*|torchrun)")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_NOT_IN_IDS = re.compile(r"[^a-z0-9]+")
_JOB_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_RENDEZVOUS = "rankdeck chooses address and port of the rendezvous: --master-addr names another address"
INSTEAD_OF_OPTIONS = {
    "--node-rank": "hosts have the ranks in the order in which they are named",
    "--master-port": _RENDEZVOUS,
    "--rdzv-backend": _RENDEZVOUS,
    "--rdzv-conf": _RENDEZVOUS,
    "--rdzv-endpoint": _RENDEZVOUS,
    "--rdzv-id": _RENDEZVOUS,
    "--log-dir": "the output of each rank is kept, and is in the view Logs",
    "--redirects": "the output of each rank is kept, and is in the view Logs",
    "--tee": "the output of each rank is kept, and is in the view Logs",
    "--no-python": "name a Python script, or -m MODULE",
    "--run-path": "name a Python script, or -m MODULE",
}
"""Replacement for each option of torchrun."""
_RANKS = "ranks of each host: --nproc-per-node N"
_HOSTS = "name the hosts: --host gpu1 --host gpu2"
INSTEAD_OF_GUESSES = {
    **dict.fromkeys(("--ranks", "--num-ranks", "--nproc", "--np", "-n", "--gpus", "--num-gpus"), _RANKS),
    **dict.fromkeys(("--num-processes", "--ntasks", "--ntasks-per-node"), _RANKS),
    **dict.fromkeys(("--hosts", "-H", "--nodes", "--nodelist", "-w"), _HOSTS),
    "--hostfile": "rankdeck init --hostfile FILE makes a rankdeck.toml of it",
    **dict.fromkeys(("--headless", "--json", "--detach"), "exec opens no console; rankdeck attach --headless follows"),
}
"""Replacement for each option that other launchers have, or `run` and not `exec`."""
_OWN_OPTION = re.compile(
    "--(nproc[-_]per[-_]node|nnodes|host|max[-_]restarts|master[-_]addr|job-python)(=.*)?"
    "|--(standalone|share-gpus|no-probe|no-doctor|rehearse|detach|headless|allow-faults)",
    re.DOTALL,
)
"""Options of `run`, some of them torchrun's, that few programs have."""
MAX_STEM_CHARS = 40
"""Length limit of a job id before its random suffix."""


class Program(msgspec.Struct, frozen=True):
    """A program to start on a host."""

    command: tuple[str, ...]
    """`train.py ...` or `-m pkg.train ...`, as after torchrun's own options."""
    num_ranks: int | None = None
    """Ranks; None is one for each GPU of the host, without GPUs one for every two cores."""
    max_restarts: int = 0
    workdir: str = ""
    """Working directory there; empty is `usual_workdir`."""
    python: str = ""
    """Python of the ranks; empty is the agent's own."""

    @property
    def text(self) -> str:
        """The command as it is typed."""
        return shlex.join(self.command)


class Again(NamedTuple):
    """A job to restart.

    Attributes:
        job_id: The job.
        num_ranks: Ranks of the whole job; None is as many as before.
        without: Nodes that the next attempt leaves out.
    """

    job_id: str
    num_ranks: int | None = None
    without: tuple[str, ...] = ()


class Typed(NamedTuple):
    """A program as it is typed, field by field."""

    command: str = ""
    num_ranks: str = ""
    max_restarts: str = ""
    workdir: str = ""
    python: str = ""


def typed(program: Program) -> Typed:
    """Return what a user would type for a program."""
    num_ranks = "" if program.num_ranks is None else str(program.num_ranks)
    max_restarts = str(program.max_restarts) if program.max_restarts else ""
    return Typed(program.text, num_ranks, max_restarts, program.workdir, program.python)


def read_program(fields: Typed) -> Program:
    """Return the program that a user has typed.

    Raises:
        UsageError: A field is invalid; the message names what to type instead.
    """
    try:
        command = tuple(shlex.split(fields.command))
    except ValueError as error:
        raise UsageError("a quote is open in the command") from error
    if not command:
        raise UsageError("type the program and its arguments: train.py --epochs 3, or -m package.module")
    if any(MASK in word for word in command):
        raise UsageError(f"what looked like a secret is hidden as {MASK}: type it again")
    return Program(
        check_command(command),
        _number(fields.num_ranks, "ranks", 1, MAX_LOCAL_WORLD_SIZE),
        _number(fields.max_restarts, "restarts", 0, MAX_RESTARTS) or 0,
        fields.workdir.strip(),
        fields.python.strip(),
    )


def is_utf8(text: str) -> bool:
    """Return whether a text can be sent: a name of a file, or what a shell passes, may hold other bytes."""
    return text.isascii() or text.encode(errors="replace").decode() == text


def check_utf8(*texts: str) -> None:
    """Refuse what cannot be sent.

    Raises:
        UsageError: A text is not UTF-8.
    """
    for text in texts:
        if not is_utf8(text):
            raise UsageError(f"{text!a} is not UTF-8")


def check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that can be sent as JSON.

    Raises:
        UsageError: An argument is not UTF-8, -m has no module, or it begins with what rankdeck itself starts.
    """
    if command == ("-m",):
        raise UsageError("-m names no module", "for example: -m pkg.train")
    check_utf8(*command)
    if (program := without_launcher(command)) != command:
        left_out = shlex.join(command[: len(command) - len(program)])
        raise UsageError(
            f"leave {clean(left_out)} out: rankdeck run {clean(shlex.join(program) or 'train.py', LINE_LIMIT)}"
        )
    return command


def own_options_text(command: Sequence[str], before: Sequence[str] | None = None) -> str:
    """Return a note about options of `run` that stand behind the program and so are the program's; else nothing.

    Args:
        command: The program and its arguments.
        before: What stands before it on the line of `rankdeck run`: the note ends with the line as it is meant then.
    """
    first = 2 if command[0] == "-m" else 1
    options: list[Sequence[str]] = []
    rest, is_whole = list(command[:first]), True
    arguments = iter(command[first:])
    for word in arguments:
        if found := _OWN_OPTION.fullmatch(word):
            value = [next(arguments, None)] if found[1] and not found[2] else []
            is_whole = is_whole and None not in value
            options.append([word, *(one for one in value if one is not None)])
        else:
            rest.append(word)
    if not options:
        return ""
    what = clean(", ".join(map(" ".join, options)), NAME_LIMIT)
    note = f"{clean(command[first - 1])} gets {what}; rankdeck's own options come before the program"
    if before is None or not is_whole:
        return note
    line = ["rankdeck", "run", *before, *itertools.chain(*options), *rest]
    return f"{note}: {clean(shlex.join(line), LINE_LIMIT)}"


def without_launcher(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command without the Python or the torchrun in front of the program."""
    rest = command
    if rest and _LAUNCHER.fullmatch(rest[0]):
        is_torchrun, rest = rest[0].endswith("torchrun"), rest[1:]
        while not is_torchrun and rest and re.match("-(?!m)", rest[0]):
            rest = rest[1:]
    return rest[2:] if rest[:1] == ("-m",) and rest[1:2] and rest[1] in _LAUNCHER_MODULES else rest


def check_job_id(job_id: str) -> str:
    """Return a valid job id.

    Raises:
        UsageError: It is invalid.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} cannot be a job's name", "up to 64 of a-z, 0-9 and -, not beginning with -")
    return job_id


def make_job_id(command: tuple[str, ...], salt: str) -> str:
    """Return an id that names the program: `train-3f2a`."""
    is_module = len(command) > 1 and command[0] == "-m"
    name = command[1].rpartition(".")[2] if is_module else command[0].rpartition("/")[2].removesuffix(".py")
    stem = _NOT_IN_IDS.sub("-", name.lower()).strip("-")[:MAX_STEM_CHARS].strip("-")
    return f"{stem or 'job'}-{salt}"


def usual_workdir(hosts: Sequence[str]) -> str:
    """Return the text for the default working directory on some hosts."""
    if list(hosts) == [THIS_MACHINE]:
        return "the inventory's, else this directory"
    here = f"; on {THIS_MACHINE} this directory" if THIS_MACHINE in hosts else ""
    return f"the inventory's, else home{here}"


def start_question(host: str, program: Program) -> str:
    """Return the question that is asked before a program is started: it names the host, the ranks and the command."""
    if program.num_ranks is None:
        ranks = "one rank for each GPU, without GPUs one for every two cores"
        ranks = ranks if host == THIS_MACHINE else f"ranks by the inventory's nproc, else {ranks}"
    else:
        ranks = f"{program.num_ranks} rank{'' if program.num_ranks == 1 else 's'}"
    again = f"; after a failure it restarts, {program.max_restarts} times at most" if program.max_restarts else ""
    place = f" in {program.workdir}" if program.workdir else ""
    python = f", with {program.python}" if program.python else ""
    return clean(f"Start {program.text} on {host}{place}? {ranks[:1].upper()}{ranks[1:]}{python}{again}.", LINE_LIMIT)


def _number(text: str, what: str, lowest: int, highest: int) -> int | None:
    """Return a typed number, None for an empty text."""
    text = text.strip()
    if not text:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else -1
    if not lowest <= number <= highest:
        raise UsageError(f"{clean(text)} {what} cannot be: {lowest} to {highest}, or none for the usual")
    return number
