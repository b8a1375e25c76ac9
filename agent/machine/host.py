"""Samples the host: cores, memory, swap, /dev/shm, the disk of the agent's directory, the network.

`HostSampler` takes the figures. `outward_addresses` and `own_addresses` list the addresses under which others may reach
this node.
"""

from __future__ import annotations

import os
import socket
import time
from ipaddress import ip_address, ip_interface
from typing import TYPE_CHECKING, NamedTuple

import psutil

from agent.machine.host_signals import HostSignalReader
from agent.node_state.observations import HostSampled
from agent.slow_reader import SlowReader
from agent.wire.machine import HostReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

DISK_STALE_S = 30.0
_SHM = "/dev/shm"  # noqa: S108 - it is looked at, not used
_LOOPBACK = "lo"


class HostSampler:
    """Samples the machine and this process; a call takes 0.5 ms and never waits for a disk."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = str(state_dir)
        self._process = psutil.Process()
        # A home directory may be on the network; /dev/shm is memory.
        self._disk: SlowReader[tuple[int, int]] = SlowReader("rankdeck-disk", stale_s=DISK_STALE_S)
        self._traffic = _Traffic()
        self._signals = HostSignalReader()
        psutil.cpu_percent()  # the first call starts the interval and says nothing

    def sample(self) -> HostSampled:
        """Return the figures since the last call."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return HostSampled(
            cpu_frac=min(1.0, psutil.cpu_percent() / 100.0),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            agent_rss_bytes=self._process.memory_info().rss,
            host=self._host(swap.total, swap.used),
            signals=self._signals.read(time.monotonic(), swap.sin + swap.sout),
        )

    def close(self) -> None:
        self._disk.close()
        self._signals.close()

    def _host(self, swap_total_bytes: int, swap_used_bytes: int) -> HostReport:
        self._disk.ask(self._state_dir, lambda: _space(self._state_dir))
        disk = self._disk.last(self._state_dir)
        try:
            shm: tuple[int, int] | None = _space(_SHM)
        except OSError:
            shm = None
        rx_bytes_hz, tx_bytes_hz = self._traffic.rates(time.monotonic())
        return HostReport(
            load_1min=os.getloadavg()[0],
            swap_total_bytes=swap_total_bytes,
            swap_used_bytes=swap_used_bytes,
            shm_total_bytes=shm[0] if shm else None,
            shm_used_bytes=shm[0] - shm[1] if shm else None,
            disk_total_bytes=disk[0] if disk else None,
            disk_free_bytes=disk[1] if disk else None,
            nic_rx_bytes_hz=rx_bytes_hz,
            nic_tx_bytes_hz=tx_bytes_hz,
        )


class _Traffic:
    """Bytes a second over all interfaces but loopback.

    An interface that carries another's packets once more (a bond, a bridge, a tunnel) counts twice, as its kernel does.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._at_s: float | None = None

    def rates(self, now_s: float) -> tuple[float | None, float | None]:
        """Return the rates received and sent since the last call; None the first time."""
        counts = psutil.net_io_counters(pernic=True, nowrap=False)
        now = {name: (nic.bytes_recv, nic.bytes_sent) for name, nic in counts.items() if name != _LOOPBACK}
        before, since_s = self._before, self._at_s
        self._before, self._at_s = now, now_s
        if since_s is None or now_s <= since_s:
            return None, None
        rx = sum(max(0, now[name][0] - before[name][0]) for name in now.keys() & before.keys())
        tx = sum(max(0, now[name][1] - before[name][1]) for name in now.keys() & before.keys())
        return rx / (now_s - since_s), tx / (now_s - since_s)


def _space(path: str) -> tuple[int, int]:
    """Return the size of a file system, and how much of it this user may still use."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


MAX_ADDRESSES = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class OutwardAddress(NamedTuple):
    """Address of an interface that is up: without a zone; `netmask` is empty where there is none, `mtu` in bytes."""

    interface: str
    address: str
    netmask: str
    mtu: int


def outward_addresses() -> list[OutwardAddress]:
    """Return the addresses at which others could reach this node; IPv4 first, of one kind by interface."""
    stats = psutil.net_if_stats()
    found = [
        OutwardAddress(name, address.address, address.netmask or "", stats[name].mtu)
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for address in addresses
        if address.family in _FAMILIES and is_outward(address.address)
    ]
    return sorted(found, key=lambda one: (":" in one.address, one.interface))


def is_outward(address: str) -> bool:
    """Return whether others can reach a node at an address, by the address alone."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    # One with a zone is of one link only.
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified)


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this node; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


def address_of_ssh(environ: Mapping[str, str]) -> str:
    """Return the address under which SSH has come here, empty where it has not. Source: sshd(8), SSH_CONNECTION."""
    parts = environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else ""


def own_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return this node's addresses with their prefix lengths, as `10.0.0.5/24`; that of SSH comes first."""
    return ordered(outward_addresses(), address_of_ssh(environ))


def ordered(found: Iterable[OutwardAddress], first: str) -> list[str]:
    """Return addresses as `own_addresses` does, the one that is `first` ahead."""
    ahead = sorted(found, key=lambda one: one.address != first)
    return [_with_prefix(one.address, one.netmask) for one in ahead[:MAX_ADDRESSES]]


def _with_prefix(address: str, netmask: str) -> str:
    try:
        # psutil writes an IPv6 netmask out, which `ipaddress` does not read.
        mask = int(ip_address(netmask)).bit_count() if ":" in netmask else netmask
        return str(ip_interface(f"{address}/{mask}" if mask else address))
    except ValueError:
        return str(ip_interface(address))
