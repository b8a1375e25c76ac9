"""Names for what DDP only numbers: the parameters that took no part in the loss.

A parameter that gets no gradient keeps its bucket from being reduced. DDP notices in the next forward and lists
indices; here its error gets a note with names.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

_INDICES = re.compile(r"[Pp]arameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MAX_NAMES = 20


def reduced_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that DDP reduces, in the order of its indices."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [
        name.removeprefix("_orig_mod.")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def explain_unused(ddp: DistributedDataParallel) -> None:
    """Have DDP's error about unused parameters carry their names as a note, which tracebacks print below it."""
    ddp.register_forward_hook(_add_note, always_call=True)


def _add_note(ddp: nn.Module, _inputs: object, _output: object) -> None:
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and (found := _INDICES.search(str(error))):
        error.add_note(
            _note(reduced_parameters(cast("nn.Module", ddp.module)), [int(index) for index in found[1].split()])
        )


def _note(names: list[str], indices: list[int]) -> str:
    """Return what to do about unused parameters."""
    unused = [names[index] for index in indices if index < len(names)]
    shown = ", ".join(unused[:_MAX_NAMES]) + (", ..." if len(unused) > _MAX_NAMES else "")
    return (
        f"{len(unused)} of {len(names)} trained parameters took no part in the last loss: {shown}. Use them, freeze "
        "them (requires_grad_(False) before wrap), or pass find_unused_parameters=True to wrap, which then looks for "
        "them in the graph of every step"
    )
