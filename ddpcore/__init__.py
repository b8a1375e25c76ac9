"""What runs inside a rank: the probe that reports its state, named barriers, and (as it grows) the training engine.

The names below load on first use (PEP 562), so that importing `ddpcore.wire` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpcore.barriers import barrier
    from ddpcore.probe import phase, report_step

__all__ = ["barrier", "phase", "report_step"]

_HOMES = {"barrier": "ddpcore.barriers", "phase": "ddpcore.probe", "report_step": "ddpcore.probe"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpcore' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
