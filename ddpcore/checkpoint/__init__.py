"""Checkpoints: atomic, verified, asynchronous, resumable at another world size. `checkpointer` has the whole of it.

The names below load on first use (PEP 562), so that the commands of `python -m ddpcore.checkpoint` that need no torch
do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpcore.checkpoint.checkpointer import Checkpoint, Checkpointer
    from ddpcore.checkpoint.restoring import Stateful, restore

__all__ = ["Checkpoint", "Checkpointer", "Stateful", "restore"]

_HOMES = {
    "Checkpoint": "checkpointer",
    "Checkpointer": "checkpointer",
    "Stateful": "restoring",
    "restore": "restoring",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpcore.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddpcore.checkpoint.{_HOMES[name]}"), name)
