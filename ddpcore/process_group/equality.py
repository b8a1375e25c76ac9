"""Checks that all ranks run the same, and puts what differs into text.

`rank_facts` collects what is compared before a process group is opened: code, arguments, versions, and settings that
must agree or everything hangs. `check_equal_everywhere` compares facts that the program gives. `differences` turns the
ranks' facts into sentences, without side effects.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcore.agreement import ranks_by_value, ranks_text
from ddpcore.barriers import named_barriers
from ddpcore.errors import UnequalRanksError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

MAX_VALUES = 4
"""Different values of one fact in a message."""

MAX_CHARS = 120
"""Characters of one value."""

MAX_HOSTS = 3

ABSENT = "nothing"

_OWN_ARGUMENTS = frozenset(
    {"--local-rank", "--local_rank", "--rank", "--node-rank", "--node_rank", "--machine-rank", "--machine_rank"}
)
"""Options that name this rank: they differ by their meaning."""


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> dict[str, str]:
    """Return a sentence for each fact that is not the same on all ranks, by its name; the largest group comes first.

    Args:
        facts: Facts of each rank, in the order of ranks.
        hosts: Where each rank runs.
    """
    found = {}
    for name in sorted({name for of_rank in facts for name in of_rank}):
        holders = ranks_by_value([of_rank.get(name, ABSENT) for of_rank in facts])
        if len(holders) > 1:
            found[name] = f"{name} differs: {_holders_text(holders, hosts)}"
    return found


def comparable_arguments(argv: Iterable[str]) -> str:
    """Return a command line without the options that name this rank."""
    kept = []
    skips = False
    for argument in argv:
        if skips:
            skips = False
            continue
        if argument in _OWN_ARGUMENTS:
            skips = True
        elif argument.partition("=")[0] not in _OWN_ARGUMENTS:
            kept.append(argument)
    return shlex.join(kept)


def _holders_text(holders: Mapping[str, list[int]], hosts: Sequence[str]) -> str:
    largest_first = sorted(holders.items(), key=lambda one: (-len(one[1]), one[1]))
    shown = _without_common_part([value for value, _ in largest_first])
    texts = [
        f"{value} on {ranks_text(ranks)} ({_hosts_text([hosts[rank] for rank in ranks])})"
        for value, (_, ranks) in zip(shown[:MAX_VALUES], largest_first, strict=False)
    ]
    more = [f"and {len(holders) - MAX_VALUES} more values"] if len(holders) > MAX_VALUES else []
    return ", ".join([*texts, *more])


def _without_common_part(values: Sequence[str]) -> list[str]:
    """Return long values cut to the part in which they differ."""
    if all(len(value) <= MAX_CHARS for value in values):
        return [value or ABSENT for value in values]
    start = 0
    while len({value[start : start + 1] for value in values}) == 1:
        start += 1
    start = max(0, start - MAX_CHARS // 4)
    head = "..." if start else ""
    return [
        f"{head}{value[start : start + MAX_CHARS]}{'...' if len(value) > start + MAX_CHARS else ''}" for value in values
    ]


def _hosts_text(hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - MAX_HOSTS} more" if len(names) > MAX_HOSTS else ""
    return ", ".join(names[:MAX_HOSTS]) + more


MAX_ARGUMENT_CHARS = 2000
"""Characters of a command line in an entry; longer ones end with their hash."""

_HASH_CHARS = 12

_STRICT_VARIABLES = {"gloo": ("TORCH_DISTRIBUTED_DEBUG",), "nccl": ("NCCL_ALGO", "NCCL_PROTO")}
"""Settings that change what ranks send each other: DETAIL adds collectives of its own."""


class RankFacts(NamedTuple):
    """Facts that are compared before a process group is opened."""

    strict: dict[str, str]
    """Facts whose difference makes ranks hang, or train something else than the others."""
    soft: dict[str, str]
    """Facts that may differ, for a reason or by mistake."""


def rank_facts(backends: Collection[str], environ: Mapping[str, str]) -> RankFacts:
    """Return what this rank has to compare."""
    version = str(torch.__version__)
    strict = {"torch": version.partition("+")[0], "ddpcore": _own_version(), "the program": _program()}
    if "nccl" in backends:
        strict["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for backend, names in _STRICT_VARIABLES.items():
        if backend in backends:
            strict |= {name: environ[name] for name in names if environ.get(name)}
    soft = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "the build of torch": version,
        "the command line": _cut(comparable_arguments(sys.argv[1:])),
    }
    return RankFacts(strict, soft)


def check_equal_everywhere(facts: Mapping[str, str], *, label: str = "equality", timeout_s: float = 300.0) -> None:
    """Raise on every rank if ranks differ in one of these facts: a configuration, a data set's size, a file's hash.

    Main thread; blocks until all ranks have called it. Without a process group it returns at once.

    Args:
        facts: What to compare, by the name that people read.
        label: Name of the meeting; see `ddpcore.barriers.exchange`.
        timeout_s: How long to wait for the others.

    Raises:
        UnequalRanksError: What differs, with ranks and hosts.
        BarrierTimeoutError: Some ranks did not come.
        StoreLostError: The job's store is gone.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    # Equal nearly always: 16 characters from each rank are enough to know, whatever there is to compare.
    if len(set(named_barriers.exchange(label, _hash(text.encode()), timeout_s))) == 1:
        return
    answers = [
        json.loads(one) for one in named_barriers.exchange(label, json.dumps([platform.node(), text]), timeout_s)
    ]
    by_name = differences([json.loads(facts_text) for _, facts_text in answers], [host for host, _ in answers])
    found = list(by_name.values())
    raise UnequalRanksError(f"the ranks are not equal: {'; '.join(found)}. Make them the same everywhere", found)


def _own_version() -> str:
    try:
        return metadata.version("rankdeck")
    except metadata.PackageNotFoundError:
        return "unknown"


def _program() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return "interactive"
    try:
        return f"{Path(path).name} ({_hash(Path(path).read_bytes())})"
    except OSError:
        return Path(path).name


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ARGUMENT_CHARS else f"{text[:MAX_ARGUMENT_CHARS]}... ({_hash(text.encode())})"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_HASH_CHARS]
