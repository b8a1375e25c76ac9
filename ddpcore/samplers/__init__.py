"""Which samples a rank takes: orders, shares and cursors, and the samplers of torch's DataLoader made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.samplers.batch_sampler import ElasticBatchSampler
    from ddpcore.samplers.cursor import Cursor
    from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
    from ddpcore.samplers.evaluation import EvaluationSampler
    from ddpcore.samplers.length_order import LengthGroupedOrder
    from ddpcore.samplers.order import Order, SequentialOrder, ShuffledOrder, sample_seed
    from ddpcore.samplers.sharded_dataset import ShardedDataset
    from ddpcore.samplers.sharded_order import ShardedOrder
    from ddpcore.samplers.shares import RankMemory, Share, fit_memory, loss_factor, suggest_weights
    from ddpcore.samplers.weighted_order import WeightedOrder

__all__ = [
    "Cursor",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "EvaluationSampler",
    "LengthGroupedOrder",
    "Order",
    "RankMemory",
    "SequentialOrder",
    "ShardedDataset",
    "ShardedOrder",
    "Share",
    "ShuffledOrder",
    "WeightedOrder",
    "fit_memory",
    "loss_factor",
    "sample_seed",
    "suggest_weights",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Cursor": "cursor",
        "ElasticBatchSampler": "batch_sampler",
        "ElasticDistributedSampler": "distributed_sampler",
        "EvaluationSampler": "evaluation",
        "LengthGroupedOrder": "length_order",
        "Order": "order",
        "RankMemory": "shares",
        "SequentialOrder": "order",
        "ShardedDataset": "sharded_dataset",
        "ShardedOrder": "sharded_order",
        "Share": "shares",
        "ShuffledOrder": "order",
        "WeightedOrder": "weighted_order",
        "fit_memory": "shares",
        "loss_factor": "shares",
        "sample_seed": "order",
        "suggest_weights": "shares",
    },
)
