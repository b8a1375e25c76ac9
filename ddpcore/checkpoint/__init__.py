"""Checkpoints: atomic, verified, asynchronous, resumable at another world size. `checkpointer` has the whole of it.

The commands of `python -m ddpcore.checkpoint` that need no torch do not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.checkpoint.checkpointer import Checkpoint, Checkpointer
    from ddpcore.checkpoint.restoring import Fit, Stateful, restore
    from ddpcore.checkpoint.solo_loading import LoadedCheckpoint, load_checkpoint, load_tensors

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Fit",
    "LoadedCheckpoint",
    "Stateful",
    "load_checkpoint",
    "load_tensors",
    "restore",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Checkpoint": "checkpointer",
        "Checkpointer": "checkpointer",
        "Fit": "restoring",
        "LoadedCheckpoint": "solo_loading",
        "Stateful": "restoring",
        "load_checkpoint": "solo_loading",
        "load_tensors": "solo_loading",
        "restore": "restoring",
    },
)
