"""The GPU sampler on a library that speaks NVML's ABI, with GPUs and a driver that go wrong as scripted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import pytest

from agent.machine import sampler_care
from agent.wire.machine import GpuCondition, GpusReport, GpuWatchState, NvLinks, PcieLink, ThrottleReason
from tests.support.gpu_samplers import SamplerProcess, Ward, is_watching
from tests.support.nvml.stub import (
    HW_SLOWDOWN,
    HW_THERMAL,
    NVLINK_CRC,
    NVLINK_REPLAY,
    NVLINK_STATE,
    Stub,
    h100,
    in_parts,
    mig,
)
from tests.support.nvml_recordings import DRIVER_NOT_LOADED, GIB, NOT_SUPPORTED, UNKNOWN, recording, uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.node_state.gpu_sample import GpuSample
    from agent.wire.machine import GpuFigures

MOST_GPUS = 16
U32, U64 = 2**32 - 1, 2**64 - 1
MPS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"


class Sampler(SamplerProcess):
    """A sampler on the stub."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.stub = Stub(path / "gpus", content)
        super().__init__(path, self.stub.environ())


Start: TypeAlias = "Callable[..., Sampler]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    samplers: list[Sampler] = []

    def run(*gpus: dict[str, Any], **system: Any) -> Sampler:
        path = tmp_path / str(len(samplers))
        path.mkdir()
        samplers.append(Sampler(path, recording(*gpus, **system)))
        return samplers[-1]

    yield run
    for sampler in samplers:
        sampler.close()


def figures(sample: GpuSample, at: int = 0) -> GpuFigures:
    return sample.gpus[at].figures


def width(found: GpuFigures) -> int | None:
    return None if found.pcie is None else found.pcie.width


def test_all_figures_of_an_h100_are_read_beside_those_of_gpus_that_have_few(start: Start) -> None:
    worn = h100(
        0,
        [{"pid": os.getpid(), "usedGpuMemory": 2**35}, {"pid": 4_000_000}],
        nvmlDeviceGetCurrentClocksEventReasons=HW_SLOWDOWN | HW_THERMAL,
        nvmlDeviceGetCurrPcieLinkGeneration=3,
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetCurrPcieLinkWidth=8,
        nvmlDeviceGetPcieReplayCounter=17,
        nvmlDeviceGetRemappedRows=[0, 1, 1, 0],
        **{
            f"nvmlDeviceGetFieldValues({NVLINK_STATE}, 4)": 0,
            f"nvmlDeviceGetFieldValues({NVLINK_REPLAY}, 4)": 2**33,
            f"nvmlDeviceGetFieldValues({NVLINK_CRC})": 1,
            MPS: [{"pid": 4_000_001, "usedGpuMemory": GIB}],
        },
    )
    bare = {"nvmlDeviceGetUUID": uuid(1), "nvmlDeviceGetTemperature(0)": 41}
    sample = start(worn, bare).sample()

    found = figures(sample)
    assert (found.uuid, found.name, found.condition) == (uuid(0), "NVIDIA H100 80GB HBM3", GpuCondition.OK)
    assert (found.memory_total_bytes, found.memory_used_bytes) == (80 * GIB, 56 * GIB)
    assert (found.sm_clock_hz, found.sm_clock_max_hz, found.memory_clock_hz) == (1.98e9, 1.98e9, 2.619e9)
    assert (found.power_watts, found.power_limit_watts) == (612.4, 700.0)
    assert found.throttle_reasons == [ThrottleReason.HW_SLOWDOWN, ThrottleReason.HW_THERMAL]
    assert found.pcie == PcieLink(3, 8, generation_max=4, width_max=16, generation_gpu_max=5, replays=17)
    assert found.nvlinks == NvLinks(18, 17, 18 + 2**33)
    assert (found.is_row_remap_pending, found.has_row_remap_failed) == (True, False)
    held = {process.pid: process.used_bytes for process in sample.gpus[0].processes}
    assert held == {os.getpid(): 2**35, 4_000_000: None, 4_000_001: GIB}
    (own,) = [process for process in sample.gpus[0].processes if process.pid == os.getpid()]
    assert (own.name, own.job_id) == (Path("/proc/self/comm").read_text().rstrip("\n"), "")

    few = figures(sample, 1)
    assert (few.temperature_celsius, few.condition) == (41, GpuCondition.OK)
    assert {few.pcie, few.nvlinks, few.numa_node} == {None}


def test_values_that_cannot_be_are_not_known_and_the_sample_comes_through(start: Start) -> None:
    def mad(index: int, value: Any) -> dict[str, Any]:
        kept = ("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMigMode")
        return {
            key: answer if key in kept or "Processes" in key else [value] * 4 for key, answer in h100(index).items()
        }

    sample = start(mad(0, U32), mad(1, U64), mad(2, 0), mad(3, -1), h100(4, [{"pid": U32}])).sample()

    for at in range(4):
        found = figures(sample, at)
        assert found.condition is GpuCondition.OK
        assert not found.temperature_celsius
        assert not found.power_watts
        assert not found.sm_clock_hz
        assert found.pcie in {None, PcieLink(replays=0)}
        assert found.nvlinks is None or found.nvlinks.num_up <= found.nvlinks.num_links <= 36
    assert width(figures(sample, 4)) == 16
    assert [process.pid for process in sample.gpus[4].processes] == [U32]


def test_sixteen_gpus_are_told_and_one_that_falls_off_takes_no_other_along(start: Start) -> None:
    sampler = start(*(h100(index) for index in range(16)))
    assert [gpu.figures.uuid for gpu in sampler.sample().gpus] == [uuid(index) for index in range(16)]

    sampler.stub.log(3, 63, 94)
    sampler.stub.log(2, 48, 48)
    sampler.stub.lose(3)
    lost = sampler.sample_with(lambda sample: figures(sample, 3).condition is GpuCondition.LOST)
    told = sampler.sample_with(lambda sample: figures(sample, 2).xids)

    assert {gpu.figures.condition for gpu in lost.gpus if gpu.figures.index != 3} == {GpuCondition.OK}
    assert [(xid.code, xid.times) for xid in figures(told, 2).xids] == [(48, 2)]
    assert {xid.code for xid in figures(told, 3).xids} == {63, 79, 94}
    assert (figures(told, 3).uuid, figures(told, 3).temperature_celsius) == (uuid(3), None)


def test_a_call_that_becomes_dear_is_made_more_rarely_and_the_others_go_on(start: Start) -> None:
    call = "nvmlDeviceGetCurrPcieLinkWidth"
    sampler = start(h100(0))
    assert width(figures(sampler.sample())) == 16

    sampler.stub.change(0, **{call: {"late_ms": 50, "value": 8}})
    sampler.sample_with(lambda sample: width(figures(sample)) == 8)
    sampler.sample_with(lambda sample: width(figures(sample)) is None)
    sampler.stub.change(0, **{"nvmlDeviceGetTemperature(0)": 77})
    sampler.sample_with(lambda sample: figures(sample).temperature_celsius == 77)


def test_a_gpu_in_parts_is_told_with_its_parts_and_who_holds_them(start: Start) -> None:
    parts = [mig(0, number, [{"pid": os.getpid(), "usedGpuMemory": number * GIB}]) for number in (1, 2)]
    sample = start(in_parts(0, *parts), h100(1)).sample()

    assert [part.uuid for part in figures(sample).mig_instances] == [part["nvmlDeviceGetUUID"] for part in parts]
    assert figures(sample).busy_frac is None
    held = [(process.mig_uuid, process.used_bytes) for process in sample.gpus[0].processes]
    assert held == [(parts[1]["nvmlDeviceGetUUID"], 2 * GIB), (parts[0]["nvmlDeviceGetUUID"], GIB)]
    assert not figures(sample, 1).mig_instances


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    monkeypatch.setattr(sampler_care, "SILENT_S", 1.5)
    monkeypatch.setattr(sampler_care, "HUNG_S", 2.5)
    monkeypatch.setattr(sampler_care, "FIRST_PAUSE_S", 0.1)
    ward = Ward(tmp_path)
    yield ward
    ward.close()


def stubbed(monkeypatch: pytest.MonkeyPatch, path: Path, *gpus: dict[str, Any]) -> Stub:
    """Let every sampler that is started from now on see these GPUs."""
    stub = Stub(path / "gpus", recording(*gpus))
    for name, value in stub.environ().items():
        monkeypatch.setenv(name, value)
    return stub


def test_a_sampler_that_hangs_in_the_library_is_replaced(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubbed(monkeypatch, tmp_path, h100(0), h100(1))
    ward.wait_until(is_watching, "the first sample")
    (first,) = ward.watch.pids

    stub.change(1, nvmlDeviceGetPowerUsage={"hang": True})
    silent = ward.wait_until(lambda gpus: gpus.state is GpuWatchState.SILENT, "the silence")
    assert "NVML has not answered" in silent.detail
    ward.wait_until(lambda _: first not in ward.watch.pids, "the first one's end")
    stub.change(1, nvmlDeviceGetPowerUsage=300_000)

    def is_well(gpus: GpusReport) -> bool:
        return is_watching(gpus) and gpus.gpus[1].figures.power_watts == 300

    ward.wait_until(is_well, "a new sampler's figures")


def test_a_driver_that_is_restarted_is_watched_again(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubbed(monkeypatch, tmp_path, h100(0))
    ward.wait_until(is_watching, "the first sample")

    stub.restart_driver(nvmlInit={"error": DRIVER_NOT_LOADED})
    gone = ward.wait_until(lambda gpus: gpus.state is GpuWatchState.ABSENT, "the driver's end")
    assert gone.detail.startswith("the NVIDIA driver was unloaded or restarted")
    ward.wait_until(lambda gpus: gpus.detail == "the NVIDIA driver is not loaded", "a sampler that looks again")

    stub.restart_driver(nvmlInit=None, nvmlSystemGetDriverVersion="570.1")
    back = ward.wait_until(is_watching, "the new driver")
    assert (back.driver_version, back.gpus[0].figures.condition) == ("570.1", GpuCondition.OK)


OF_CALLS = {
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetPciInfo": set(),
    "nvmlDeviceGetUtilizationRates": {"busy_frac", "memory_busy_frac"},
    "nvmlDeviceGetMemoryInfo": {"memory_total_bytes", "memory_used_bytes"},
    "nvmlDeviceGetTemperature(0)": {"temperature_celsius"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo(1)": {"sm_clock_hz"},
    "nvmlDeviceGetClockInfo(2)": {"memory_clock_hz"},
    "nvmlDeviceGetMaxClockInfo(1)": {"sm_clock_max_hz"},
    "nvmlDeviceGetMaxClockInfo(2)": set(),
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle_reasons"},
    "nvmlDeviceGetTotalEccErrors(0, 0)": {"ecc_corrected_errors"},
    "nvmlDeviceGetTotalEccErrors(1, 0)": {"ecc_uncorrected_errors"},
    "nvmlDeviceGetRemappedRows": {"is_row_remap_pending", "has_row_remap_failed"},
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie.generation"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie.generation_max"},
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": {"pcie.generation_gpu_max"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie.width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie.width_max"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie.replays"},
    "nvmlDeviceGetFieldValues": {f"nvlinks.{name}" for name in ("num_links", "num_up", "errors")},
    f"nvmlDeviceGetFieldValues({NVLINK_STATE})": {"nvlinks.num_up"},
    f"nvmlDeviceGetFieldValues({NVLINK_CRC})": set(),
    "nvmlDeviceGetComputeRunningProcesses_v3": set(),
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": set(),
}
"""Figures that come of each call."""


def flat(found: GpuFigures) -> dict[str, Any]:
    figures = msgspec.structs.asdict(found)
    for name in ("pcie", "nvlinks"):
        part = figures.pop(name)
        figures |= {f"{name}.{key}": value for key, value in msgspec.structs.asdict(part).items()} if part else {}
    return figures


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
def test_a_call_without_an_answer_costs_its_own_figures_alone(start: Start, code: int) -> None:
    calls = list(OF_CALLS)
    for first in range(0, len(calls), MOST_GPUS - 1):
        some = calls[first : first + MOST_GPUS - 1]
        well = h100(0, nvmlDeviceGetCurrentClocksEventReasons=HW_SLOWDOWN)
        spoilt = [{**well, "nvmlDeviceGetUUID": uuid(at), call: {"error": code}} for at, call in enumerate(some, 1)]
        whole, *others = (flat(gpu.figures) for gpu in start(well, *spoilt).sample().gpus)

        lost = [{name for name in whole if one.get(name) != whole[name]} - {"index", "uuid"} for one in others]
        assert dict(zip(some, lost, strict=True)) == {call: OF_CALLS[call] for call in some}
