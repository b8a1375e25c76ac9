"""Named barriers and first-one-first blocks in the job's store; their errors name who is missing, where, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.barriers.first_one_first import local_master_first, master_first
    from ddpcore.barriers.named_barriers import announce, barrier, exchange, leave
    from ddpcore.barriers.one_rank_blocks import only_on_master, rank_zero_only

__all__ = [
    "announce",
    "barrier",
    "exchange",
    "leave",
    "local_master_first",
    "master_first",
    "only_on_master",
    "rank_zero_only",
]

__getattr__ = lazy_names(
    __name__,
    {
        "announce": "named_barriers",
        "barrier": "named_barriers",
        "exchange": "named_barriers",
        "leave": "named_barriers",
        "local_master_first": "first_one_first",
        "master_first": "first_one_first",
        "only_on_master": "one_rank_blocks",
        "rank_zero_only": "one_rank_blocks",
    },
)
