"""A checkpoint's state sent from a node that has it to those that do not, over a gloo group of its own."""

from __future__ import annotations

import json
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpcore.checkpoint.state_tree import DTYPES, flatten, unflatten
from ddpcore.checkpoint.tensor_files import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT = timedelta(minutes=30)
"""For one tensor at a time, over whatever network joins the nodes."""


def send_state(state: object, source: int, receivers: Sequence[int]) -> tuple[Any, int]:
    """Return the source's state on every receiver, and on both a checksum of what was sent.

    Every rank calls it; blocks.

    Args:
        state: What the source has; of no account elsewhere.
        source: The rank that sends.
        receivers: The ranks that lack it.
    """
    # The training's own groups stay out of this: work may be pending there. Ranks that need nothing take part, too: a
    # group without them would, beside NCCL, have them alone call a collective (a split without colour).
    group = dist.new_group(timeout=TIMEOUT, backend="gloo")
    rank = dist.get_rank()
    try:
        if rank == source:
            return state, _send(state, source, group)
        received, checksum = _receive(source, group, keeps=rank in receivers)
        return (received, checksum) if rank in receivers else (state, 0)
    finally:
        dist.destroy_process_group(group)


def _send(state: object, source: int, group: Any) -> int:
    flat = flatten(state)
    text = json.dumps([flat.skeleton, flat.specs()]).encode()
    dist.broadcast(torch.tensor([len(text)]), source, group)
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    checksum = zlib.crc32(text)
    for tensor in flat.tensors.values():
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), source, group)
            checksum = zlib.crc32(bytes_of(tensor), checksum)
    return checksum


def _receive(source: int, group: Any, *, keeps: bool) -> tuple[Any, int]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, source, group)
    content = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    text = bytes(bytes_of(content))
    checksum = zlib.crc32(text)
    skeleton, specs = json.loads(text)
    tensors = {}
    for name, dtype, shape in specs:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), source, group)
        if keeps:
            tensors[name] = tensor
            checksum = zlib.crc32(bytes_of(tensor), checksum)
    return (unflatten(skeleton, tensors), checksum) if keeps else (None, 0)
