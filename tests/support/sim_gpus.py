"""GPUs of a simulated node, and the mistakes that are made with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agent.node_state.gpu_sample import SAMPLE_VERSION, GpuProcess, GpuSample, SampledGpu
from agent.wire.machine import GpuFigures, HostReport, ThrottleReason, Xid
from ddpcore.wire import GpuMemoryReport

if TYPE_CHECKING:
    from tests.support.sim import SimCluster
    from tests.support.sim_node import SimNode

GIB = 2**30
CONTEXT_BYTES = 512 * 2**20
TOTAL_BYTES = 80 * GIB


def gpu_uuid(node: int, index: int) -> str:
    """Return the UUID of a simulated GPU."""
    return f"GPU-{node:08x}-0000-0000-0000-{index:012x}"


class SimGpus:
    """A GPU for each rank of a node, each rank on its own, and spare ones; `change` and `hold` let things go wrong.

    Attributes:
        extra: By index: processes beside the ranks'.
        changes: By index: figures that differ.
        xids: By index: code and time of each Xid error that its driver logs.
    """

    def __init__(self, node: SimNode, num_spare: int = 0) -> None:
        self._node = node
        self.num_gpus = len(node.ranks) + num_spare
        self.extra: dict[int, list[GpuProcess]] = {}
        self.changes: dict[int, dict[str, Any]] = {}
        self.xids: dict[int, list[tuple[int, float]]] = {}
        for rank in node.ranks:
            torch = (22 + rank.local_rank) * GIB
            uuid = gpu_uuid(node.node_rank, rank.local_rank)
            rank.gpu_memory = (GpuMemoryReport(uuid, torch - 3 * GIB, torch, torch - GIB, torch),)
        node.sample_gpus = self.sample
        node.host = HostReport(2.5, 0, 0, 8 * GIB, GIB, 500 * GIB, 120 * GIB, 1.25e6, 3.5e6)

    def change(self, index: int, **figures: Any) -> None:
        """Give a GPU other figures."""
        self.changes.setdefault(index, {}).update(figures)

    def hold(self, index: int, rank: int, used_bytes: int = CONTEXT_BYTES) -> None:
        """Let a rank of the node hold memory on a GPU."""
        pid = next(held.pid for held in self._node.ranks if held.rank == rank)
        self.extra.setdefault(index, []).append(GpuProcess(pid, used_bytes))

    def fail(self, index: int, code: int, at_s: float) -> None:
        """Let the driver log an Xid error of a GPU; a sample reports its true age."""
        self.xids.setdefault(index, []).append((code, at_s))

    def sample(self, now_s: float) -> GpuSample:
        """Return what the sampler says."""
        gpus = [self._gpu(index, now_s) for index in range(self.num_gpus)]
        return GpuSample(SAMPLE_VERSION, 77, driver_version="550.127.05", gpus=gpus)

    def _gpu(self, index: int, now_s: float) -> SampledGpu:
        processes = list(self.extra.get(index, []))
        for rank in self._node.ranks[index : index + 1]:
            reserved = sum(told.reserved_bytes for told in rank.gpu_memory)
            if rank.end is None:
                processes.insert(0, GpuProcess(rank.pid, reserved + CONTEXT_BYTES))
        figures = GpuFigures(
            index=index,
            uuid=gpu_uuid(self._node.node_rank, index),
            name="NVIDIA H100 80GB HBM3",
            busy_frac=min(1.0, 0.9 + 0.02 * index),
            memory_busy_frac=0.5,
            memory_total_bytes=TOTAL_BYTES,
            memory_used_bytes=sum(process.used_bytes or 0 for process in processes) + CONTEXT_BYTES,
            temperature_celsius=58.0 + 3 * index,
            power_watts=612.0,
            power_limit_watts=700.0,
            sm_clock_hz=1_755_000_000,
            sm_clock_max_hz=1_980_000_000,
            throttle_reasons=[ThrottleReason.SW_POWER_CAP],
            ecc_corrected_errors=0,
            ecc_uncorrected_errors=0,
            xids=[Xid(code, 1, now_s - at_s) for code, at_s in self.xids.get(index, []) if at_s <= now_s],
        )
        return SampledGpu(msgspec.structs.replace(figures, **self.changes.get(index, {})), processes)


def give_gpus(sim: SimCluster, num_spare: int = 0) -> list[SimGpus]:
    """Give every rank of a cluster a GPU, and each node some that no rank uses; return them by node."""
    return [SimGpus(node, num_spare) for node in sim.nodes]
