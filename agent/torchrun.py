"""torchrun's argv and environment from a JobSpec: every byte of the user's, no shell anywhere.

Static rendezvous, no restarts by torchrun itself, a port of our choice: what torchrun decides alone it decides badly
(pytorch deletes the first attempt's logs, guesses the host from DNS, and restarts only half of a broken cluster).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from ddpcore.wire import (
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LOG_DIR,
    ENV_REQUEST_DIR,
    ENV_STORE_FD,
    LAUNCH_PLUGIN_DIR,
    LOGS_SPECS_NAME,
    encode_faults,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.jobs import JobSpec

RENDEZVOUS_TIMEOUT_S = 120
MONITOR_INTERVAL_S = 0.1
"""How often torchrun looks at its workers; it also is how long a dead one stays a zombie."""
RECORDER_ENTRIES = 64
"""Entries of torch's flight recorder: a full dump of 64 takes 0.5 ms."""

_STRAY_PREFIXES = ("PET_", "TORCHELASTIC_", "RANKDECK_")
_STRAY_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    }
)
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class LaunchPaths(msgspec.Struct, frozen=True):
    """Where a job's processes find this agent."""

    inbox: str
    """Datagram socket for reports."""
    job_dir: str
    """For log files and the probes' sockets."""


def launcher_argv(spec: JobSpec, master_port: int) -> list[str]:
    """Return the argv of torchrun.

    Source: `python -m torch.distributed.run --help` of torch 2.13; every flag is in torch 2.8 too.
    """
    return [
        spec.python,
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(spec.num_nodes)),
        *("--nproc-per-node", str(spec.local_world_size)),
        *("--max-restarts", "0"),
        *("--rdzv-backend", "static"),
        *("--rdzv-id", spec.job_id),
        *("--master-addr", spec.master_addr),
        *("--master-port", str(master_port)),
        *("--node-rank", str(spec.node_rank)),
        *("--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}"),
        *("--logs-specs", LOGS_SPECS_NAME),
        *("--monitor-interval", str(MONITOR_INTERVAL_S)),
        *spec.command,
    ]


def launcher_env(
    spec: JobSpec, base: Mapping[str, str], paths: LaunchPaths, store_fd: int | None = None
) -> dict[str, str]:
    """Return the environment of torchrun, which its ranks inherit.

    Args:
        spec: The job; its own variables win over the agent's and over our defaults.
        base: The agent's environment. What an outer torchrun or an outer job left in it is dropped.
        paths: Where the job's processes find this agent.
        store_fd: Number, in torchrun, of the listening socket for its store; None lets torch bind the port.
    """
    env = {name: value for name, value in base.items() if not _is_stray(name)}
    env.update(spec.env)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    # A rank that is aborted by a library says on which line, which is all that its end tells.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDER_ENTRIES))
    # Patience is the agent's: torchrun must not kill earlier than the job's own grace says.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(spec.grace_s) + 5))
    if spec.interface:
        for name in _INTERFACE_NAMES:
            env.setdefault(name, spec.interface)
    search_path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{LAUNCH_PLUGIN_DIR}:{search_path}" if search_path else str(LAUNCH_PLUGIN_DIR)
    env[ENV_INBOX] = paths.inbox
    env[ENV_LOG_DIR] = paths.job_dir
    env[ENV_REQUEST_DIR] = paths.job_dir
    env[ENV_JOB_ID] = spec.job_id
    env[ENV_ATTEMPT] = str(spec.attempt)
    if spec.faults:
        env[ENV_FAULTS] = encode_faults(spec.faults)
    if store_fd is not None:
        env[ENV_STORE_FD] = str(store_fd)
    return env


def _is_stray(name: str) -> bool:
    return name in _STRAY_NAMES or name.startswith(_STRAY_PREFIXES)
