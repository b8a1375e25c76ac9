"""Brings this rank to the store in which all meet: torch's own rendezvous, bounded, with errors that say why.

The store is opened for a world of -1: rank 0 then does not wait in it for a number of clients, of whom it could only
tell how many there were. The roll call (`ddpcore.process_group.roll_call`) waits, and knows who.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.rendezvous import rendezvous

from ddpcore.errors import MasterUnreachableError, PortInUseError
from ddpcore.process_group.network import is_own, port_holder, trouble_with
from ddpcore.process_group.rendezvous_file import check_rendezvous_file
from ddpcore.process_group.rendezvous_spec import Scheme

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.process_group.rendezvous_spec import RendezvousSpec

CONNECT_SLACK_S = 1.0
"""Beyond the time-out, for torch's own error to come first."""

_own_stores: dict[tuple[str, int], Store] = {}
"""Stores that this process hosts, for as long as it lives: another rank may still look into one, and a group that is
opened at the same place again finds the same store on all ranks."""


def open_store(spec: RendezvousSpec, timeout_s: float) -> Store:
    """Return the store; blocks until it is reached, at most `timeout_s` and a second or two to find out why not.

    Raises:
        ContradictoryLaunchError: The rendezvous file cannot be one.
        StaleRendezvousError: It was left half-written.
        PortInUseError: This is rank 0, and another process listens on its port.
        MasterUnreachableError: Nobody answers where rank 0 should.
    """
    if spec.scheme is Scheme.FILE:
        check_rendezvous_file(spec.path)
    attempt = _Attempt(spec.url, timeout_s)
    attempt.start()
    attempt.join(timeout_s + CONNECT_SLACK_S)
    if attempt.store is None:
        raise _unreachable(spec, timeout_s, attempt.error)
    if spec.hosts_store:
        _own_stores.setdefault((spec.master_addr, spec.master_port), attempt.store)
    return attempt.store


class _Attempt(threading.Thread):
    """Torch's rendezvous in a thread: connected to something that is no store, it waits for ever (torch 2.13)."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(name="rankdeck-rendezvous", daemon=True)
        self._url = url
        self._timeout = timedelta(seconds=timeout_s)
        self.store: Store | None = None
        self.error: RuntimeError | ValueError | None = None

    def run(self) -> None:
        """Leave the store or the error behind."""
        try:
            self.store, _, _ = next(rendezvous(self._url, timeout=self._timeout))
        except (RuntimeError, ValueError) as error:
            self.error = error


def _unreachable(spec: RendezvousSpec, timeout_s: float, error: Exception | None) -> Exception:
    host, port = spec.master_addr, spec.master_port
    said = str(error).partition("\n")[0] if error is not None else ""
    if spec.scheme is Scheme.FILE:
        return MasterUnreachableError(f"{spec.where} cannot be opened: {said or f'no answer in {timeout_s:g} s'}")
    if spec.hosts_store and "EADDRINUSE" in said:
        holder = port_holder(port) or "a process that cannot be seen from here"
        return PortInUseError(
            f"rank 0 cannot listen on port {port} of {socket.gethostname()}, where {holder} listens: end that, or "
            "give all ranks another port"
        )
    trouble = trouble_with(host, port)
    if spec.hosts_store:
        if not is_own(host):
            trouble = f"{trouble}. {host} is not an address of {socket.gethostname()}, where rank 0 runs"
        who = "rank 0 cannot reach its own store"
    else:
        who = f"rank {spec.rank} on {socket.gethostname()} has not reached {_host_of(spec)}"
    return MasterUnreachableError(
        f"{who} at {spec.where} in {timeout_s:g} s: {trouble}. Start rank 0 on the host that {_said_by(spec)}, and "
        f"see how it is doing{f' (torch: {said})' if said else ''}"
    )


def _host_of(spec: RendezvousSpec) -> str:
    return "torchrun's store" if spec.has_agent_store else "rank 0's store"


def _said_by(spec: RendezvousSpec) -> str:
    return "init_method names" if spec.scheme is Scheme.TCP else "MASTER_ADDR and MASTER_PORT name"
