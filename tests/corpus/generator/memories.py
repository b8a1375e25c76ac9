"""Memory of a story's ranks: what they hold as time goes by, of their node's container or of their GPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agent.node_state.observations import LimitSampled, MemorySampled
from agent.wire.machine import LimitKind, LimitReport
from ddpcore.wire import GpuMemoryReport
from tests.corpus.generator.kinds import Kind
from tests.support.sim_gpus import TOTAL_BYTES, give_gpus, gpu_uuid
from tests.support.sim_node import START_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.node_state.gpu_sample import GpuSample
    from tests.corpus.generator.cluster import StoryCluster
    from tests.support.sim_gpus import SimGpus
    from tests.support.sim_node import SimNode

MIB, GIB = 2**20, 2**30
BASE_BYTES = 2 * GIB
FREE_BYTES = 8 * GIB
"""Of a node's container, beyond what its ranks hold from the start."""
JITTER_BYTES = 30 * MIB
"""Batches come and go."""
LOADING_S = 14.0
"""From the start: a model is loaded for some seconds into the training."""
EPOCH_S = 8.0
GPU_BASE_BYTES = 20 * GIB
NO_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.02 GiB is free."
)


class NodeMemory:
    """The container of one node: its ranks share the limit, and the kernel kills the largest of them.

    Attributes:
        grown: By rank: what it holds beyond the rest, at a time.
    """

    def __init__(self, cluster: StoryCluster, node: SimNode, kind: Kind) -> None:
        self._cluster, self._node = cluster, node
        self._limit_bytes = BASE_BYTES * len(node.ranks) + FREE_BYTES
        self.grown: dict[int, Callable[[float], float]] = {}
        share = FREE_BYTES / len(node.ranks)
        for rank in node.ranks:
            if kind is Kind.LOADS:
                self.grown[rank.rank] = lambda now_s: 0.6 * share * min(1.0, (now_s - START_S) / LOADING_S)
            elif kind is Kind.EPOCH_MEMORY:
                self.grown[rank.rank] = lambda now_s: 0.4 * share * (now_s % EPOCH_S) / EPOCH_S
            rank.memory = self._look_of(rank.rank)

    def leak(self, rank: int, for_s: float, num_leaking: int) -> None:
        """Let a rank, with so many others, take all that is free within some seconds."""
        begin_s = self._cluster.now_s
        rate_hz = FREE_BYTES / num_leaking / for_s
        self.grown[rank] = lambda now_s: rate_hz * (now_s - begin_s)

    def fill(self, rank: int, tau_s: float) -> None:
        """Let a rank's cache fill, ever more slowly, to a part of what is free."""
        begin_s, part = self._cluster.now_s, 0.6 * FREE_BYTES / len(self._node.ranks)
        self.grown[rank] = lambda now_s: part * (1 - math.exp(-(now_s - begin_s) / tau_s))

    def _held_bytes(self, rank: int, now_s: float) -> int:
        grown = self.grown.get(rank)
        jitter = JITTER_BYTES * ((int(5 * now_s) * 7 + 13 * rank) % 11) / 11
        return int(BASE_BYTES + jitter + (0.0 if grown is None else grown(now_s)))

    def _look_of(self, rank: int) -> Callable[[float], MemorySampled]:
        def look(now_s: float) -> MemorySampled:
            held = {one.rank: self._held_bytes(one.rank, now_s) for one in self._node.ranks if one.end is None}
            used_bytes = sum(held.values())
            if used_bytes >= self._limit_bytes:
                largest = max(held, key=lambda one: held[one])
                self._cluster.kill_for_memory(largest)
            limit = LimitReport(LimitKind.CGROUP, self._limit_bytes, used_bytes)
            return MemorySampled(held.get(rank, 0), [LimitSampled("container", limit)])

        return look


class GpuMemories:
    """GPUs of 80 GiB, one for each rank."""

    def __init__(self, cluster: StoryCluster) -> None:
        self._cluster = cluster
        self._leaks: dict[int, tuple[float, float]] = {}
        for node, gpus in zip(cluster.nodes, give_gpus(cluster), strict=True):
            for rank in node.ranks:
                self._hold(rank.rank, GPU_BASE_BYTES)
            node.sample_gpus = self._sampler(node, gpus)

    def leak(self, rank: int, for_s: float) -> None:
        """Let a rank's GPU fill within some seconds."""
        self._leaks[rank] = (self._cluster.now_s, for_s)

    def _hold(self, index: int, held: int) -> None:
        rank = self._cluster.story_ranks[index]
        uuid = gpu_uuid(self._cluster.node_of(rank).node_rank, rank.local_rank)
        rank.gpu_memory = (GpuMemoryReport(uuid, held - GIB, held, held - GIB, held),)

    def _sampler(self, node: SimNode, gpus: SimGpus) -> Callable[[float], GpuSample]:
        def sample(now_s: float) -> GpuSample:
            for rank in node.ranks:
                leak = self._leaks.get(rank.rank)
                if leak is None or rank.end is not None:
                    continue
                held = GPU_BASE_BYTES + (TOTAL_BYTES - GPU_BASE_BYTES) * (now_s - leak[0]) / leak[1]
                if held > TOTAL_BYTES - 2 * GIB:
                    rank.end = (1, None, NO_MEMORY)
                else:
                    self._hold(rank.rank, int(held))
            return gpus.sample(now_s)

        return sample
