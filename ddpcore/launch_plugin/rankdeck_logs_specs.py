"""What rankdeck adds to torchrun itself (entry point `torchrun.logs_specs`): log files, variables, the store's socket.

Runs in the launcher, before the rendezvous. Errors are one line and end the launcher: the agent shows that line. The
names of variables are those of `ddpcore.wire`, written out: a job's interpreter need not have ddpcore.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

ENV_LOG_DIR = "RANKDECK_LOG_DIR"
ENV_LAUNCHER_PID = "RANKDECK_LAUNCHER_PID"
ENV_LAUNCHER_NAMESPACE = "RANKDECK_LAUNCHER_NAMESPACE"
ENV_STORE_FD = "RANKDECK_STORE_FD"
ENV_REQUEST_DIR = "RANKDECK_REQUEST_DIR"
ENV_ATTEMPT = "RANKDECK_ATTEMPT"
ENV_ROUND = "RANKDECK_ROUND"
ENV_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
ENV_FAULTS = "RANKDECK_FAULTS"
ENV_UNPROBED = "RANKDECK_UNPROBED"
ROUND_FILE = "round.json"
LAUNCHER_LOG = "launcher.log"


class RankLogsSpecs(LogsSpecs):
    """Names log files by global rank, and puts the launcher's pid into each worker's variables.

    torch's own specs number files by local rank and delete those of an earlier start.
    Source: torch/distributed/elastic/multiprocessing/api.py; `reify` may add to the workers' variables.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        directory = os.environ.get(ENV_LOG_DIR, "")
        if not directory:
            raise SystemExit(
                f"rankdeck: {ENV_LOG_DIR} is not set: --logs-specs rankdeck is for jobs of a rankdeck agent"
            )
        self._directory = Path(directory)
        _take_over_store_socket()
        if os.environ.get(ENV_UNPROBED):
            _leave_search_path()

    @property
    def root_log_dir(self) -> str:
        """Return the directory of all files."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return each local rank's files, and complete its variables in place."""
        destination = LogsDest()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        directory = self._begin_round(envs) if ENV_ROUND in os.environ else self._directory
        for local_rank, env in envs.items():
            stem = directory / f"rank-{env['RANK']}"
            destination.stdouts[local_rank] = f"{stem}.stdout.log"
            destination.stderrs[local_rank] = f"{stem}.stderr.log"
            destination.error_files[local_rank] = f"{stem}.error.json"
            env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
            env[ENV_LAUNCHER_PID] = str(os.getpid())
            env[ENV_LAUNCHER_NAMESPACE] = namespace
            if ENV_ROUND not in os.environ:  # each attempt is a new torchrun, which would count from 0
                env[ENV_RESTART_COUNT] = os.environ[ENV_ATTEMPT]
        return destination

    def _begin_round(self, envs: dict[int, dict[str, str]]) -> Path:
        """Make each start of an elastic job's ranks an attempt, with a directory beside the launcher's; return it."""
        number = int(os.environ[ENV_ROUND])
        if number > 1:
            os.environ.pop(ENV_FAULTS, None)  # a fault is tried out once
        attempt = int(os.environ[ENV_ATTEMPT]) + number
        directory = self._directory.parent / str(attempt)
        directory.mkdir(mode=0o700, exist_ok=True)
        # Whoever reads the logs of an attempt finds the launcher's there too.
        with contextlib.suppress(OSError):
            (directory / LAUNCHER_LOG).hardlink_to(self._directory / LAUNCHER_LOG)
        for env in envs.values():
            env[ENV_ATTEMPT] = str(attempt)
            env[ENV_LOG_DIR] = env[ENV_REQUEST_DIR] = str(directory)
        first = min(envs.values(), key=lambda env: int(env["RANK"]))
        record = {
            "number": number,
            "first_rank": int(first["RANK"]),
            "world_size": int(first["WORLD_SIZE"]),
            "node_rank": int(first["GROUP_RANK"]),
            "num_nodes": int(first["GROUP_WORLD_SIZE"]),
        }
        draft = self._directory / f".{ROUND_FILE}"
        draft.write_text(json.dumps(record), encoding="utf-8")
        draft.replace(self._directory / ROUND_FILE)
        return directory


def _leave_search_path() -> None:
    """Give the ranks the PYTHONPATH that they would have without rankdeck; this process has loaded what it needs."""
    own, _, rest = os.environ.get("PYTHONPATH", "").partition(":")
    if own != str(Path(__file__).parent):
        return
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        del os.environ["PYTHONPATH"]


def _take_over_store_socket() -> None:
    """Let the rendezvous' store listen on the socket that the agent has bound.

    torch would bind the port on every interface, and the port could be lost to another process in between.
    """
    store_fd = os.environ.get(ENV_STORE_FD, "")
    if not store_fd:
        return
    for module in (static_tcp_rendezvous, c10d_rendezvous_backend):
        store = getattr(module, "TCPStore", None)
        if store is None:
            raise SystemExit(
                "rankdeck: this torch keeps the store of its rendezvous elsewhere, so it would listen on every "
                f"interface: use another torch, or unset {ENV_STORE_FD}"
            )
        # An attribute of a module in this process, which exists for this job alone; setattr, since it is not exported.
        setattr(module, "TCPStore", functools.partial(store, master_listen_fd=int(store_fd)))  # noqa: B010
