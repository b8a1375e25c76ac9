"""The environment of a rank, parsed once: torchrun's variables and those of the agent that started it.

Pure: the environment is an argument. Torch-free, so that a program can fail with a clear line before it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpcore.errors import NotLaunchedError
from ddpcore.wire import (
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LAUNCHER_NAMESPACE,
    ENV_LAUNCHER_PID,
    ENV_PROBED_PID,
    ENV_REQUEST_DIR,
    Fault,
    MalformedReportError,
    decode_faults,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOW_TO_RUN = "run it with `torchrun --nproc-per-node 4 SCRIPT`, or watch it with `rankdeck demo`"
_MAX_DIGITS = 19
"""More do not fit into 64 bits."""


class TorchrunEnv(msgspec.Struct, frozen=True):
    """Where torchrun has placed this process.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    restart_count: int
    master_addr: str
    master_port: int


class ProbeEnv(msgspec.Struct, frozen=True):
    """What the agent sets for the probe of one rank."""

    inbox: str
    """Path of the agent's datagram socket."""
    request_dir: str
    """Directory for the probe's own socket; empty means that it takes no requests."""
    job_id: str
    attempt: int
    launcher_pid: int | None
    """None when the launch plug-in did not start this rank."""
    launcher_namespace: str
    """The launcher's pid namespace, in which alone `launcher_pid` means something."""
    probed_pid: int | None
    """The process of this rank that has loaded the probe first."""
    faults: tuple[Fault, ...]
    is_adopted: bool = False
    """No agent has launched this rank: the one of its host takes it in when it reports."""


def parse_torchrun(environ: Mapping[str, str]) -> TorchrunEnv:
    """Return torchrun's variables; raise NotLaunchedError, with what to run, if one is absent or out of range."""
    env = TorchrunEnv(
        rank=_required_int(environ, "RANK"),
        local_rank=_required_int(environ, "LOCAL_RANK"),
        world_size=_required_int(environ, "WORLD_SIZE"),
        local_world_size=_required_int(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_int(environ, "GROUP_RANK", 0),
        restart_count=_int(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        master_addr=_required(environ, "MASTER_ADDR"),
        master_port=_required_int(environ, "MASTER_PORT"),
    )
    if not 0 <= env.rank < env.world_size:
        raise NotLaunchedError(f"RANK={env.rank} does not fit WORLD_SIZE={env.world_size}: {_HOW_TO_RUN}")
    if not 0 <= env.local_rank < env.local_world_size:
        raise NotLaunchedError(
            f"LOCAL_RANK={env.local_rank} does not fit LOCAL_WORLD_SIZE={env.local_world_size}: {_HOW_TO_RUN}"
        )
    return env


def parse_probe(environ: Mapping[str, str]) -> ProbeEnv | None:
    """Return the agent's variables, or None in a process that no agent watches.

    Never raises: a value that makes no sense costs its own function, not the user's training.
    """
    inbox = environ.get(ENV_INBOX, "")
    if not inbox:
        return None
    try:
        faults = tuple(decode_faults(environ.get(ENV_FAULTS) or "[]"))
    except MalformedReportError:
        faults = ()
    return ProbeEnv(
        inbox=inbox,
        request_dir=environ.get(ENV_REQUEST_DIR, ""),
        job_id=environ.get(ENV_JOB_ID, ""),
        attempt=optional_int(environ, ENV_ATTEMPT) or 0,
        launcher_pid=optional_int(environ, ENV_LAUNCHER_PID),
        launcher_namespace=environ.get(ENV_LAUNCHER_NAMESPACE, ""),
        probed_pid=optional_int(environ, ENV_PROBED_PID),
        faults=faults,
    )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise NotLaunchedError(f"{name} is not set: this program is one rank of many; {_HOW_TO_RUN}")
    return value


def _required_int(environ: Mapping[str, str], name: str) -> int:
    return _to_int(name, _required(environ, name))


def _int(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return _to_int(name, value) if value else default


def _to_int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise NotLaunchedError(f"{name}={value!r} is not a number: {_HOW_TO_RUN}") from None


def optional_int(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable that is a number of digits alone, and fits into 64 bits; else None."""
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < _MAX_DIGITS else None
