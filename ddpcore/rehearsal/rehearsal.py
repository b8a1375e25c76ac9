"""Begins a rehearsal in a process of a job: `torch` is imported, the program's own lines have not run."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from typing import Any

import torch

from ddpcore.rehearsal import device_arguments, process_groups
from ddpcore.rehearsal.gpus import Gpus

ANNOUNCEMENT = "rankdeck: rehearsal on the CPU: cuda is the CPU, nccl is gloo, torch.compile compiles nothing"


def begin(number: int) -> None:
    """Let this process run a program for GPUs on its CPU, and print that on stderr.

    Args:
        number: GPUs that the program sees; at least one, and one for each rank of this node.
    """
    device_arguments.put_in_place()
    for cls, parameter in ((torch.autocast, "device_type"), (torch.amp.GradScaler, "device")):
        device_arguments.translate_constructor(cls, parameter)
    Gpus(number).put_in_place()
    process_groups.put_in_place()
    _profile_cpu()
    _compile_nothing()
    if not multiprocessing.current_process().daemon:  # a DataLoader's worker is one
        sys.stderr.write(f"{ANNOUNCEMENT}\n")


def _profile_cpu() -> None:
    """Let profilers measure the CPU alone: torch prints a stack for each event of a GPU that it cannot record."""
    profile: Any = torch.autograd.profiler.profile
    original = profile.__init__

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("use_cuda", None)
        kwargs.pop("use_device", None)
        original(self, *args, **kwargs)

    profile.__init__ = constructor


def _compile_nothing() -> None:
    """Let `torch.compile` give a model or function that runs as it is: compiling takes minutes and finds no hang.

    The names of a compiled model's parameters begin with `_orig_mod.`: they do here too.
    """
    original: Any = torch.compile

    @functools.wraps(original)
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda function: compile_(function, **kwargs)
        if not isinstance(model, torch.nn.Module):
            return model
        from torch._dynamo import eval_frame  # noqa: PLC0415 - takes a second, and most programs compile nothing

        return eval_frame.OptimizedModule(model, eval_frame.DisableContext())

    torch.compile = compile_
