"""The GPUs of a node on a replayed NVML, and what is to be said of them."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from agent.doctor.gpus import gpu_rows, models, models_text, sample_gpus
from agent.doctor.interpreter import Interpreter
from agent.wire.examination import Health
from tests.support.nvml_recordings import DRIVER_NOT_LOADED, GIB, GPU_IS_LOST, Replay, a100, recording

if TYPE_CHECKING:
    from pathlib import Path

    from agent.node_state.gpu_sample import GpuSample

PATIENCE_S = 20.0
HEALTHY = Interpreter("3.11.9", "2.13.0", "12.9", "2.27.5", num_gpus=2, is_imported=True)


def sampled(monkeypatch: pytest.MonkeyPatch, path: Path, content: dict[str, Any], within_s: float = PATIENCE_S) -> Any:
    environ = Replay(path / "nvml.json", content).environ()
    for name in ("PYTHONPATH", "NVML_RECORDING"):
        monkeypatch.setenv(name, environ[name])
    return sample_gpus(within_s)


def told(sample: GpuSample | None, interpreter: Interpreter = HEALTHY, **where: Any) -> list[tuple[str, Health, str]]:
    return [(row.name, row.status, row.detail) for row in gpu_rows(sample, interpreter, **where)]


def test_gpus_that_are_well_are_counted_by_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sample = sampled(monkeypatch, tmp_path, recording(a100(0), a100(1)))

    assert told(sample) == [("gpus", Health.OK, "2 x NVIDIA A100-SXM4-40GB, driver 550.127.05")]
    assert models(sample) == ["NVIDIA A100-SXM4-40GB"] * 2
    assert models_text(["A", "B", "A", ""]) == "2 x A, 1 x B, 1 x unknown"
    assert models(None) == []


def test_a_gpu_that_is_lost_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = a100(1, nvmlDeviceGetUtilizationRates={"error": GPU_IS_LOST})
    sample = sampled(monkeypatch, tmp_path, recording(a100(0), *[lost] * 4))

    assert told(sample)[0] == ("gpus", Health.BAD, "GPU 1 is lost, GPU 2 is lost, GPU 3 is lost and 1 more, of 5")


def test_a_gpu_in_use_is_told_with_who_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy = [a100(number, [{"pid": 999_999, "usedGpuMemory": 31 * GIB}]) for number in range(4)]
    sample = sampled(monkeypatch, tmp_path, recording(*busy))

    who = "; ".join(f"pid 999999 is on GPU {number} with 31744 MiB" for number in range(3))
    assert told(sample)[1] == ("gpu_use", Health.WARN, f"{who}; 1 more")


@pytest.mark.parametrize(
    ("cuda", "detail"),
    [
        ("12.9", "torch 2.13.0 can use none of the 1 GPUs (built for 12.9)"),
        ("", "torch 2.13.0 can use none of the 1 GPUs (built without CUDA)"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, detail: str
) -> None:
    sample = sampled(monkeypatch, tmp_path, recording(a100(0)))

    without = Interpreter("3.11.9", "2.13.0", cuda, num_gpus=0, is_imported=True)

    assert told(sample, without)[1:] == [("torch_gpus", Health.BAD, detail)]
    assert len(told(sample, Interpreter(error="it does not run"))) == 1, "of which nothing is known"
    slow = Interpreter("3.11.9", "2.13.0", cuda, num_gpus=1, is_imported=True)
    assert [(name, status) for name, status, _ in told(sample, slow)[1:]] == [("torch_gpus", Health.WARN)]


def test_a_driver_that_hangs_is_bad_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sample = sampled(monkeypatch, tmp_path, recording(nvmlInit={"hang": True}), within_s=0.5)

    assert told(sample) == [("gpus", Health.BAD, "the NVIDIA driver does not answer")]


def test_a_sampler_that_ends_without_a_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sampled(monkeypatch, tmp_path, recording(nvmlInit={"exit": 3})) is None


def test_a_full_disk_is_no_reason_to_fall_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))

    ((_, status, detail),) = told(sample_gpus(), pci_devices=tmp_path)

    assert (status, detail.startswith("none: its answer cannot be received: ")) == (Health.OK, True)


def test_gpus_without_a_driver_are_bad_where_some_are_plugged_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sample = sampled(monkeypatch, tmp_path, recording(nvmlInit={"error": DRIVER_NOT_LOADED}))
    pci = tmp_path / "pci"

    assert told(sample, pci_devices=pci) == [("gpus", Health.OK, "none: the NVIDIA driver is not loaded")]
    for name, vendor, kind in (
        ("0", "0x10de", "0x030200"),
        ("1", "0x10de", "0x040300"),
        ("2", "0x1af4", "0x030000"),
        ("3", None, ""),
    ):
        (pci / name).mkdir(parents=True)
        if vendor:
            (pci / name / "vendor").write_text(f"{vendor}\n")
            (pci / name / "class").write_text(f"{kind}\n")
    assert told(sample, pci_devices=pci) == [
        ("gpus", Health.BAD, "1 plugged in, and none to be used: the NVIDIA driver is not loaded")
    ]
