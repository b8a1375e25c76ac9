"""How often a call of NVML is made, and what is read of its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.machine.nvml import MOST_COST, DriverGoneError, KeptAnswers, UnusableGpuError, ask, numa_node
from agent.wire.machine import GpuCondition

if TYPE_CHECKING:
    from pathlib import Path


class Calls:
    """A call that takes a given time by a clock of its own, and counts itself."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self.num = 0
        self._clock_s = 0.0

    def __call__(self, _handle: object) -> int:
        self._clock_s += self.took_s
        self.num += 1
        return self.num

    def clock(self) -> float:
        return self._clock_s


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_a_kept_answer_is_asked_for_again_after_its_period(calls: Calls) -> None:
    kept = KeptAnswers(3.0, calls.clock)

    seen = [kept.last(10.0, float(at), calls, None) for at in range(30)]

    # The first period is longer, so that GPUs are asked at different times.
    assert [at for at in range(1, 30) if seen[at] != seen[at - 1]] == [13, 23]


def test_a_call_that_is_dear_twice_in_a_row_pauses_as_long_as_it_costs(calls: Calls) -> None:
    kept = KeptAnswers(clock=calls.clock)
    calls.took_s = 0.01
    pause_s = calls.took_s / MOST_COST
    assert kept.fresh(0.0, calls, None) == 1
    assert kept.fresh(1.0, calls, None) == 2, "one long call says little"
    assert kept.fresh(2.0, calls, None) is None
    assert kept.fresh(pause_s, calls, None) is None
    calls.took_s = 0.00001
    assert kept.fresh(1.0 + pause_s, calls, None) == 3
    assert kept.fresh(2.0 + pause_s, calls, None) == 4


def test_dear_calls_of_a_long_period_pause_longer_and_their_last_answer_stays(calls: Calls) -> None:
    kept = KeptAnswers(clock=calls.clock)
    calls.took_s = 0.02
    seen = [kept.last(10.0, float(at), calls, None) for at in range(300)]

    assert [at for at in range(1, 300) if seen[at] != seen[at - 1]] == [10, 110, 210]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, UnusableGpuError),
        (pynvml.NVML_ERROR_RESET_REQUIRED, UnusableGpuError),
        (pynvml.NVML_ERROR_UNINITIALIZED, DriverGoneError),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverGoneError),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, None),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, None),
        (pynvml.NVML_ERROR_UNKNOWN, None),
    ],
)
def test_an_error_is_of_the_gpu_of_the_driver_or_of_one_figure(code: int, error: type[Exception] | None) -> None:
    def call() -> None:
        raise pynvml.NVMLError(code)

    if error is None:
        assert ask(call) is None
        return
    with pytest.raises(error) as raised:
        ask(call)
    if isinstance(raised.value, UnusableGpuError):
        assert raised.value.condition in {GpuCondition.LOST, GpuCondition.RESET_REQUIRED}


@pytest.mark.parametrize(
    ("bus_id", "directory", "content", "node"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0", "1\n", 1),
        (b"00010000:3B:00.0", "10000:3b:00.0", "0\n", 0),
        ("00000000:3B:00.0", "0000:3b:00.0", "-1\n", None),
        ("00000000:3B:00.0", "0000:3b:00.0", "", None),
        ("00000000:3B:00.0", "0000:ff:00.0", "1\n", None),
        ("nonsense", "nonsense", "1\n", None),
    ],
)
def test_the_numa_node_of_a_gpu_is_that_of_its_pci_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bus_id: Any, directory: str, content: str, node: int | None
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", lambda _: SimpleNamespace(busId=bus_id))
    (tmp_path / directory).mkdir()
    (tmp_path / directory / "numa_node").write_text(content)

    assert numa_node(None, str(tmp_path)) == node
