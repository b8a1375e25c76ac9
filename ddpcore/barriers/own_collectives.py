"""What this process has called of torch.distributed, as far as its recorder shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.barriers.rank_status import BarrierKind, Wait
from ddpcore.probe.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.probe.samples import GroupMembers, RecorderEntry
    from ddpcore.probe.stack import StackLine
    from ddpcore.wire import Place

_BLOCKING_FILE = "/torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_BACKWARD_FILE = "/torch/autograd/graph.py"
_BUFFERS = "_distributed_broadcast_coalesced"
_BUFFERS_FILE = "/torch/nn/parallel/distributed.py"
"""File in which DDP broadcasts the first rank's buffers, before a forward."""
_REBUILDING = "_pre_forward"
"""Function in which it broadcasts the first rank's order of buckets, in its second step: C++ calls it and waits for
it."""

CONTROL_GROUP = "rankdeck.control"
"""c10d's description of the engine's own group."""
_CONTROL = {
    "/ddpcore/engine/stop_agreement.py": "_read",
    "/ddpcore/engine/metrics/means.py": "arrived",
    "/ddpcore/engine/loss_weights.py": "_finished",
}
"""Functions, by file, in which the engine waits for sums or agreements of the ranks, in a group of its own."""

_NOT_COLLECTIVE = frozenset(
    {"init_process_group", "new_group", "destroy_process_group", "send", "recv", "monitored_barrier"}
)
"""Functions that gloo's recorder does not hold: the last collective in it may be another one, under way behind them."""


class OwnCollectives:
    """Reads the flight recorder, by default this process's own. Any thread; a reading costs 0.6 ms."""

    def __init__(self, rank: int, recorder: FlightRecorder | None = None) -> None:
        self._rank = rank
        self._recorder = recorder or FlightRecorder()

    def called(self, group: str) -> int:
        return max((entry.seq for entry in self._entries() if entry.group == group), default=0)

    def blocking(self, stack: Sequence[StackLine], place: Place | None) -> Wait | None:
        """Return the collective that the main thread is blocked in, if that is certain; `stack` is innermost first.

        It is certain for functions of torch.distributed, in which a thread waits visibly, for the engine's own
        agreements and sums, and for a backward that DDP's reductions are under way in: it returns when all of them are
        done. It is not for other `Work.wait()`, nor for NCCL, whose calls return immediately.
        """
        if not stack or not _waits_visibly(stack[0]):
            return None
        pending = [entry for entry in self._entries() if not entry.is_retired]
        groups = self._recorder.members()
        if _waits_for_control(stack[0]):
            pending = [
                entry for entry in pending if entry.group in groups and groups[entry.group].description == CONTROL_GROUP
            ]
        if not pending:
            return None
        latest = pending[-1]
        members = groups.get(latest.group)
        ranks = members.ranks if members else ()
        operation = latest.op.partition(":")[2] or latest.op
        if stack[0][2] == _REBUILDING and operation != "broadcast":
            return None
        return Wait(
            BarrierKind.COLLECTIVE,
            operation,
            latest.seq,
            place=place,
            group=latest.group,
            ranks=ranks,
            needed=() if members is None else self._needed(latest, operation, _source(stack[0], members), ranks),
        )

    def _needed(
        self, entry: RecorderEntry, operation: str, source: int | None, ranks: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return which ranks have to call a broadcast before it ends here, as far as that is certain."""
        if operation != "broadcast" or self._rank not in ranks:
            return ()
        if entry.key[0] != "gloo":
            return () if source in (None, self._rank) else (source,)
        if len(ranks) == 2:
            return tuple(rank for rank in ranks if rank != self._rank)
        if source is None:
            return ()
        first = ranks.index(source)
        places = gloo_tree((ranks.index(self._rank) - first) % len(ranks), len(ranks))
        return tuple(ranks[(place + first) % len(ranks)] for place in places)

    def _entries(self) -> list[RecorderEntry]:
        return [entry for entry in self._recorder.dump().entries if not entry.is_p2p and entry.seq > 0]


def _waits_visibly(innermost: StackLine) -> bool:
    file, _, function = innermost
    if file.endswith(_BACKWARD_FILE):
        return function == _BACKWARD
    if file.endswith(_BUFFERS_FILE):
        return function in (_BUFFERS, _REBUILDING)
    if _waits_for_control(innermost):
        return True
    return file.endswith(_BLOCKING_FILE) and function not in _NOT_COLLECTIVE


def _waits_for_control(innermost: StackLine) -> bool:
    return any(innermost[0].endswith(file) and innermost[2] == function for file, function in _CONTROL.items())


def _source(innermost: StackLine, members: GroupMembers) -> int | None:
    is_first = innermost[0].endswith(_BUFFERS_FILE) and members.is_sorted
    return min(members.ranks, default=None) if is_first else None


def gloo_tree(place: int, size: int) -> list[int]:
    """Return for which places one place of gloo's broadcast waits: all above it and those right below.

    The source has place 0. A send ends only when its receiver has arrived, even for four bytes. Source:
    gloo/broadcast.cc; measured with torch 2.13.
    """
    bits = range(size.bit_length())
    above = [place & ((1 << bit) - 1) for bit in bits if place >> bit & 1]
    below = [place + (1 << bit) for bit in bits if place < 1 << bit and place + (1 << bit) < size]
    return above + below
