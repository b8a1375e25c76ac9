"""What runs inside a rank: the training engine and its parts, named barriers, and the probe.

The names below load on first use, so that importing `ddpcore.wire` never imports torch. The packages show more of each
part: `ddpcore.samplers`, `ddpcore.parallel`, `ddpcore.barriers`, `ddpcore.process_group`, `ddpcore.checkpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.barriers.first_one_first import local_master_first, master_first
    from ddpcore.barriers.named_barriers import barrier, exchange
    from ddpcore.barriers.one_rank_blocks import only_on_master, rank_zero_only
    from ddpcore.checkpoint.checkpointer import Checkpointer
    from ddpcore.checkpoint.solo_loading import load_checkpoint, load_tensors
    from ddpcore.engine.engine import Engine
    from ddpcore.parallel.wrapping import unwrap, wrap
    from ddpcore.prefetch import Prefetcher
    from ddpcore.probe.probe import phase, report_step
    from ddpcore.process_group.open_group import open_process_group
    from ddpcore.samplers.batch_sampler import ElasticBatchSampler

__all__ = [
    "Checkpointer",
    "ElasticBatchSampler",
    "Engine",
    "Prefetcher",
    "barrier",
    "exchange",
    "load_checkpoint",
    "load_tensors",
    "local_master_first",
    "master_first",
    "only_on_master",
    "open_process_group",
    "phase",
    "rank_zero_only",
    "report_step",
    "unwrap",
    "wrap",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Checkpointer": "checkpoint.checkpointer",
        "ElasticBatchSampler": "samplers.batch_sampler",
        "Engine": "engine.engine",
        "Prefetcher": "prefetch",
        "barrier": "barriers.named_barriers",
        "exchange": "barriers.named_barriers",
        "load_checkpoint": "checkpoint.solo_loading",
        "load_tensors": "checkpoint.solo_loading",
        "local_master_first": "barriers.first_one_first",
        "master_first": "barriers.first_one_first",
        "only_on_master": "barriers.one_rank_blocks",
        "open_process_group": "process_group.open_group",
        "phase": "probe.probe",
        "rank_zero_only": "barriers.one_rank_blocks",
        "report_step": "probe.probe",
        "unwrap": "parallel.wrapping",
        "wrap": "parallel.wrapping",
    },
)
