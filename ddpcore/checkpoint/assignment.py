"""Which rank writes which bytes of a state that all ranks hold alike: pure, and the same on every rank.

Small tensors go to the first rank, all of them: replicas may differ in them (BatchNorm's running statistics do, between
two syncs), and so a checkpoint holds those of one rank, not a mixture. The others are dealt out in the order of the
state, each rank taking its share of the bytes that are left; where a share ends within a tensor, that one is cut along
its first dimension. So a rank has at most one piece of a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpcore.checkpoint.safetensors_header import Spec

SMALL_BYTES = 65_536
"""A tensor up to this size goes to the first rank. Also the least worth cutting off."""


class Piece(NamedTuple):
    """Rows of a tensor along its first dimension; a tensor without dimensions is one row."""

    name: str
    begin: int
    end: int


def num_rows(shape: Sequence[int]) -> int:
    """Return the size of the first dimension, 1 without one."""
    return shape[0] if shape else 1


def piece_shape(shape: Sequence[int], begin: int, end: int) -> tuple[int, ...]:
    """Return the shape of some rows of a tensor."""
    return (end - begin, *shape[1:]) if shape else ()


def assign(specs: Sequence[Spec], num_shares: int) -> list[list[Piece]]:
    """Return the pieces of each share, in the order of `specs`.

    No share exceeds the mean by more than the small tensors, or by a few halves of the largest row.
    """
    row_bytes = {spec.name: spec.num_bytes // max(1, num_rows(spec.shape)) for spec in specs}
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    queue: list[Piece] = []
    for spec in specs:
        pieces = shares[0] if spec.num_bytes <= SMALL_BYTES else queue
        pieces.append(Piece(spec.name, 0, num_rows(spec.shape)))
    queue.reverse()
    bytes_left = sum(spec.num_bytes for spec in specs)
    for number, share in enumerate(shares[:-1]):
        has_bytes = _sum_bytes(share, row_bytes)
        share.extend(_take(queue, row_bytes, bytes_left / (num_shares - number) - has_bytes))
        bytes_left -= _sum_bytes(share, row_bytes)
    shares[-1] += reversed(queue)
    return shares


def _take(queue: list[Piece], row_bytes: Mapping[str, int], wanted_bytes: float) -> list[Piece]:
    """Take about that many bytes off the end of the queue, in whole rows."""
    taken = []
    while queue:
        name, begin, end = queue[-1]
        fitting = max(0, min(end - begin, round(wanted_bytes / row_bytes[name])))
        if fitting * row_bytes[name] < SMALL_BYTES:
            break
        if (end - begin - fitting) * row_bytes[name] < SMALL_BYTES:
            fitting = end - begin
        taken.append(Piece(name, begin, begin + fitting))
        wanted_bytes -= fitting * row_bytes[name]
        if fitting < end - begin:
            queue[-1] = Piece(name, begin + fitting, end)
            break
        queue.pop()
    return taken


def _sum_bytes(pieces: Sequence[Piece], row_bytes: Mapping[str, int]) -> int:
    return sum(row_bytes[piece.name] * (piece.end - piece.begin) for piece in pieces)
