"""Reads the signals of the host: what its CPUs, memory, disks and network do besides the ranks.

`HostSignalReader` reads counters of /proc and leaves out what this kernel does not show. The clock of the CPUs and the
speed of a network interface are read on a thread of their own: a driver may take long for them.

Source: Documentation/accounting/psi.rst (`total` in microseconds); proc_stat(5); RFC 4022 (RetransSegs, OutSegs);
Documentation/admin-guide/pm/cpufreq.rst (scaling_cur_freq in kHz); Documentation/ABI/testing/sysfs-class-net (speed in
Mbit/s).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from agent.node_state.observations import HostSignals
from agent.slow_reader import SlowReader
from agent.wire.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SLOW_PERIOD_S = 4.0
SLOW_STALE_S = 60.0
MAX_CLOCKS = 1024
"""CPUs whose clock is read: all of them, as nobody knows which ones a rank keeps busy. 128 took 1.3 ms."""
MIN_SEGMENTS = 500
"""TCP segments from which the part of those that were sent again counts in full: a few lost ones are nothing."""
TRAFFIC_MEMORY = 0.9
"""Part of the traffic that is still remembered at the next sample."""
CLEARLY_MORE = 1.5
"""Factor by which another interface carries more before it is the one that carries most."""
_PRESSURE = {
    Signal.CPU_PRESSURE: "cpu",
    Signal.MEMORY_PRESSURE: "memory",
    Signal.IO_PRESSURE: "io",
}
_LOOPBACK = "lo"
_RATES = frozenset({Signal.SWAPPED, Signal.NIC_ERRORS, Signal.NIC_DROPS})


class _Slow(NamedTuple):
    """What is read on a thread of its own."""

    cpu_clock_hz: float | None
    nic: str
    nic_speed_hz: float | None


class _Counts(NamedTuple):
    """What is counted up, as of one sample."""

    at_s: float
    counters: dict[Signal, float]
    """Seconds, bytes and packets."""
    steal_s: float
    all_s: float
    segments: tuple[int, int] | None
    """TCP segments sent again, and all sent."""


class HostSignalReader:
    """Reads the signals of this machine; a call takes 0.3 ms."""

    def __init__(self, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc, self._sys = proc, sys
        self._before: _Counts | None = None
        self._slow: SlowReader[_Slow] = SlowReader("rankdeck-clocks", stale_s=SLOW_STALE_S)
        self._asked_s = float("-inf")
        self._seen: _Slow | None = None
        self._traffic: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._nic = ""
        self._is_device: dict[str, bool] = {}
        """Whether an interface is a device: the speed of a bond, a bridge or a tunnel is no measure of it."""

    def read(self, now_s: float, swapped_bytes: int) -> HostSignals:
        """Return the signals since the last call, without rates the first time.

        Args:
            now_s: Monotonic time in seconds.
            swapped_bytes: Bytes swapped in and out since the machine began.
        """
        nics = psutil.net_io_counters(pernic=True, nowrap=False)
        self._find_nic({name: nics[name].bytes_recv + nics[name].bytes_sent for name in self._candidates(nics)})
        cpu = psutil.cpu_times()
        steal_s = getattr(cpu, "steal", 0.0)
        # What guests use is part of `user`.
        all_s = cpu.user + cpu.nice + cpu.system + cpu.idle + cpu.iowait + cpu.irq + cpu.softirq + steal_s
        counters = {signal: found for signal, name in _PRESSURE.items() if (found := self._stalled_s(name)) is not None}
        others = [nic for name, nic in nics.items() if name != _LOOPBACK]
        counters[Signal.SWAPPED] = float(swapped_bytes)
        counters[Signal.NIC_ERRORS] = float(sum(nic.errin + nic.errout for nic in others))
        counters[Signal.NIC_DROPS] = float(sum(nic.dropin + nic.dropout for nic in others))
        counts = _Counts(now_s, counters, steal_s, all_s, self._segments())
        values = self._slow_values(now_s)
        if self._before is not None:
            values |= _since(self._before, counts)
        self._before = counts
        own = time.process_time()
        return HostSignals(values, cpu.user + cpu.nice + cpu.system, all_s, own, self._nic)

    def close(self) -> None:
        self._slow.close()

    def _candidates(self, names: Iterable[str]) -> list[str]:
        """Return the interfaces that are devices; all but loopback where there are none, as in a container."""
        self._is_device = {
            name: self._is_device[name] if name in self._is_device else self._has_device(name)
            for name in names
            if name != _LOOPBACK
        }
        return [name for name, is_device in self._is_device.items() if is_device] or list(self._is_device)

    def _has_device(self, nic: str) -> bool:
        return (self._sys / "class/net" / nic / "device").exists()

    def _find_nic(self, now: Mapping[str, int]) -> None:
        """Find the interface that carries most, of late; one of the same traffic remains."""
        for name, count in now.items():
            new = max(0, count - self._bytes.get(name, count))
            self._traffic[name] = TRAFFIC_MEMORY * self._traffic.get(name, 0.0) + new
        self._traffic = {name: self._traffic[name] for name in now}
        self._bytes = dict(now)
        best = max(self._traffic, key=lambda name: self._traffic[name], default="")
        if best and self._traffic[best] > CLEARLY_MORE * self._traffic.get(self._nic, 0.0):
            self._nic = best
        elif self._nic not in now:
            self._nic = ""

    def _stalled_s(self, name: str) -> float | None:
        """Return for how long some task had to wait; None of a kernel that does not count it."""
        try:
            text = (self._proc / "pressure" / name).read_bytes()
            _, _, rest = text.partition(b"total=")
            return int(rest.split(b"\n", 1)[0]) / 1e6
        except (OSError, ValueError):
            return None

    def _segments(self) -> tuple[int, int] | None:
        try:
            lines = [line for line in (self._proc / "net/snmp").read_bytes().splitlines() if line.startswith(b"Tcp:")]
            names, values = (line.split() for line in lines)
            counts = dict(zip(names[1:], map(int, values[1:]), strict=True))
            return counts[b"RetransSegs"], counts[b"OutSegs"]
        except (OSError, ValueError, KeyError):
            return None

    def _slow_values(self, now_s: float) -> dict[Signal, float]:
        nic = self._nic
        if now_s - self._asked_s >= SLOW_PERIOD_S and self._slow.ask("", lambda: self._read_slow(nic)):
            self._asked_s = now_s
        found = self._slow.last("")
        if found is None or found is self._seen:
            return {}  # each answer is one sample
        self._seen = found
        is_measure = found.nic == nic and self._is_device.get(nic, False)
        both = {Signal.CPU_CLOCK: found.cpu_clock_hz, Signal.NIC_SPEED: found.nic_speed_hz if is_measure else None}
        return {signal: value for signal, value in both.items() if value is not None}

    def _read_slow(self, nic: str) -> _Slow:
        clocks = self._clocks_hz()
        return _Slow(max(clocks, default=None), nic, self._speed_hz(nic))

    def _clocks_hz(self) -> list[float]:
        found = []
        for cpu in range(min(MAX_CLOCKS, os.cpu_count() or 1)):
            path = self._sys / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq"
            try:
                found.append(1e3 * int(path.read_bytes()))
            except (OSError, ValueError):
                continue
        return found or self._clocks_of_cpuinfo()

    def _clocks_of_cpuinfo(self) -> list[float]:
        """Return what x86 shows without cpufreq, as in virtual machines."""
        try:
            lines = (self._proc / "cpuinfo").read_bytes().splitlines()
        except OSError:
            return []
        texts = [line.partition(b":")[2].strip() for line in lines if line.startswith(b"cpu MHz")]
        return [1e6 * float(text) for text in texts if text.replace(b".", b"", 1).isdigit()]

    def _speed_hz(self, nic: str) -> float | None:
        """Return the speed of an interface; None where it reports none."""
        try:
            speed = int((self._sys / "class/net" / nic / "speed").read_bytes()) if nic else 0
        except (OSError, ValueError):
            return None
        return 1e6 * speed if speed > 0 else None


def _since(before: _Counts, now: _Counts) -> dict[Signal, float]:
    passed_s = now.at_s - before.at_s
    if passed_s <= 0.0:
        return {}
    found = dict(_rates(before, now, passed_s))
    all_s = now.all_s - before.all_s
    if all_s > 0.0:
        found[Signal.CPU_STEAL] = min(1.0, max(0.0, now.steal_s - before.steal_s) / all_s)
    if now.segments is not None and before.segments is not None:
        again, sent = (max(0, after - earlier) for after, earlier in zip(now.segments, before.segments, strict=True))
        found[Signal.TCP_RETRANSMITS] = min(1.0, again / max(sent, MIN_SEGMENTS))
    return found


def _rates(before: _Counts, now: _Counts, passed_s: float) -> Iterable[tuple[Signal, float]]:
    for signal, count in now.counters.items():
        if signal in before.counters:
            rate = max(0.0, count - before.counters[signal]) / passed_s
            yield signal, rate if signal in _RATES else min(1.0, rate)
