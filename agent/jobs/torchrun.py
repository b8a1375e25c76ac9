"""torchrun's argv and environment from a JobSpec: every byte of the user's, no shell anywhere.

Static rendezvous, no restarts by torchrun itself, a port of our choice: what torchrun decides alone it decides badly
(pytorch deletes the first attempt's logs, guesses the host from DNS, and restarts only half of a broken cluster). An
elastic job has torchrun's c10d rendezvous instead, given what it would guess.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from ddpcore.wire import (
    ELASTIC_BACKEND,
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LOG_DIR,
    ENV_REQUEST_DIR,
    ENV_STORE_FD,
    ENV_UNPROBED,
    LOGS_SPECS_NAME,
    encode_faults,
)
from ddpcore.wire_launch import is_of_launcher, put_plugin, put_recorder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.jobs import JobSpec

RENDEZVOUS_TIMEOUT_S = 120
ELASTIC_JOIN_TIMEOUT_S = 600
"""Seconds that an elastic job waits for its least number of nodes, also after it has lost some. Source: torch's
default. A lost node costs about 55 s on loopback: 15 s until torch misses it, 30 s in which it waits for more than the
least."""
ELASTIC_READ_TIMEOUT_S = 10
"""Seconds for a store that does not answer: torch's own minute is spent for each of several reads."""
MONITOR_INTERVAL_S = 0.3
"""Seconds between torchrun's looks at its workers, and the time for which a dead one stays a zombie. When one has died,
the ranks that lost it have this time, half of it on average, to report their calls: then torchrun ends them."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Any value but `1` keeps torch from loading entry points, so also the probe. Source: torch/__init__.py, 2.5 to
2.13."""

_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}
"""Each variable's form for one interface; without `=` NCCL would take every one that begins so. Source: NCCL's user
guide, NCCL_SOCKET_IFNAME."""


class LaunchPaths(msgspec.Struct, frozen=True):
    """Paths by which a job's processes reach this agent."""

    inbox: str
    """Datagram socket for reports."""
    job_dir: str
    """Directory of log files and the probes' sockets."""


def launcher_argv(spec: JobSpec, master_port: int, local_addr: str) -> list[str]:
    """Return the argv of torchrun.

    `local_addr` is where the other nodes of an elastic job reach this one. Source: `python -m torch.distributed.run
    --help` of torch 2.13; every flag is in torch 2.8 too. Without `--`, argparse refuses a program's option that could
    be two of torchrun's, as --nproc.
    """
    is_elastic, is_module = spec.elastic_min_nodes > 0, spec.command[0] == "-m"
    return [
        spec.python,
        *("-m", "torch.distributed.run"),
        *(_elastic_flags(spec, master_port, local_addr) if is_elastic else _static_flags(spec, master_port)),
        *("--nproc-per-node", str(spec.local_world_size)),
        *("--logs-specs", LOGS_SPECS_NAME),
        *("--monitor-interval", str(MONITOR_INTERVAL_S)),
        *spec.command[:is_module],
        "--",
        *spec.command[is_module:],
    ]


def _static_flags(spec: JobSpec, master_port: int) -> list[str]:
    return [
        *("--nnodes", str(spec.num_nodes)),
        *("--max-restarts", "0"),
        *("--rdzv-backend", "static"),
        *("--rdzv-id", spec.job_id),
        *("--master-addr", spec.master_addr),
        *("--master-port", str(master_port)),
        *("--node-rank", str(spec.node_rank)),
        *("--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}"),
    ]


def _elastic_flags(spec: JobSpec, master_port: int, local_addr: str) -> list[str]:
    host = f"[{spec.master_addr}]" if ":" in spec.master_addr else spec.master_addr
    is_host = int(spec.node_rank == 0)
    conf = f"is_host={is_host},join_timeout={ELASTIC_JOIN_TIMEOUT_S},read_timeout={ELASTIC_READ_TIMEOUT_S}"
    return [
        *("--nnodes", f"{spec.elastic_min_nodes}:{spec.num_nodes}"),
        *("--max-restarts", str(spec.max_restarts)),
        *("--rdzv-backend", ELASTIC_BACKEND),
        # A launcher of an earlier attempt that still runs somewhere must not be taken in.
        *("--rdzv-id", f"{spec.job_id}.{spec.attempt}"),
        *("--rdzv-endpoint", f"{host}:{master_port}"),
        *("--local-addr", local_addr),
        *("--rdzv-conf", conf),
    ]


def launcher_env(
    spec: JobSpec, base: Mapping[str, str], paths: LaunchPaths, interface: str = "", store_fd: int | None = None
) -> dict[str, str]:
    """Return the environment of torchrun, which its ranks inherit.

    The job's own variables win over the agent's and over our defaults. Variables of an outer torchrun or an outer job
    in `base` are dropped. An empty `interface` leaves the choice to gloo and NCCL; `store_fd` is, in torchrun, the
    listening socket for its store.
    """
    env = {name: value for name, value in base.items() if not is_of_launcher(name)}
    env.update(spec.env)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    # A rank that is aborted by a library says on which line, which is all that its end tells.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    if spec.is_probed:
        put_recorder(env)
    # Patience is the agent's: torchrun must not kill earlier than the job's own grace says.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(spec.grace_s) + 5))
    if spec.elastic_min_nodes:
        # Else a node that comes later reads the address of the first round's store, and all of them die of it.
        # Source: seen with torch 2.13; `dynamic_rendezvous.py` keeps `_bootstrap_store_info` over rounds.
        # Each round's store for the ranks then takes a port of torch's choice, on every interface.
        env.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if interface:
        for name, form in _INTERFACES.items():
            env.setdefault(name, form.format(interface))
    put_plugin(env)
    env[ENV_INBOX] = paths.inbox
    env[ENV_LOG_DIR] = paths.job_dir
    env[ENV_REQUEST_DIR] = paths.job_dir
    env[ENV_JOB_ID] = spec.job_id
    env[ENV_ATTEMPT] = str(spec.attempt)
    if not spec.is_probed:
        env[ENV_UNPROBED] = "1"
    if spec.faults:
        env[ENV_FAULTS] = encode_faults(spec.faults)
    if store_fd is not None:
        env[ENV_STORE_FD] = str(store_fd)
    return env


def why_unprobed(spec: JobSpec, base: Mapping[str, str]) -> str:
    """Return why no rank of a job has a probe, empty where they should have one; `base` is the agent's environment."""
    if not spec.is_probed:
        return "as asked"
    value = {**base, **spec.env}.get(_AUTOLOAD, "1")
    return "" if value == "1" else f"{_AUTOLOAD}={value[:16]} keeps it out"
