"""What is made of the kernel's figures of the host, with files of a made-up machine, and what this one shows."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from agent.machine.host_signals import MIN_SEGMENTS, SLOW_PERIOD_S, HostSignalReader
from agent.wire.signals import Signal
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.node_state.observations import HostSignals

PATIENCE_S = 20.0
SLOW = {Signal.CPU_CLOCK, Signal.NIC_SPEED}


class Nic(NamedTuple):
    bytes_recv: int = 0
    bytes_sent: int = 0
    errin: int = 0
    errout: int = 0
    dropin: int = 0
    dropout: int = 0


class Cpu(NamedTuple):
    user: float = 0.0
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    irq: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0


class Machine:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.nics: dict[str, Nic] = {"lo": Nic(10**12, 10**12, 5, 5, 5, 5), "eth0": Nic(), "eth1": Nic()}
        self.cpu = Cpu()
        monkeypatch.setattr(psutil, "net_io_counters", lambda **_: self.nics)
        monkeypatch.setattr(psutil, "cpu_times", lambda: self.cpu)
        (self.proc / "pressure").mkdir(parents=True)
        (self.proc / "net").mkdir()

    def pressure(self, name: str, some_us: int) -> None:
        line = "{} avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
        text = line.format("some", some_us) + line.format("full", 10 * some_us)
        (self.proc / "pressure" / name).write_text(text)

    def segments(self, again: int, sent: int) -> None:
        (self.proc / "net/snmp").write_text(
            f"Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: RtoMin MaxConn OutSegs RetransSegs\nTcp: 1 -1 {sent} {again}\n"
        )

    def speed(self, nic: str, mbits: str, *, is_device: bool = True) -> None:
        (self.sys / "class/net" / nic / ("device" if is_device else "queues")).mkdir(parents=True, exist_ok=True)
        (self.sys / "class/net" / nic / "speed").write_text(mbits)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def reader(machine: Machine) -> Iterator[HostSignalReader]:
    reader = HostSignalReader(proc=machine.proc, sys=machine.sys)
    yield reader
    reader.close()


def rates(found: HostSignals) -> dict[Signal, float]:
    return {signal: value for signal, value in found.values.items() if signal not in SLOW}


def test_the_first_look_has_no_rates(machine: Machine, reader: HostSignalReader) -> None:
    machine.pressure("cpu", 5)
    machine.cpu = Cpu(user=1.0, nice=2.0, system=4.0, idle=8.0, iowait=16.0, irq=32.0, softirq=64.0, steal=128.0)
    found = reader.read(10.0, 0)

    assert rates(found) == {}
    assert (found.busy_cpu_s, found.all_cpu_s) == (7.0, 255.0)


def test_a_host_on_which_nothing_happens_has_zeros(machine: Machine, reader: HostSignalReader) -> None:
    for name in ("cpu", "memory", "io"):
        machine.pressure(name, 10**9)
    machine.segments(10**6, 10**9)
    reader.read(10.0, 4096)
    machine.cpu = Cpu(idle=8.0)

    assert rates(reader.read(11.0, 4096)) == dict.fromkeys(
        {
            *(Signal.CPU_PRESSURE, Signal.MEMORY_PRESSURE, Signal.IO_PRESSURE, Signal.SWAPPED, Signal.CPU_STEAL),
            *(Signal.NIC_ERRORS, Signal.NIC_DROPS, Signal.TCP_RETRANSMITS),
        },
        0.0,
    )


def test_what_happens_is_counted_by_time(machine: Machine, reader: HostSignalReader) -> None:
    for name in ("cpu", "memory", "io"):
        machine.pressure(name, 10**9)
    machine.segments(100, 10**6)
    reader.read(10.0, 0)
    machine.pressure("cpu", 10**9 + 500_000)
    machine.pressure("memory", 10**9 + 1_000_000)
    machine.pressure("io", 10**9 + 9_000_000)
    machine.segments(200, 10**6 + 2 * MIN_SEGMENTS)
    machine.cpu = Cpu(idle=12.0, steal=4.0)
    machine.nics = {**machine.nics, "eth0": Nic(0, 0, 1, 3, 10, 10)}

    assert rates(reader.read(12.0, 8192)) == pytest.approx(
        {
            Signal.CPU_PRESSURE: 0.25,
            Signal.MEMORY_PRESSURE: 0.5,
            Signal.IO_PRESSURE: 1.0,
            Signal.SWAPPED: 4096.0,
            Signal.CPU_STEAL: 0.25,
            Signal.NIC_ERRORS: 2.0,
            Signal.NIC_DROPS: 10.0,
            Signal.TCP_RETRANSMITS: 0.1,
        }
    )


def test_a_few_segments_of_a_quiet_network_are_no_loss(machine: Machine, reader: HostSignalReader) -> None:
    machine.segments(0, 0)
    reader.read(10.0, 0)
    machine.segments(2, 3)

    assert rates(reader.read(11.0, 0))[Signal.TCP_RETRANSMITS] == pytest.approx(2 / MIN_SEGMENTS)


@pytest.mark.parametrize("text", [None, "", "some avg10=0.00\n", "some avg10=0.00 total=\n"])
def test_what_a_kernel_does_not_show_is_left_out(machine: Machine, reader: HostSignalReader, text: str | None) -> None:
    if text is not None:
        (machine.proc / "pressure/cpu").write_text(text)
        (machine.proc / "net/snmp").write_text(text)
    reader.read(10.0, 0)
    found = reader.read(11.0, 0)

    assert set(rates(found)) == {Signal.SWAPPED, Signal.NIC_ERRORS, Signal.NIC_DROPS}
    assert found.nic == ""


def test_the_interface_that_carries_most_is_followed_without_haste(machine: Machine, reader: HostSignalReader) -> None:
    received = {"eth0": 0, "eth1": 0}
    now_s, seen = 0.0, list[str]()

    def pass_seconds(num: int, **rates: int) -> None:
        nonlocal now_s
        for _ in range(num):
            now_s += 1.0
            for name, rate in rates.items():
                received[name] += rate
            machine.nics = {"lo": Nic(10**15), **{name: Nic(count) for name, count in received.items()}}
            seen.append(reader.read(now_s, 0).nic)

    pass_seconds(20, eth0=1000, eth1=900)
    pass_seconds(20, eth0=1000, eth1=1100)
    assert set(seen[1:]) == {"eth0"}
    pass_seconds(60, eth0=0, eth1=1100)
    assert seen[-1] == "eth1"
    del received["eth1"]
    pass_seconds(1, eth0=0)
    assert seen[-1] == "eth0"  # it has carried something
    received.clear()
    pass_seconds(1)
    assert seen[-1] == ""


def slow(reader: HostSignalReader) -> dict[Signal, float]:
    """Return the next answer about what is read on a thread of its own."""
    now_s = time.monotonic()
    found: dict[Signal, float] = until(
        lambda: {signal: value for signal, value in reader.read(now_s, 0).values.items() if signal in SLOW},
        PATIENCE_S,
        "the clock or the speed",
    )
    return found


@pytest.mark.parametrize("busy", [0, 5, 127])
def test_the_clock_is_that_of_the_fastest_of_all_cpus_and_counts_once(
    machine: Machine, reader: HostSignalReader, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    for cpu in range(128):
        path = machine.sys / f"devices/system/cpu/cpu{cpu}/cpufreq"
        path.mkdir(parents=True)
        (path / "scaling_cur_freq").write_text("2600000" if cpu == busy else "800000")

    assert slow(reader) == {Signal.CPU_CLOCK: 2.6e9}
    now_s = time.monotonic()
    assert SLOW.isdisjoint(reader.read(now_s, 0).values)
    reader._asked_s = now_s - SLOW_PERIOD_S
    assert slow(reader) == {Signal.CPU_CLOCK: 2.6e9}


def test_a_virtual_machine_shows_its_clock_elsewhere(machine: Machine, reader: HostSignalReader) -> None:
    (machine.proc / "cpuinfo").write_text("cpu MHz\t\t: 2599.998\nmodel\t: 1\ncpu MHz\t\t: unknown\ncpu MHz\t: 1000\n")

    assert slow(reader) == {Signal.CPU_CLOCK: pytest.approx(2599.998e6)}


@pytest.mark.parametrize(("text", "expected"), [("10000\n", 1e10), ("-1\n", None), ("what", None)])
def test_the_speed_is_that_of_the_interface_that_carries_most(
    machine: Machine, reader: HostSignalReader, text: str, expected: float | None
) -> None:
    (machine.proc / "cpuinfo").write_text("cpu MHz\t\t: 1000\n")
    machine.speed("eth0", "40000")
    machine.speed("eth1", text)
    for now_s in range(3):
        machine.nics = {**machine.nics, "eth1": Nic(1000 * now_s)}
        reader.read(now_s - 2 * SLOW_PERIOD_S, 0)

    def speed() -> float | None:
        reader._asked_s = float("-inf")
        return slow(reader).get(Signal.NIC_SPEED)

    until(lambda: speed() == expected, PATIENCE_S, "the speed")
    machine.nics = {**machine.nics, "eth0": Nic(10**9)}
    assert Signal.NIC_SPEED not in reader.read(time.monotonic(), 0).values
    until(lambda: speed() == 4e10, PATIENCE_S, "the speed of another one")


def test_a_virtual_interface_is_chosen_for_want_of_a_device_and_has_no_speed(
    machine: Machine, reader: HostSignalReader
) -> None:
    (machine.proc / "cpuinfo").write_text("cpu MHz\t\t: 1000\n")
    machine.speed("bond0", "50000", is_device=False)
    machine.speed("eth0", "25000")

    def passes(*names: str) -> str:
        for num_bytes in (0, 10**6):
            machine.nics = {"lo": Nic(), **{name: Nic(num_bytes * (1 + place)) for place, name in enumerate(names)}}
            reader.read(-1.0, 0)
        return reader._nic

    assert passes("eth0", "bond0") == "eth0"
    assert passes("bond0") == "bond0"
    until(lambda: reader._slow.is_free, PATIENCE_S, "the first answer")
    reader._asked_s, reader._seen = float("-inf"), reader._slow.last("")
    assert slow(reader) == {Signal.CPU_CLOCK: 1e9}


def test_this_machine_shows_what_it_can() -> None:
    reader = HostSignalReader()
    try:
        now_s = time.monotonic()
        reader.read(now_s, 0)
        found = reader.read(now_s + 1.0, 0)
    finally:
        reader.close()

    assert {Signal.SWAPPED, Signal.NIC_ERRORS, Signal.NIC_DROPS, Signal.TCP_RETRANSMITS} <= set(found.values)
    assert all(value >= 0.0 for value in found.values.values())
    assert 0.0 < found.busy_cpu_s < found.all_cpu_s
