"""What the probe reads of torch's allocator, and when it must not look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddpcore.probe.gpu import MEMORY_PERIOD_S, GpuMemory
from ddpcore.wire import GpuMemoryReport


class RecordedCuda:
    """`torch.cuda` of a program with two GPUs that uses the second."""

    def __init__(self, *, is_used: bool = True, uuid: str = "8932f937-d72c-4106-c12f-20bd9faed9f6") -> None:
        self.is_used = is_used
        self.uuid = uuid
        self.num_looks = 0
        self.is_pluggable = False
        self.reserved = 2 * 2**30

    def is_initialized(self) -> bool:
        return self.is_used

    def device_count(self) -> int:
        assert self.is_used, "this would initialise CUDA"
        return 2

    def get_device_properties(self, device: int) -> Any:
        assert device == 1, "no context is made for a GPU that is not used"
        return SimpleNamespace(uuid=self.uuid)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self.is_used, "this would initialise CUDA"
        self.num_looks += 1
        if self.is_pluggable:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        if device == 0:
            return {"reserved_bytes": {"all": {"current": 0, "peak": 0}}}
        return {
            "allocated_bytes": {"all": {"current": 2**30, "peak": 3 * 2**29}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": 2 * 2**30}},
        }


HELD = (GpuMemoryReport("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 2**30, 2 * 2**30, 3 * 2**29, 2 * 2**30),)


def test_only_gpus_with_memory_are_told_under_nvmls_names() -> None:
    assert GpuMemory().look(1.0, RecordedCuda()) == HELD


def test_a_program_without_cuda_is_left_alone() -> None:
    assert GpuMemory().look(1.0, RecordedCuda(is_used=False)) == ()


def test_this_process_uses_no_gpu() -> None:
    assert GpuMemory().look(1.0) == ()


def test_it_looks_once_a_second_at_most() -> None:
    memory, cuda = GpuMemory(), RecordedCuda()

    assert [memory.look(now_s, cuda) for now_s in (5.0, 5.5, 5.0 + MEMORY_PERIOD_S)] == [HELD] * 3
    assert cuda.num_looks == 4


def test_a_part_of_a_gpu_keeps_its_own_name() -> None:
    assert GpuMemory().look(1.0, RecordedCuda(uuid="MIG-x"))[0].uuid == "MIG-x"
    assert GpuMemory().look(1.0, RecordedCuda(uuid=""))[0].uuid == ""


def test_an_allocator_without_figures_ends_no_rank_and_is_not_asked_again() -> None:
    memory, cuda = GpuMemory(), RecordedCuda()
    assert memory.look(1.0, cuda) == HELD

    cuda.is_pluggable = True
    assert [memory.look(now_s, cuda) for now_s in (10.0, 20.0, 30.0)] == [HELD] * 3
    assert cuda.num_looks == 3
