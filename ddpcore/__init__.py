"""What runs inside a rank: the training engine and its parts, named barriers, and the probe.

The names below load on first use (PEP 562), so that importing `ddpcore.wire` never imports torch. Further parts of the
engine are in modules of their own: `ddpcore.checkpoint`, `ddpcore.order`, `ddpcore.shares`, `ddpcore.balanced`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpcore.barriers import barrier, exchange, local_master_first, master_first, only_on_master, rank_zero_only
    from ddpcore.checkpoint import Checkpointer
    from ddpcore.engine.engine import Engine
    from ddpcore.parallel import unwrap, wrap
    from ddpcore.prefetch import Prefetcher
    from ddpcore.probe import phase, report_step
    from ddpcore.process_group import open_process_group
    from ddpcore.samplers import ElasticBatchSampler

__all__ = [
    "Checkpointer",
    "ElasticBatchSampler",
    "Engine",
    "Prefetcher",
    "barrier",
    "exchange",
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

_HOMES = {
    "Checkpointer": "ddpcore.checkpoint",
    "ElasticBatchSampler": "ddpcore.samplers",
    "Engine": "ddpcore.engine.engine",
    "Prefetcher": "ddpcore.prefetch",
    "barrier": "ddpcore.barriers",
    "exchange": "ddpcore.barriers",
    "local_master_first": "ddpcore.barriers",
    "master_first": "ddpcore.barriers",
    "only_on_master": "ddpcore.barriers",
    "open_process_group": "ddpcore.process_group",
    "phase": "ddpcore.probe",
    "rank_zero_only": "ddpcore.barriers",
    "report_step": "ddpcore.probe",
    "unwrap": "ddpcore.parallel",
    "wrap": "ddpcore.parallel",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpcore' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
