"""Whether all ranks run the same: code, arguments, versions, and settings that must agree or everything hangs."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcore.barriers import gates
from ddpcore.errors import UnequalRanksError
from ddpcore.process_group.differences import comparable_arguments, differences

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_ARGUMENT_CHARS = 2000
"""Of a command line, in a card; what is longer is told apart by its hash."""

_HASH_CHARS = 12

_STRICT_VARIABLES = {"gloo": ("TORCH_DISTRIBUTED_DEBUG",), "nccl": ("NCCL_ALGO", "NCCL_PROTO")}
"""Settings of which each changes what ranks send each other: DETAIL adds collectives of its own."""


class RankFacts(NamedTuple):
    """What is compared before a process group is opened."""

    strict: dict[str, str]
    """Ranks that differ here hang, or train something else than the others."""
    soft: dict[str, str]
    """Ranks may differ here, for a reason or by mistake."""


def rank_facts(backends: Collection[str], environ: Mapping[str, str]) -> RankFacts:
    """Return what this rank has to compare.

    Args:
        backends: In use.
        environ: The process's environment.
    """
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
        label: Of the meeting; see `ddpcore.barriers.exchange`.
        timeout_s: How long to wait for the others.

    Raises:
        UnequalRanksError: What differs, with ranks and hosts.
        BarrierTimeoutError: Some ranks did not come.
        StoreLostError: The job's store is gone.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    # Equal nearly always: 16 characters from each rank are enough to know, whatever there is to compare.
    if len(set(gates.exchange(label, _hash(text.encode()), timeout_s))) == 1:
        return
    told = [json.loads(one) for one in gates.exchange(label, json.dumps([platform.node(), text]), timeout_s)]
    found = differences([json.loads(facts_text) for _, facts_text in told], [host for host, _ in told])
    raise UnequalRanksError(f"the ranks are not equal: {'; '.join(found)}. Make them the same everywhere", found)


def _own_version() -> str:
    try:
        return metadata.version("rankdeck")
    except metadata.PackageNotFoundError:
        return "unknown"


def _program() -> str:
    """Return the main script's name and hash; nothing in an interactive session."""
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
