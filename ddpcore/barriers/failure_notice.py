"""Why a rank's collective has failed: the first rank that fails leaves a notice in the store, the others name it.

A rank that raises or dies closes its connections, and the others get torch's "Connection closed by peer", which names
an address. Before a rank that raises closes its group it leaves a notice here; the others read it and raise
`RankFailedError` in place of torch's error. Where a rank has died without one, the first rank that sees its process
gone leaves the notice in its place. One notice a process group: the first one stands.
"""

from __future__ import annotations

import re
import time
import traceback
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from ddpcore.barriers.arrivals import failure_key
from ddpcore.barriers.barrier_session import has_agent_store
from ddpcore.barriers.open_session import current_session
from ddpcore.barriers.rank_status import ProcessState, place_text
from ddpcore.errors import (
    BarrierTimeoutError,
    BarrierUseError,
    CheckpointCallError,
    MasterFailedError,
    RankFailedError,
    StoreLostError,
)
from ddpcore.probe.stack import StackReader, code_roots, sendable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.barrier_session import BarrierSession
    from ddpcore.barriers.rank_status import Sighting

PATIENCE_S = 5.0
"""How long to look for the cause: a neighbour on its own machine sees a rank's death within
`heartbeat.HEARTBEAT_S`."""

POLL_S = 0.1

MAX_LOOKED_AT = 256
"""Ranks looked at in one turn, those of this node first."""

MAX_TEXT_CHARS = 2000
MAX_TRACE_CHARS = 20_000

_NAMES_RANKS = (BarrierTimeoutError, CheckpointCallError, MasterFailedError, RankFailedError, StoreLostError)
_OF_PEERS = re.compile(r"gloo|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|pair closure|ProcessGroup")
"""Texts of errors by torch's backends: RuntimeErrors of gloo, without a type of their own."""


class FailureNotice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first failure, as it stands in the store."""

    rank: int
    text: str
    trace: str = ""


def is_of_peers(error: BaseException) -> bool:
    """Return whether an error only follows from what other ranks have done, or not done."""
    if isinstance(error, (*_NAMES_RANKS, dist.DistError)):
        return True
    return type(error) is RuntimeError and _OF_PEERS.search(str(error)) is not None


def ends_well(error: BaseException | None) -> bool:
    """Return whether a program ends as it should, by `sys.exit(0)` too."""
    return error is None or (isinstance(error, SystemExit) and error.code in {None, 0})


def leave_notice(error: BaseException, where: str = "") -> None:
    """Name this rank as the first that has failed, unless one is named already or the error follows from others.

    Never raises; blocks for two round trips to the store, or some `PATIENCE_S` without one. `where` is a part of the
    sentence: "in step 7".
    """
    # Where nobody had ended, the one that gives up waiting is the first that ends.
    is_first = isinstance(error, BarrierTimeoutError | CheckpointCallError) and not getattr(error, "ended", ())
    if is_of_peers(error) and not is_first:
        return
    session = _session()
    if session is None:
        return
    rank = session.placement.rank
    lines = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    place = StackReader(code_roots()).read(lines[::-1]).place
    raised = f"{type(error).__name__}{where and f' {where}'}{place_text(place)}"
    text = f"rank {rank} has raised {raised}: {_first_line(str(error))}"
    trace = "".join(traceback.format_exception(error))
    notice = FailureNotice(rank, sendable(text, MAX_TEXT_CHARS), sendable(trace[-MAX_TRACE_CHARS:], MAX_TRACE_CHARS))
    try:
        _leave(session, session.connect(PATIENCE_S), notice)
    except (StoreLostError, RuntimeError):
        # The store is gone, and with it whoever could read it.
        return


def _first_line(message: str) -> str:
    """Return a message's first line; for an error of a DataLoader's worker, also that of its own error."""
    first, _, trace = message.partition("\n")
    caught = re.match(r"Caught (\w+) in ", first)
    own = re.findall(rf"^(?:[\w.]+\.)?{caught[1]}: .*", trace, re.MULTILINE) if caught else []
    return f"{first} {own[-1]}" if own else first


def explain(error: BaseException) -> RankFailedError | None:
    """Return the error that names the rank that failed first, where this rank's error follows from it; else None.

    Blocks for at most some `PATIENCE_S`; never raises.
    """
    if isinstance(error, _NAMES_RANKS) or not is_of_peers(error):
        return None
    return first_failure()


def first_failure(
    patience_s: float = PATIENCE_S, *, among: Sequence[int] | None = None, counts_leaving: bool = True
) -> RankFailedError | None:
    """Return the error that names the rank that failed first; None if only this rank is known. Blocks; never raises.

    `among` are the ranks that can be the first, by default all. With `counts_leaving` a rank that has left its group
    without an error counts too.
    """
    session = _session()
    if session is None:
        return None
    try:
        notice = _kept(session) or _find(
            session, session.connect(PATIENCE_S), patience_s, among=among, counts_leaving=counts_leaving
        )
    except (StoreLostError, RuntimeError):
        # The store is gone. Without torchrun's agent rank 0 is its host.
        if session.placement.rank == 0 or has_agent_store():
            return None
        return RankFailedError(0, "rank 0 has ended, or cannot be reached: the job's store, which it hosts, is gone")
    if notice is None or notice.rank == session.placement.rank or (among is not None and notice.rank not in among):
        return None
    return RankFailedError(notice.rank, notice.text, notice.trace)


def _session() -> BarrierSession | None:
    try:
        return current_session()
    except (BarrierUseError, StoreLostError, RuntimeError, ValueError):
        return None


def _kept(session: BarrierSession) -> FailureNotice | None:
    """Return what this rank's heartbeat thread has read already."""
    return msgspec.json.decode(session.failure_notice, type=FailureNotice) if session.failure_notice else None


def _find(
    session: BarrierSession, store: Store, patience_s: float, *, among: Sequence[int] | None, counts_leaving: bool
) -> FailureNotice | None:
    deadline_s = time.monotonic() + patience_s
    while True:
        ranks = _others(session) if among is None else among
        notice = _read(session, store) or _look(session, store, ranks, counts_leaving=counts_leaving)
        if notice is not None or time.monotonic() > deadline_s:
            return notice
        time.sleep(POLL_S)


def _read(session: BarrierSession, store: Store) -> FailureNotice | None:
    key = failure_key(session.number)
    return msgspec.json.decode(store.get(key), type=FailureNotice) if store.check([key]) else None


def _look(session: BarrierSession, store: Store, ranks: Iterable[int], *, counts_leaving: bool) -> FailureNotice | None:
    """Look for a rank that has ended without a notice, those that were killed first."""
    left: FailureNotice | None = None
    for rank in islice(ranks, MAX_LOOKED_AT):
        sighting = session.observer.look_at(store, rank, time.monotonic())
        if not sighting.has_ended:
            continue
        notice = FailureNotice(rank, _end_text(rank, sighting))
        if sighting.process is ProcessState.GONE and not (sighting.heartbeat and sighting.heartbeat.has_left):
            return _leave(session, store, notice)
        if counts_leaving or (sighting.heartbeat and sighting.heartbeat.error):
            left = left or notice
    return left and _leave(session, store, left)


def _leave(session: BarrierSession, store: Store, notice: FailureNotice) -> FailureNotice | None:
    """Write a notice, and return the one that stands there."""
    store.compare_set(failure_key(session.number), "", msgspec.json.encode(notice).decode())
    return _read(session, store)


def _others(session: BarrierSession) -> Iterator[int]:
    """Yield the ranks of this node first: the state of their processes is known immediately."""
    rank, _, local_rank, local_world_size, _ = session.placement
    first = rank - local_rank
    yield from (one for one in range(first, first + local_world_size) if one != rank)
    yield from (one for one in range(session.placement.world_size) if not first <= one < first + local_world_size)


def _end_text(rank: int, sighting: Sighting) -> str:
    heartbeat = sighting.heartbeat
    if heartbeat is not None and heartbeat.has_left:
        return f"rank {rank} has left its process group{f' with {heartbeat.error}' if heartbeat.error else ''}"
    place = place_text(heartbeat.place) if heartbeat is not None else ""
    return f"rank {rank} has died without an exception, as by a signal{f'; it was last seen{place}' if place else ''}"
