"""Models whose parameters are sharded over ranks by torch's `fully_shard`: they average gradients themselves.

`wrap` checks such a model as any other and returns it as it is. Every forward and backward gathers parameters from all
ranks, so every rank needs equally many of them.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from ddpcore.errors import WrapError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from torch.distributed.fsdp import FSDPModule

_MODULE = "torch.distributed.fsdp"
"""Takes half a second to import: nobody pays for it who has no such model."""


def is_fully_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether `fully_shard` was applied to a module as a whole."""
    fsdp = sys.modules.get(_MODULE)
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def check_sharding(model: nn.Module, asked: Collection[str]) -> bool:
    """Return whether a model is fully sharded; `asked` names what the program wants of DDP.

    Raises WrapError if a part of it is sharded and the whole is not, it is sharded by the older wrapper, or the program
    wants of DDP what this model does itself.
    """
    fsdp = sys.modules.get(_MODULE)
    if fsdp is None:
        return False
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            what = f"its part {name!r}" if name else "it"
            raise WrapError(
                f"{what} is wrapped in FullyShardedDataParallel, which names parameters in its own way: shard it with "
                "torch.distributed.fsdp.fully_shard instead"
            )
        if is_fully_sharded(module) and not is_fully_sharded(model):
            raise WrapError(
                f"its part {name!r} is fully sharded and the whole is not: call fully_shard(model) after its parts, or "
                "the gradients of the rest are averaged by nobody"
            )
    if not is_fully_sharded(model):
        return False
    if asked:
        raise WrapError(
            f"{', '.join(sorted(asked))}: these are DistributedDataParallel's, and a fully sharded model averages its "
            "gradients itself: leave them out, and give such options to fully_shard"
        )
    return True
