"""Who a rank is that no agent has launched: by what its launcher has set, and what `init_process_group` was given.

torchrun's variables name a rank from the start. Those of other launchers count once the process group is opened: each
process of a batch script has Slurm's, and a container's RANK may be the number of a node.

Pure: the environment is an argument.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlsplit

from ddpcore.env import TorchrunEnv, optional_int
from ddpcore.wire import ENV_JOB_ID
from ddpcore.wire_launch import RANK_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACES = (
    ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
_LAUNCHERS = tuple((rank, *names) for rank, names in zip(RANK_VARIABLES, _PLACES, strict=True))
"""Variables of a rank, the world size, the rank on its node and the ranks there, by launcher."""
MAX_JOB_ID_CHARS = 64
MAX_KEY_CHARS = 24
"""Longest part of a job's name that is a launcher's own; of a longer one, such as torchrun's UUID, the first eight."""
_NO_RUN_ID = frozenset({"", "none"})
"""torchrun's run id where none is given. Source: torch/distributed/run.py."""
_HERE = frozenset({"", "localhost", "127.0.0.1", "::1"})


class Meeting(NamedTuple):
    """What a program has passed to `init_process_group`; torch's own values where it has passed nothing."""

    rank: int = -1
    world_size: int = -1
    init_method: str | None = None


def is_named_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether a process is a rank by torchrun's variables, before it has opened a group."""
    return all(environ.get(name) for name in _LAUNCHERS[0])


def launched_rank(environ: Mapping[str, str], meeting: Meeting = Meeting()) -> TorchrunEnv | None:  # noqa: B008 - a constant
    """Return who this rank is; None where neither the program nor a launcher shows it.

    What a launcher does not show has a value that fits: the rank on its node is then the rank.
    """
    rank, world_size = _given(meeting)
    names = next((names for names in _LAUNCHERS if _has(environ, names[0])), None)
    if names is not None:
        rank = _number(environ, names[0], 0) if rank < 0 else rank
        world_size = _number(environ, names[1], -1) if world_size < 0 else world_size
    if not 0 <= rank < world_size:
        return None
    local_ranks = (_number(environ, names[2], -1) for names in _LAUNCHERS)
    local_rank = next((number for number in local_ranks if number >= 0), rank)
    local_sizes = (_number(environ, names[3], -1) for names in _LAUNCHERS)
    local_size = next((number for number in local_sizes if number > local_rank), world_size)
    return TorchrunEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=max(local_size, local_rank + 1),
        node_rank=_number(environ, "GROUP_RANK", 0),
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT", 0),
    )


def job_name(environ: Mapping[str, str], script: str, launcher_pid: int, init_method: str | None = None) -> str:
    """Return a job's name, the same on all its ranks.

    As `rankdeck exec --name` gives it, else by what the launcher has named: a Slurm step, an MPI run, torchrun's run
    id, else where the ranks meet, and at last the process that has started them on this node. It fits
    `agent.wire.codec.JobId`.
    """
    if given := environ.get(ENV_JOB_ID, ""):
        return _as_job_id(given)
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if job and step:
        return _as_job_id(f"slurm-{job}-{step}")
    prefix = f"slurm-{job}-" if job else ""
    return _as_job_id(f"{prefix}{PurePath(script).stem or 'job'}-{_key(environ, launcher_pid, init_method)}")


def _key(environ: Mapping[str, str], launcher_pid: int, init_method: str | None) -> str:
    for name in ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID"):
        found = environ.get(name, "")
        if found not in _NO_RUN_ID:
            return found if len(found) <= MAX_KEY_CHARS else found[:8]
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    split = _split(init_method)
    if split is not None and split.scheme == "tcp":
        address, port = split.hostname or "", str(split.port or "")
    if port:
        return port if address in _HERE else f"{address[:MAX_KEY_CHARS]}-{port}"
    return str(launcher_pid)


def _given(meeting: Meeting) -> tuple[int, int]:
    """Return rank and world size as the program has given them, -1 for one that it has not; a URL may hold them."""
    rank, world_size, split = meeting.rank, meeting.world_size, _split(meeting.init_method)
    if split is not None and split.scheme != "env":
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        rank = _number(query, "rank", -1) if rank < 0 else rank
        world_size = _number(query, "world_size", -1) if world_size < 0 else world_size
    return rank, world_size


def _split(url: str | None) -> SplitResult | None:
    """Return the parts of a URL; None where there is none, or it is none that can be read."""
    try:
        split = urlsplit(url or "")
        _ = split.port  # raises for what is no port
    except ValueError:
        return None
    return split if split.scheme else None


def _has(environ: Mapping[str, str], name: str) -> bool:
    return optional_int(environ, name) is not None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    found = optional_int(environ, name) if name else None
    return default if found is None else found


def _as_job_id(text: str) -> str:
    """Return a text with what a job's name may not hold replaced by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_JOB_ID_CHARS].rstrip("-") or "job"
