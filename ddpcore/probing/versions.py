"""Versions of what a rank runs on. Looks only at what the program has imported itself."""

from __future__ import annotations

import os
import sys

from ddpcore.probing.stack import sendable

_MAX_CHARS = 64


def versions() -> dict[str, str]:
    """Return `{"python": "3.11.7", "torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.3"}`, without what is not there."""
    found = {"python": sys.version.split()[0], "kernel": os.uname().release}
    torch = sys.modules.get("torch")
    told = getattr(torch, "version", None)
    for name, text in (
        ("torch", getattr(torch, "__version__", None)),
        ("cuda", getattr(told, "cuda", None)),
        ("rocm", getattr(told, "hip", None)),
        ("nccl", _nccl()),
    ):
        if text:
            found[name] = str(text)
    return {name: sendable(text, _MAX_CHARS) for name, text in found.items()}


def _nccl() -> str:
    module = sys.modules.get("torch.cuda.nccl")
    try:
        return ".".join(map(str, module.version())) if module else ""
    except (AttributeError, RuntimeError, TypeError):
        return ""  # this torch was built without it
