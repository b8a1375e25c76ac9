"""Hosts with different GPUs each: whose rank computes where, what slows its GPU, and who else is on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agent.wire.machine import GpuCondition, GpuWatchState
from tests.support.agents import RunningAgent
from tests.support.hosts import Network, require_hosts
from tests.support.jobs import make_local_spec
from tests.support.nvml.stub import DRIVER_FILES, HW_SLOWDOWN, HW_THERMAL, Stub, h100, in_parts, mig
from tests.support.nvml_recordings import GIB, a100, recording, uuid
from tests.support.ranks import still_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.reports import NodeReport
    from agent.wire.signals import Reading
    from tests.support.hosts import Host

START_S, SEEN_S = 120.0, 60.0
PROGRAM = "import time\nwith open('/dev/nvidia0'):\n    while True: time.sleep(1)\n"
"""In a container a process is believed to be on a GPU if it has the driver open."""


class GpuHost:
    """A host with GPUs of its own, its agent and a job of two ranks."""

    def __init__(self, host: Host, *gpus: dict[str, Any]) -> None:
        host.exec("sh", "-c", DRIVER_FILES)
        self.stub = Stub(host.directory / "gpus", recording(*gpus))
        workdir = host.directory / "work"
        workdir.mkdir()
        (workdir / "train.py").write_text(PROGRAM)
        self._spec = make_local_spec(workdir)
        self.agent = RunningAgent(node=host.name, environment=self.stub.environ(), inside=host.inside())
        self._host = host

    def start(self) -> list[int]:
        """Start the job, and return the pids of its ranks as the host counts."""
        self.agent.start_job(self._spec)
        report = self.agent.wait_until(lambda report: len(report.workers) == 2, START_S, "the workers")
        return [worker.pid for worker in report.workers]

    def stranger(self) -> int:
        """Start a process of no job that has the driver open, and return its pid as the host counts."""
        out = self._host.exec("sh", "-c", "exec 3</dev/nvidia0; sleep 1000 >/dev/null 2>&1 & echo $!")
        return int(out)

    def signals(self, report: NodeReport) -> list[dict[str, Reading]]:
        """Return the signals of each rank."""
        return [worker.signals for worker in report.workers]


@pytest.fixture
def hosts() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", "h3") as network:
        yield network


def held(pid: int, gib: int = 1) -> dict[str, Any]:
    return {"pid": pid, "usedGpuMemory": gib * GIB}


def owners(report: NodeReport) -> list[list[int]]:
    return [[owner.rank for owner in gpu.owners] for gpu in report.gpus.gpus]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_each_host_tells_its_own_gpus_and_what_is_wrong_with_those_of_its_ranks(hosts: Network) -> None:
    hot = GpuHost(hosts["h1"], h100(0), h100(1))
    parts = GpuHost(hosts["h2"], in_parts(0, mig(0, 1), mig(0, 2)))
    foreign = GpuHost(hosts["h3"], a100(0), a100(1), a100(2), a100(3))
    with hot.agent, parts.agent, foreign.agent:
        check_a_hot_gpu_and_a_stranger(hot)
        check_parts(parts)
        check_a_foreign_context_and_a_lost_gpu(foreign)
        seen = [gpu.figures.name for one in (hot, parts, foreign) for gpu in one.agent.report().gpus.gpus]
        assert seen == ["NVIDIA H100 80GB HBM3"] * 3 + ["NVIDIA A100-SXM4-40GB"] * 4
    for host in hosts.hosts.values():
        assert not [process for process in host.processes() if still_runs(process) and process.name() != "sleep"]


def check_a_hot_gpu_and_a_stranger(host: GpuHost) -> None:
    pids = host.start()
    host.stub.change(0, nvmlDeviceGetComputeRunningProcesses_v3=[held(pids[0]), held(host.stranger())])
    slow = {"nvmlDeviceGetClockInfo(1)": 1230, "nvmlDeviceGetCurrentClocksEventReasons": HW_SLOWDOWN | HW_THERMAL}
    host.stub.change(1, nvmlDeviceGetComputeRunningProcesses_v3=[held(pids[1])], **slow)

    def is_told(report: NodeReport) -> bool:
        shared, hot = host.signals(report)
        return "gpu_others" in shared and "gpu_thermal" in hot and {"gpu_clock"} < shared.keys() & hot.keys()

    report = host.agent.wait_until(is_told, SEEN_S, "both causes")
    shared, hot = host.signals(report)
    assert owners(report) == [[0], [1]]
    assert (shared["gpu_clock"].value, hot["gpu_clock"].value) == (1.98e9, 1.23e9)
    assert ("gpu_thermal" in shared, "gpu_others" in hot) == (False, False)
    assert shared["pcie_width"].value == hot["pcie_width"].value == 16
    (name,) = [holder.name for holder in report.gpus.gpus[0].holders if holder.whose is None]
    assert name == "sleep"


def check_parts(host: GpuHost) -> None:
    pids = host.start()
    one, other = (mig(0, number + 1, [held(pid)]) for number, pid in enumerate(pids))
    stranger = held(host.stranger())
    other["nvmlDeviceGetComputeRunningProcesses_v3"].append(stranger)
    host.stub.change(0, migs=[one, other])

    report = host.agent.wait_until(
        lambda report: any("gpu_others" in signals for signals in host.signals(report)), SEEN_S, "the stranger"
    )
    apart, together = host.signals(report)
    assert ("gpu_others" in apart, together["gpu_others"].value > 0.5) == (False, True)
    assert "gpu_clock" not in apart, "a GPU in parts does not say whether it is busy"
    assert apart["gpu_temperature"].value == 61


def check_a_foreign_context_and_a_lost_gpu(host: GpuHost) -> None:
    pids = host.start()
    host.stub.change(0, nvmlDeviceGetComputeRunningProcesses_v3=[held(pids[0], 20), held(pids[1])])
    host.stub.change(1, nvmlDeviceGetComputeRunningProcesses_v3=[held(pids[1], 20)])

    def is_told(report: NodeReport) -> bool:
        return any(holder.is_foreign for gpu in report.gpus.gpus for holder in gpu.holders)

    report = host.agent.wait_until(is_told, SEEN_S, "the foreign context")
    assert owners(report) == [[0], [1], [], []]
    host.agent.wait_until(lambda report: "gpu_others" in host.signals(report)[0], SEEN_S, "another one on its GPU")
    assert "gpu_others" not in host.signals(report)[1]

    host.stub.lose(2)
    lost = host.agent.wait_until(
        lambda report: report.gpus.gpus[2].figures.condition is GpuCondition.LOST, SEEN_S, "the lost GPU"
    ).gpus
    assert (lost.state, lost.gpus[2].figures.uuid) == (GpuWatchState.WATCHING, uuid(2))
    host.agent.wait_until(lambda report: bool(report.gpus.gpus[2].figures.xids), SEEN_S, "what the driver logged")
