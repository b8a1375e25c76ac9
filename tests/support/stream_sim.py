"""A device with streams that finds what a real one shows only now and then: accesses to memory that nothing orders.

Streams carry vector clocks, as race detectors' threads do. A tensor stands for a block of device memory; when Python
lets go of the tensor, its block goes back to the stream that it was allocated on, which takes it again at once. Two
accesses to one block, one of them a write, race unless a chain of waits orders them. Values are real and do not matter.

`lagging` streams get nothing done before the host waits for it; all others are always done.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Clock = Counter[str]


@dataclass
class Access:
    stream: str
    clock: Clock
    is_write: bool


@dataclass
class Block:
    """Memory of one tensor at a time."""

    home: str
    accesses: list[Access] = field(default_factory=list)
    users: set[str] = field(default_factory=set)
    held_until: list[Clock] = field(default_factory=list)


class SimDevice:
    """Implements `CopyStream`, and stands in for the rest of the device in tests.

    Args:
        lagging: Streams that do nothing before the host waits for it.
    """

    def __init__(self, lagging: set[str]) -> None:
        self.lagging = lagging
        self.current = "compute"
        self.races: list[str] = []
        self.calls: list[str] = []
        self._clocks: dict[str, Clock] = {}
        self._seen: Clock = Counter()
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self._num_blocks = 0

    # What the prefetcher calls.

    def wait_for_compute(self) -> None:
        self.calls.append("wait_for_compute")
        self.wait("side", self.current)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self.on("side"):
            yield

    def pin(self, tensor: Tensor) -> Tensor:
        self.calls.append("pin")
        pinned = tensor.clone()
        self._own(pinned, Block(home="host"))
        return pinned

    def copy(self, tensor: Tensor) -> Tensor:
        assert self.current == "side", "a copy outside of copying() holds compute up"
        self.calls.append("copy")
        self.access(tensor, is_write=False)
        return self.allocate(tensor)

    def mark(self) -> Clock:
        self.calls.append("mark")
        return self._clock("side").copy()

    def compute_waits(self, mark: Clock) -> None:
        self.calls.append("compute_waits")
        self._join(self.current, mark)

    def compute_uses(self, tensor: Tensor) -> None:
        self.calls.append("compute_uses")
        self._blocks[id(tensor)].users.add(self.current)

    def finish(self, mark: Clock) -> None:
        self.calls.append("finish")
        self._seen |= mark

    # What the training program does.

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait(self, stream: str, other: str) -> None:
        self._join(stream, self._clock(other))

    def read(self, tensor: Tensor) -> None:
        self.access(tensor, is_write=False)

    def allocate(self, like: Tensor) -> Tensor:
        """Return a tensor on the current stream, written there."""
        reusable = [block for block in self._free if block.home == self.current and self._is_released(block)]
        if reusable:
            block = reusable[0]
            self._free.remove(block)
            for clock in block.held_until:
                # The allocator has seen these ends: whatever it gives out next comes after them.
                self._join(self.current, clock)
            block.users, block.held_until = set(), []
        else:
            block = Block(home=self.current)
            self._num_blocks += 1
        tensor = like.clone()
        self._own(tensor, block)
        self.access(tensor, is_write=True)
        return tensor

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def access(self, tensor: Tensor, *, is_write: bool) -> None:
        clock = self._clock(self.current)
        clock[self.current] += 1
        block = self._blocks[id(tensor)]
        for earlier in block.accesses:
            is_ordered = clock[earlier.stream] >= earlier.clock[earlier.stream]
            if (is_write or earlier.is_write) and not is_ordered:
                kinds = [("reads", "writes")[earlier.is_write], ("reads", "writes")[is_write]]
                self.races.append(f"{earlier.stream} {kinds[0]} while {self.current} {kinds[1]}")
        block.accesses.append(Access(self.current, clock.copy(), is_write))

    def _own(self, tensor: Tensor, block: Block) -> None:
        self._blocks[id(tensor)] = block
        weakref.finalize(tensor, self._release, id(tensor)).atexit = False

    def _release(self, tensor_id: int) -> None:
        block = self._blocks.pop(tensor_id)
        if block.home == "host":
            if not all(self._is_done(access.clock) for access in block.accesses):
                self.races.append("pinned memory is freed while side reads")
            return
        block.held_until = [self._clock(user).copy() for user in block.users]
        self._free.append(block)

    def _is_released(self, block: Block) -> bool:
        return all(self._is_done(clock) for clock in block.held_until)

    def _is_done(self, clock: Clock) -> bool:
        return all(clock[stream] <= self._seen[stream] for stream in self.lagging)

    def _clock(self, stream: str) -> Clock:
        # What the host has waited for comes before all that it gives out from then on.
        self._clocks[stream] = self._clocks.get(stream, Counter()) | self._seen
        return self._clocks[stream]

    def _join(self, stream: str, clock: Clock) -> None:
        self._clocks[stream] = self._clock(stream) | clock
