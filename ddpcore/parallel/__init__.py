"""One model on several ranks or devices: DistributedDataParallel, checked before it starts; balanced DataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.parallel.balanced import BalancedDataParallel
    from ddpcore.parallel.comm_hooks import PowerSGD
    from ddpcore.parallel.wrapping import accumulate, joined, unwrap, wrap

__all__ = ["BalancedDataParallel", "PowerSGD", "accumulate", "joined", "unwrap", "wrap"]

__getattr__ = lazy_names(
    __name__,
    {
        "BalancedDataParallel": "balanced",
        "PowerSGD": "comm_hooks",
        "accumulate": "wrapping",
        "joined": "wrapping",
        "unwrap": "wrapping",
        "wrap": "wrapping",
    },
)
