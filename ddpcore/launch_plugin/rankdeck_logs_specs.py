"""What rankdeck adds to torchrun itself (entry point `torchrun.logs_specs`): log files, variables, the store's socket.

Runs in the launcher, before the rendezvous. Errors are one line and end the launcher: the agent shows that line. The
names of variables are those of `ddpcore.wire`, written out: a job's interpreter need not have ddpcore.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

ENV_LOG_DIR = "RANKDECK_LOG_DIR"
ENV_LAUNCHER_PID = "RANKDECK_LAUNCHER_PID"
ENV_LAUNCHER_NAMESPACE = "RANKDECK_LAUNCHER_NAMESPACE"
ENV_STORE_FD = "RANKDECK_STORE_FD"


class RankLogsSpecs(LogsSpecs):
    """Names log files by global rank, and tells each worker who launched it.

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

    @property
    def root_log_dir(self) -> str:
        """Return the directory of all files."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return each local rank's files, and complete its variables.

        Args:
            envs: Variables of each local rank, changed in place.
        """
        destination = LogsDest()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        for local_rank, env in envs.items():
            stem = self._directory / f"rank-{env['RANK']}"
            destination.stdouts[local_rank] = f"{stem}.stdout.log"
            destination.stderrs[local_rank] = f"{stem}.stderr.log"
            destination.error_files[local_rank] = f"{stem}.error.json"
            env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
            env[ENV_LAUNCHER_PID] = str(os.getpid())
            env[ENV_LAUNCHER_NAMESPACE] = namespace
        return destination


def _take_over_store_socket() -> None:
    """Let the rendezvous' store listen on the socket that the agent has bound.

    torch would bind the port on every interface, and the port could be lost to another process in between.
    """
    store_fd = os.environ.get(ENV_STORE_FD, "")
    if not store_fd:
        return
    store = getattr(static_tcp_rendezvous, "TCPStore", None)
    if store is None:
        raise SystemExit(
            "rankdeck: this torch keeps the store of its static rendezvous elsewhere, so it would listen on every "
            f"interface: use another torch, or unset {ENV_STORE_FD}"
        )
    # An attribute of one module in this process, which exists for this job alone; setattr, since it is not exported.
    setattr(static_tcp_rendezvous, "TCPStore", functools.partial(store, master_listen_fd=int(store_fd)))  # noqa: B010
