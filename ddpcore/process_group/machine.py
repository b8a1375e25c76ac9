"""What this process sees of its machine: devices and backends, the network, and which ranks share it.

`device_facts` and `check_version`: what torch sees of devices and backends in this process, and the known faults of
this torch.

`route_to` and `port_holder`: the route from here to a host, and which process holds a port.

`Neighbours`: which ranks share this rank's node, whatever order a launcher has numbered them in. Every rank publishes
in the store its position on its node. Until the others have, launchers are taken to number the ranks of a node in a
row, as all but MPI's round robin do.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from ddpcore.errors import TorchFaultError
from ddpcore.process_group.choices import DeviceFacts, Route
from ddpcore.process_group.torch_versions import known_faults

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch._C._distributed_c10d import Store

    from ddpcore.placement import Placement

logger = logging.getLogger(__name__)


def device_facts(environ: Mapping[str, str]) -> DeviceFacts:
    """Return what `device_choice` decides by. Initialises no device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    built_in = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    registered = {str(name).lower() for name in dist.Backend.backend_list} - {"undefined", *built_in}
    return DeviceFacts(
        torch_version=str(torch.__version__),
        backends=frozenset({name for name, is_there in built_in.items() if is_there} | registered),
        backend_of_type=dict(dist.Backend.default_device_backend_map),
        accelerator=accelerator.type if accelerator is not None else "",
        num_devices=torch.accelerator.device_count() if accelerator is not None else 0,
        visible_variable=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def gpu_identity(device: torch.device) -> str:
    """Return the UUID of the physical GPU behind a CUDA device, as nvidia-smi has it; empty for other devices.

    Of a MIG instance it is the instance's. Initialises CUDA.
    """
    if device.type != "cuda":
        return ""
    mig = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if mig.startswith("MIG-"):
        return mig
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def comes_to_rest(device: torch.device, timeout_s: float) -> bool:
    """Wait at most `timeout_s` until all that is queued on a device is done; return whether it is."""
    if device.type != "cuda":
        return True
    waiting = threading.Thread(target=torch.cuda.synchronize, args=(device,), name="rankdeck-synchronize", daemon=True)
    waiting.start()
    waiting.join(timeout_s)
    return not waiting.is_alive()


def set_device(name: str) -> torch.device:
    """Make a device the current one, before anything is allocated or NCCL is started on another; return it."""
    device = torch.device(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    return device


def check_version(backends: Collection[str], *, has_cuda: bool) -> None:
    """Warn of known faults of this torch, set what avoids them unless the user has; raise TorchFaultError if fatal."""
    for finding in known_faults(str(torch.__version__), backends, has_cuda=has_cuda):
        if finding.is_refused:
            raise TorchFaultError(finding.text)
        for name, value in finding.fault.workaround.items():
            os.environ.setdefault(name, value)
        logger.warning(finding.text)


PROBE_S = 1.0
"""Seconds for a host to answer a connection, when a message needs the reason why nobody was reached."""

_OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737 and 3849), behind the default route. Nothing is sent there."""

_ANY_PORT = 9


def route_to(host: str) -> Route | None:
    """Return the route to a host; None if there is none, or its name does not resolve."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = _without_scope(probe.getsockname()[0])
            interface = _interface_of(own)
            if interface:
                return Route(interface, own, is_loopback=ip_address(own).is_loopback)
    return None


def own_address(towards: str = "") -> str:
    """Return this machine's address by which others reach it; empty if it has none but loopback.

    It is the one on the way `towards` a host if that leads out, else the one on the default route.
    """
    for host in (towards, *_OUTSIDE):
        route = route_to(host) if host else None
        if route is not None and not route.is_loopback:
            return route.address
    return ""


def interfaces() -> set[str]:
    return set(psutil.net_if_addrs())


def is_own(host: str) -> bool:
    """Return whether a host's name or address is one of this machine's."""
    try:
        found = {_without_scope(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(_interface_of(address) for address in found)


def port_holder(port: int) -> str:
    """Return which process listens on a TCP port of this machine: `pid 12 (python train.py)`; empty if none is seen."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process, or one of another container"
            return f"pid {connection.pid}{_command_of(connection.pid)}"
    return ""


def trouble_with(host: str, port: int) -> str:
    """Return why nobody was reached at an address: connects once, for a second or so."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return f"{host} does not resolve on {socket.gethostname()}"
    problem = f"{host} has no address"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(PROBE_S)
                probe.connect(address)
        except ConnectionRefusedError:
            problem = f"nobody listens on port {port} of {host}"
        except TimeoutError:
            problem = f"{host} does not answer on port {port}: another address, or a firewall"
        except OSError as error:
            problem = f"{host} cannot be reached: {error.strerror or error}"
        else:
            holder = port_holder(port) if is_own(host) else ""
            return f"what listens on port {port} of {host} is no torch store{f': {holder}' if holder else ''}"
    return problem


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(_without_scope(entry.address) == address for entry in addresses):
            return name
    return "lo" if ip_address(address).is_loopback and "lo" in psutil.net_if_addrs() else ""


def _without_scope(address: str) -> str:
    return address.partition("%")[0]


def _command_of(pid: int) -> str:
    try:
        return f" ({' '.join(psutil.Process(pid).cmdline())[:100]})"
    except psutil.Error:
        return ""


class Neighbours:
    """Ranks of this node."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # The host's name parts nodes whose launcher does not number them.
        self.node = f"{placement.node_rank}@{socket.gethostname()}"
        self._known = {placement.local_rank: placement.rank}

    def publish(self, store: Store) -> None:
        store.set(self._key(self._placement.local_rank), str(self._placement.rank))

    def rank_of(self, store: Store, local_rank: int) -> int:
        """Return a neighbour's rank: two round trips the first time."""
        key = self._key(local_rank)
        if local_rank not in self._known and store.check([key]):
            self._known[local_rank] = int(store.get(key))
        return self._known.get(local_rank, self._placement.rank - self._placement.local_rank + local_rank)

    def ranks(self, store: Store) -> tuple[int, ...]:
        return tuple(sorted(self.rank_of(store, local) for local in range(self._placement.local_world_size)))

    def _key(self, local_rank: int) -> str:
        return f"rankdeck/node/{self.node}/{local_rank}"
