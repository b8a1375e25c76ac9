"""The GPU sampler as a process, on a replayed NVML: what it says, and what it survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from agent.node_state.gpu_sample import MalformedSampleError, decode_sample
from agent.wire.machine import GpuCondition, ThrottleReason
from tests.support.gpu_samplers import PATIENCE_S, SamplerProcess
from tests.support.nvml_recordings import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    UNKNOWN,
    Replay,
    a100,
    recording,
    uuid,
)
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RESET_REQUIRED, LIBRARY_MISMATCH, NO_PERMISSION = 16, 18, 4


class Sampler(SamplerProcess):
    """A sampler that replays a recording."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.replay = Replay(path / "nvml.json", content)
        super().__init__(path, self.replay.environ())

    def change(self, device: int, **answers: Any) -> None:
        """Let a GPU answer otherwise from now on."""
        self.replay.content["devices"][device].update(answers)
        self.replay.write()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Sampler]]:
    samplers: list[Sampler] = []

    def run(content: dict[str, Any]) -> Sampler:
        samplers.append(Sampler(tmp_path, content))
        return samplers[-1]

    yield run
    for sampler in samplers:
        sampler.close()


Start: TypeAlias = "Callable[[dict[str, Any]], Sampler]"


def test_a_busy_gpu_is_told_whole(start: Start) -> None:
    sampler = start(recording(a100(0), a100(1, [{"pid": os.getpid(), "usedGpuMemory": GIB}])))

    sample = sampler.sample()

    assert (sample.pid, sample.driver_version, sample.unavailable) == (sampler.process.pid, "550.127.05", "")
    first, second = sample.gpus
    figures = first.figures
    assert (figures.index, figures.uuid, figures.name) == (0, uuid(0), "NVIDIA A100-SXM4-40GB")
    assert (figures.busy_frac, figures.memory_busy_frac) == (0.97, 0.61)
    assert (figures.memory_used_bytes, figures.memory_total_bytes) == (31 * GIB, 40 * GIB)
    assert (figures.temperature_celsius, figures.power_watts, figures.power_limit_watts) == (54.0, 318.412, 400.0)
    assert (figures.sm_clock_hz, figures.sm_clock_max_hz) == (1_335_000_000, 1_410_000_000)
    assert figures.memory_clock_hz == 1_215_000_000
    assert figures.throttle_reasons == [ThrottleReason.SW_POWER_CAP]
    assert (figures.ecc_corrected_errors, figures.ecc_uncorrected_errors) == (2, 0)
    assert (figures.is_row_remap_pending, figures.has_row_remap_failed) == (False, False)
    (process,) = second.processes
    assert (process.pid, process.used_bytes) == (os.getpid(), GIB)
    assert os.getppid() in process.ancestors or os.getppid() <= 1


def test_what_a_gpu_does_not_support_is_not_known_and_nothing_else_is_lost(start: Start) -> None:
    bare = {"nvmlDeviceGetUUID": uuid(0), "nvmlDeviceGetTemperature(0)": 41, "nvmlDeviceRegisterEvents": {"error": 3}}
    figures = start(recording(bare)).sample().gpus[0].figures

    assert figures.temperature_celsius == 41
    assert figures.name == ""
    assert {figures.busy_frac, figures.memory_used_bytes, figures.power_watts, figures.sm_clock_hz} == {None}
    assert {figures.ecc_corrected_errors, figures.is_row_remap_pending} == {None}
    assert (figures.throttle_reasons, figures.mig_instances) == ([], [])


def test_figures_that_cannot_be_are_not_known_and_spoil_no_other(start: Start) -> None:
    highest = 2**64 - 1
    mad = a100(
        0,
        [{"pid": os.getpid(), "usedGpuMemory": highest}],
        nvmlDeviceGetMemoryInfo={"total": highest, "used": highest, "free": 0},
        nvmlDeviceGetUtilizationRates={"gpu": 4_000_000_000, "memory": 0},
        **{"nvmlDeviceGetTemperature(0)": 4_294_967_295, "nvmlDeviceGetTotalEccErrors(0, 0)": highest},
    )

    (gpu,) = start(recording(mad)).sample().gpus

    figures = gpu.figures
    assert {figures.memory_total_bytes, figures.temperature_celsius, figures.ecc_corrected_errors} == {None}
    assert (figures.busy_frac, figures.power_watts, gpu.processes[0].used_bytes) == (1.0, 318.412, None)


def test_an_older_driver_knows_throttle_reasons_by_their_old_name(start: Start) -> None:
    old = a100(0, nvmlDeviceGetCurrentClocksEventReasons={"error": 13}, nvmlDeviceGetCurrentClocksThrottleReasons=0x69)

    assert start(recording(old)).sample().gpus[0].figures.throttle_reasons == [
        ThrottleReason.HW_SLOWDOWN,
        ThrottleReason.SW_THERMAL,
        ThrottleReason.HW_THERMAL,
    ]


def test_xids_are_counted_with_their_age_also_of_a_gpu_that_dies_of_them(start: Start) -> None:
    sampler = start(recording(a100(0), a100(1)))
    sampler.sample()

    sampler.replay.content["events"] += [{"device": 1, "xid": 79}, {"device": 0, "xid": 31}, {"device": 0, "xid": 31}]
    sampler.change(1, nvmlDeviceGetUUID={"error": GPU_IS_LOST}, nvmlDeviceGetMigMode={"error": GPU_IS_LOST})
    # A sample may come between the two of one code.
    sample = sampler.sample_with(lambda sample: sum(xid.times for xid in sample.gpus[0].figures.xids) >= 2)

    well, lost = (gpu.figures for gpu in sample.gpus)
    assert [(xid.code, xid.times) for xid in well.xids] == [(31, 2)]
    assert 0 <= well.xids[0].age_s < PATIENCE_S
    assert (lost.condition, lost.uuid) == (GpuCondition.LOST, uuid(1))
    assert [xid.code for xid in lost.xids] == [79]
    assert lost.memory_used_bytes is None


def test_a_gpu_that_gets_lost_takes_no_other_with_it_and_is_not_asked_again(start: Start) -> None:
    sampler = start(recording(a100(0), a100(1)))
    sampler.sample()

    sampler.replay.content["events"].append({"error": GPU_IS_LOST})
    sampler.change(0, nvmlDeviceGetMemoryInfo={"error": GPU_IS_LOST})
    sample = sampler.sample_with(lambda sample: sample.gpus[0].figures.condition is GpuCondition.LOST)
    assert sample.gpus[1].figures.condition is GpuCondition.OK

    sampler.change(0, nvmlDeviceGetMigMode={"exit": 9}, nvmlDeviceGetMemoryInfo={"exit": 9})
    assert sampler.sample_with(lambda sample: sample).gpus[0].figures.condition is GpuCondition.LOST
    assert sampler.sample().gpus[1].figures.busy_frac == 0.97

    sampler.replay.content["events"].append({"device": 1, "xid": 31})
    sampler.replay.write()
    well = sampler.sample_with(lambda sample: sample.gpus[1].figures.xids).gpus[1].figures
    assert [xid.code for xid in well.xids] == [31]


def test_a_gpu_that_tells_nothing_is_not_called_well_until_it_does(start: Start) -> None:
    names = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature(0)", "nvmlDeviceGetName")
    answers = a100(0)
    sampler = start(recording(answers | {name: {"error": UNKNOWN} for name in names}))
    assert sampler.sample().gpus[0].figures.condition is GpuCondition.UNREADABLE

    sampler.change(0, **{names[0]: answers[names[0]]})
    sampler.sample_with(lambda sample: sample.gpus[0].figures.condition is GpuCondition.OK)


def test_a_gpu_that_needs_a_reset_is_well_again_after_it(start: Start) -> None:
    sampler = start(recording(a100(0, nvmlDeviceGetUtilizationRates={"error": RESET_REQUIRED})))
    assert sampler.sample().gpus[0].figures.condition is GpuCondition.RESET_REQUIRED

    sampler.change(0, nvmlDeviceGetUtilizationRates={"gpu": 1, "memory": 1})
    sampler.sample_with(lambda sample: sample.gpus[0].figures.condition is GpuCondition.OK)


@pytest.mark.parametrize(
    ("code", "condition"), [(GPU_IS_LOST, GpuCondition.LOST), (NO_PERMISSION, GpuCondition.UNREADABLE)]
)
def test_a_gpu_without_a_handle_is_told_all_the_same(start: Start, code: int, condition: GpuCondition) -> None:
    sampler = start(recording(a100(0, nvmlDeviceGetHandleByIndex={"error": code}), a100(1)))

    bad, good = (gpu.figures for gpu in sampler.sample().gpus)

    assert (bad.index, bad.condition, good.condition) == (0, condition, GpuCondition.OK)


def test_a_gpu_in_parts_is_told_with_its_parts_and_who_holds_them(start: Start) -> None:
    parts = [
        {
            "nvmlDeviceGetUUID": f"MIG-{number}",
            "nvmlDeviceGetMemoryInfo": {"total": 10 * GIB, "used": number * GIB, "free": 0},
            "nvmlDeviceGetComputeRunningProcesses_v3": [{"pid": os.getpid(), "usedGpuMemory": None}],
        }
        for number in (1, 2)
    ]
    whole = a100(0, migs=parts, nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7)

    (gpu,) = start(recording(whole | {"nvmlDeviceGetUtilizationRates": {"error": NOT_SUPPORTED}})).sample().gpus

    assert [(part.uuid, part.memory_used_bytes) for part in gpu.figures.mig_instances] == [
        ("MIG-1", GIB),
        ("MIG-2", 2 * GIB),
    ]
    assert sorted((process.mig_uuid, process.used_bytes) for process in gpu.processes) == [
        ("MIG-1", None),
        ("MIG-2", None),
    ]


def test_a_process_of_mps_counts_once_with_what_it_holds(start: Start) -> None:
    held = [{"pid": 4_000_000, "usedGpuMemory": GIB}]
    gpu = a100(0, held, nvmlDeviceGetMPSComputeRunningProcesses_v3=held)

    (process,) = start(recording(gpu)).sample().gpus[0].processes

    assert (process.pid, process.used_bytes, process.ancestors) == (4_000_000, GIB, [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nvmlInit": {"error": DRIVER_NOT_LOADED}}, "the NVIDIA driver is not loaded"),
        ({"nvmlInit": {"error": LIBRARY_MISMATCH}}, "different versions"),
        ({"nvmlInit": {"error": UNKNOWN}}, "NVML cannot be used"),
        ({"nvmlDeviceGetCount": 0}, "no GPU"),
    ],
)
def test_where_there_is_nothing_to_see_it_says_why_once_and_ends(
    start: Start, changes: dict[str, Any], words: str
) -> None:
    sampler = start(recording(**changes))

    assert words in sampler.sample().unavailable
    _, noise = sampler.process.communicate(timeout=PATIENCE_S)
    assert (sampler.process.returncode, noise) == (0, b"")


def test_without_events_it_samples_on(start: Start) -> None:
    sampler = start(recording(a100(0), nvmlEventSetCreate={"error": NOT_SUPPORTED}))

    assert sampler.sample().gpus[0].figures.busy_frac == 0.97
    assert sampler.sample().gpus[0].figures.busy_frac == 0.97


def test_a_flood_of_events_does_not_keep_it_from_sampling(start: Start) -> None:
    sampler = start(recording(a100(0)))
    sampler.replay.content["events"] += [{"device": 0, "xid": 13}] * 1000
    sampler.replay.write()

    first = sampler.sample_with(lambda sample: sample.gpus[0].figures.xids).gpus[0].figures.xids[0]

    assert first.times <= 256
    assert sampler.sample().gpus[0].figures.xids[0].times > first.times


def test_without_an_agent_it_does_not_start_and_with_it_it_ends(tmp_path: Path) -> None:
    replay = Replay(tmp_path / "nvml.json", recording(a100(0)))
    argv = [sys.executable, "-P", "-m", "agent.machine.gpu_sampler", str(tmp_path / "inbox")]

    orphan = subprocess.run([*argv, "1"], env=replay.environ(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert (orphan.returncode, orphan.stderr) == (1, b"")

    program = (
        "import os, subprocess, sys\np = subprocess.Popen([*sys.argv[1:], str(os.getpid())])\nprint(p.pid)\np.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-u", "-c", program, *argv], env=replay.environ(), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(tmp_path / "inbox"))
        inbox.settimeout(PATIENCE_S)
        assert decode_sample(inbox.recv(1 << 20)).pid == child
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until(lambda: not is_alive(child), PATIENCE_S, "the sampler's end")


def test_garbage_is_no_sample() -> None:
    with pytest.raises(MalformedSampleError):
        decode_sample(b"\xc1garbage")
