"""When a call is over, and for whom: the rules of gloo and of NCCL.

Sources: gloo's algorithms (allreduce.cc, broadcast.cc, gather.cc, scatter.cc, transport/tcp/pair.cc,
transport/tcp/unbound_buffer.cc), torch's ProcessGroupGloo.cpp and ProcessGroupNCCL.cpp. Of gloo, what is said here of
broadcast, reduce, gather and scatter was also run on torch 2.13 with four ranks, one of which never called.

gloo
    Operations of one group meet by (algorithm, count of calls): an all_reduce and a broadcast of the same count do not
    meet, and both wait for ever. A send is over when its receiver has asked for it. all_reduce, all_gather, reduce and
    barrier are over for nobody before all have called. A broadcast goes down a binomial tree: a member is through when
    the one before it is and those behind it have asked. A gather or scatter is over for a member other than its root
    once the root has called. Whoever receives more bytes than it asked for aborts; fewer are taken in silence. A
    reduce op that differs has no effect: each member applies its own.

NCCL
    Kernels of one communicator run in the order of the calls. A collective is over when all members' kernels run and
    agree. Different operations at one place hang. What NCCL does about different sizes, types or roots is not
    documented: they hang or corrupt, so both are played (`mismatch_hangs`) and silence is not scored. Whether the root
    of a broadcast is through before the others have called depends on NCCL's buffers: both are played
    (`root_runs_ahead`).

Both
    Ranks meet at a named barrier of ddpcore, in `monitored_barrier` and in `new_group` of a gloo group; a first-block
    opens for all when the first one is through. No recorder holds these, and the main thread waits in them, also of a
    program on GPUs. With NCCL alone, `new_group` meets nobody: communicators are made by the first collective.

Not played, since it is not known what happens: `new_group` with lists of ranks that differ (only the rank that waits
for one that does not come is), reduce ops that NCCL is given differently (taken as gloo's: each applies its own).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from ddpcore.wire import FIRST_GROUP
from tests.corpus.generator.program import Collective, Meet, Semantics, Transfer

LATENCY_S = 0.001
TRANSFERS = "send and receive"
"""The group under which transfers are listed; no process group has this name."""
RING = frozenset({"all_reduce", "all_gather", "reduce"})
"""gloo sends these round a ring, each member receiving from the one before it."""
MAX_PIECE_BYTES = 2**20
ROOTED = frozenset({"gather", "scatter"})


@dataclass(eq=False)
class Operation:
    """What members of a group have called at one place in its order."""

    group: str
    seq: int
    members: tuple[int, ...]
    calls: dict[int, Collective | Transfer | Meet] = field(default_factory=dict)
    come_s: dict[int, float] = field(default_factory=dict)
    """When a member's call began to take part: on a GPU, when its kernel did."""
    done_s: dict[int, float] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    """Members that received more than they asked for."""
    lengths: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of those: bytes of the message that came, and of the one that was asked for."""
    is_cut: bool = False
    meets_in: str = ""
    """`op` of a `Meet`."""

    def is_done(self, rank: int, now_s: float) -> bool:
        """Return whether it is over for a member."""
        return self.done_s.get(rank, now_s + 1) <= now_s


class Exchange:
    """All operations of one job."""

    def __init__(
        self,
        semantics: Semantics,
        groups: dict[str, tuple[int, ...]],
        world_size: int,
        *,
        mismatch_hangs: bool = True,
        root_runs_ahead: bool = False,
    ) -> None:
        self.groups = groups
        self.is_cut = False
        self._semantics = semantics
        self._mismatch_hangs, self._root_runs_ahead = mismatch_hangs, root_runs_ahead
        self._everybody = tuple(range(world_size))
        self._open: dict[tuple[str, int], Operation] = {}
        self._sent: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self.moved: set[int] = set()
        """Ranks for which something is over since this was last emptied."""
        self.differing: dict[str, int] = {}
        """The first place of a group at which its members have made different calls."""

    def members(self, group: str) -> tuple[int, ...]:
        """Return who takes part."""
        return self.groups.get(group, self._everybody)

    def called(self, rank: int, seq: int, call: Collective) -> Operation:
        """Return the operation that a rank calls; it takes part once it `came`."""
        key = (call.group, seq)
        if key not in self._open:
            self._open[key] = Operation(call.group, seq, self.members(call.group))
        operation = self._open[key]
        if any(_kind(other) != _kind(call) for other in operation.calls.values() if isinstance(other, Collective)):
            self.differing[call.group] = min(seq, self.differing.get(call.group, seq))
        operation.calls[rank] = call
        return operation

    def transferred(self, rank: int, transfer: Transfer) -> Operation:
        """Return the operation of a send or a receive, the one that the peer has begun if there is one."""
        pair = (rank, transfer.peer) if transfer.is_send else (transfer.peer, rank)
        own, others = (self._sent, self._awaited) if transfer.is_send else (self._awaited, self._sent)
        if others[pair]:
            operation = others[pair].popleft()
        else:
            operation = Operation(TRANSFERS, 0, pair)
            own[pair].append(operation)
        operation.calls[rank] = transfer
        return operation

    def meet(self, rank: int, seq: int, meet: Meet) -> Operation:
        """Return the meeting that a rank comes to."""
        key = (meet.group or meet.op, seq)
        if key not in self._open:
            self._open[key] = Operation(key[0], seq, self._everybody, meets_in=meet.op)
        operation = self._open[key]
        operation.calls[rank] = meet
        return operation

    def came(self, rank: int, operation: Operation, now_s: float) -> None:
        """Let a rank's call take part."""
        operation.come_s[rank] = now_s
        operation.is_cut |= self.is_cut and len(operation.members) > 1
        if operation.is_cut:
            return
        before = len(operation.done_s) + len(operation.aborted)
        if operation.meets_in:
            _over_meeting(operation)
        elif operation.group == TRANSFERS:
            _end_for(operation, operation.members, operation.members)
        elif self._semantics is Semantics.GLOO:
            _over_gloo(operation)
        else:
            self._over_nccl(operation)
        if len(operation.done_s) + len(operation.aborted) != before:
            self.moved.update(operation.done_s, operation.aborted)
        if len(operation.done_s) == len(operation.members):
            self._open.pop((operation.group, operation.seq), None)

    def cut(self) -> None:
        """Let no operation complete from here on."""
        self.is_cut = True
        for operation in self._open.values():
            operation.is_cut = True

    def _over_nccl(self, operation: Operation) -> None:
        calls = {rank: operation.calls[rank] for rank in operation.come_s}
        if self._root_runs_ahead:
            for rank, call in calls.items():
                if isinstance(call, Collective) and call.op == "broadcast" and call.root == rank:
                    _end_for(operation, [rank], [rank])
        if len(calls) < len(operation.members):
            return
        collectives = [call for call in calls.values() if isinstance(call, Collective)]
        if len({call.op for call in collectives}) > 1:
            return
        are_equal = len({(call.elements * call.element_bytes, call.root) for call in collectives}) == 1
        if are_equal or not self._mismatch_hangs:
            _end_for(operation, operation.members, operation.members)


def _over_meeting(operation: Operation) -> None:
    if not operation.group.startswith(FIRST_GROUP):
        _end_for(operation, operation.members, operation.members)
        return
    for rank in operation.come_s:
        _end_for(operation, [rank], [rank, operation.members[0]])


def _over_gloo(operation: Operation) -> None:
    calls = [call for rank, call in operation.calls.items() if rank in operation.come_s]
    kinds = {call.op for call in calls if isinstance(call, Collective)}
    for kind in kinds:
        come = {
            rank: call
            for rank, call in operation.calls.items()
            if rank in operation.come_s and isinstance(call, Collective) and call.op == kind
        }
        if kind == "broadcast":
            _broadcast(operation, come)
        elif kind in ROOTED:
            _rooted(operation, come)
        else:
            if kind in RING:
                _abort_in_ring(operation, come)
            if len(come) == len(operation.members) and not operation.aborted:
                _end_for(operation, operation.members, operation.members)


def _kind(call: Collective) -> tuple[str, int, int, int]:
    return (call.op, call.elements, call.element_bytes, call.root)


def _bytes(call: Collective) -> int:
    return call.elements * call.element_bytes


def _abort_in_ring(operation: Operation, come: dict[int, Collective]) -> None:
    members = operation.members
    for place, rank in enumerate(members):
        before = members[place - 1]
        if rank in come and before in come and _bytes(come[before]) > _bytes(come[rank]):
            operation.aborted.add(rank)
            operation.lengths[rank] = (_piece(come[before], len(members)), _piece(come[rank], len(members)))


def _piece(call: Collective, num_members: int) -> int:
    """Return the bytes of the messages in which gloo sends a call's data round the ring.

    Source: gloo/allreduce.cc: pieces of at most 1 MiB, two a member at least, all but the last of one length.
    """
    at_least = max(-(-_bytes(call) // MAX_PIECE_BYTES), 2 * num_members)
    num_pieces = -(-at_least // num_members) * num_members
    length = -(-_bytes(call) // num_pieces)
    return min(-(-length // call.element_bytes) * call.element_bytes, _bytes(call))


def _rooted(operation: Operation, come: dict[int, Collective]) -> None:
    for rank, call in come.items():
        root = come.get(call.root)
        if root is not None and root.root == call.root != rank:
            _end_for(operation, [rank], [rank, call.root])
        elif (
            call.root == rank and len(come) == len(operation.members) and {one.root for one in come.values()} == {rank}
        ):
            _end_for(operation, [rank], operation.members)


def _broadcast(operation: Operation, come: dict[int, Collective]) -> None:
    reached_s: dict[int, float] = {}
    for rank, call in come.items():
        if call.root == rank:
            reached_s[rank] = operation.come_s[rank]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, call in come.items():
            before = _before(operation.members, call.root, rank)
            if rank in reached_s or before not in reached_s or before is None:
                continue
            if rank not in _behind(operation.members, come[before].root, before):
                continue
            if _bytes(come[before]) > _bytes(call):
                operation.aborted.add(rank)
                operation.lengths[rank] = (_bytes(come[before]), _bytes(call))
                continue
            reached_s[rank] = max(reached_s[before], operation.come_s[rank])
            is_moving = True
    for rank, at_s in reached_s.items():
        behind = _behind(operation.members, come[rank].root, rank)
        asked = [peer for peer in behind if peer in come and _before(operation.members, come[peer].root, peer) == rank]
        if len(asked) == len(behind) and rank not in operation.done_s and rank not in operation.aborted:
            operation.done_s[rank] = max([at_s, *(operation.come_s[peer] for peer in asked)]) + LATENCY_S


def _before(members: tuple[int, ...], root: int, rank: int) -> int | None:
    """Return from whom a member of a binomial tree receives; None for the root."""
    size, start = len(members), members.index(root)
    place = (members.index(rank) - start) % size
    if place == 0:
        return None
    return members[(place - (1 << (place.bit_length() - 1)) + start) % size]


def _behind(members: tuple[int, ...], root: int, rank: int) -> list[int]:
    """Return to whom a member of a binomial tree sends."""
    size, start = len(members), members.index(root)
    place = (members.index(rank) - start) % size
    steps = range(place.bit_length(), size.bit_length())
    return [members[(place + (1 << step) + start) % size] for step in steps if place + (1 << step) < size]


def _end_for(operation: Operation, ranks: tuple[int, ...] | list[int], needed: tuple[int, ...] | list[int]) -> None:
    if all(rank in operation.come_s for rank in needed):
        over_s = max(operation.come_s[rank] for rank in needed) + LATENCY_S
        for rank in ranks:
            operation.done_s.setdefault(rank, over_s)
