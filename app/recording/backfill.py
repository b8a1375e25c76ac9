"""What happened before this console started, as the nodes remember it: pulled and replayed in the background.

The nodes' own reports of the last minutes go through the same model, diagnosis and figures as those that come now. Many
nodes are asked for fewer minutes; the pieces of work are short, so that keys do not wait.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.commands import PackedHistory, PullHistory, Tier
from agent.wire.digest import decode_frame
from agent.wire.relay import unpack
from app.errors import AppError
from app.recording.history import History
from app.recording.playback import ReplayModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent.wire.digest import NodeFrame
    from app.diagnosis.rank_facts import Thresholds
    from app.fleet.fleet import Fleet

    PastReport = tuple[float, str, NodeFrame]
    """When it was made by this console's clock, the node, its report."""

MAX_AGE_S = 600.0
"""Seconds for which nodes keep their reports."""
MIN_AGE_S = 60.0
"""Least seconds of a useful backfill: a fleet that has no room for it is not asked."""
MAX_REPORTS = 40_000
"""Limit of reports of all nodes together: ten minutes of 64 of them. One of eight ranks takes 1.1 kB in transit, and a
tenth of a millisecond to be folded in."""
CLOSE_NODES = 16
"""Limit of nodes that are sampled twice a second, more of them once."""
MAX_PACKED_BYTES = 64 * 2**20
"""Bytes of all nodes together; of a node that exceeds its part the oldest go first."""
PARALLEL_NODES = 8
SETTLE_S = 3.0
"""Seconds by which the nodes have reported, and what they remember reaches past the console's first events."""
ON_DISK_S = 0.5
"""Seconds by which a report is on its node's disk, and can be asked for."""
LATE_S = 5.0
"""Age in seconds of a node's latest report from which the node has stopped recording, and is left out."""
MAX_S = 300.0
"""Timeout in seconds of all answers: no user waits for them."""
LOOK_S = 0.5
SLICE_S = 0.008
"""Seconds of work at a time; then keys and reports have their turn for as long."""
PAUSE_S = 0.008


class Plan(NamedTuple):
    """How closely a fleet is replayed.

    Attributes:
        period_s: Seconds between two reports of a node.
        max_age_s: Age of the oldest report.
    """

    period_s: float
    max_age_s: float


def plan(num_nodes: int) -> Plan | None:
    """Return the plan for so many nodes; None where the backfill would be too short for its cost."""
    period_s = 0.5 if num_nodes <= CLOSE_NODES else 1.0
    max_age_s = min(MAX_AGE_S, MAX_REPORTS * period_s / num_nodes)
    return Plan(period_s, max_age_s) if max_age_s >= MIN_AGE_S else None


class NodePast:
    """Past reports of one node, packed as they came."""

    def __init__(self, node: str, max_bytes: int) -> None:
        self.node = node
        self.last_s = float("-inf")
        """Time of the latest report."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: deque[tuple[float, PackedHistory]] = deque()

    def add(self, page: PackedHistory, received_s: float) -> None:
        """Take the next reports."""
        self._pages.append((received_s, page))
        self.last_s = received_s - page.ages_s[-1]
        self._num_bytes += len(page.packed)
        while self._num_bytes > self._max_bytes and len(self._pages) > 1:
            self._num_bytes -= len(self._pages.popleft()[1].packed)

    def reports(self) -> Iterator[PastReport]:
        """Yield the reports by their time, unpacked piece by piece, up to one that cannot be read."""
        latest_s = float("-inf")
        try:
            while self._pages:
                received_s, page = self._pages.popleft()
                for age_s, frame in zip(page.ages_s, unpack(page.packed, page.sizes), strict=True):
                    latest_s = max(latest_s, received_s - age_s)
                    yield latest_s, self.node, decode_frame(frame)
        except MalformedMessageError:
            return


class PastWish(NamedTuple):
    """What a console wants of the past.

    Attributes:
        shown: Returns the id of the job that the events are of, once the reports are here; None is whichever was to be
            shown at each moment.
        is_of_all: Whether the events of the other jobs are kept, too.
        until_s: By this console's clock: the nodes are asked as soon as they remember that, and no pauses are made.
    """

    shown: Callable[[], str] | None = None
    is_of_all: bool = False
    until_s: float | None = None


AS_SHOWN = PastWish()


async def replayed(
    fleet: Fleet,
    nodes: Sequence[str],
    thresholds: Thresholds,
    wish: PastWish = AS_SHOWN,
    on_read: Callable[[str], object] = lambda _node: None,
) -> ReplayModel | None:
    """Return the model that has replayed the nodes' reports up to just now; None where no node has any.

    Nodes that cannot be asked, or use another version, are left out. `on_read` is called with each node whose reports
    are here, or cannot be had.
    """
    wanted = plan(len(nodes))
    if wanted is None:
        return None
    remembered_s = math.inf if wish.until_s is None else wish.until_s + wanted.period_s + ON_DISK_S
    await asyncio.sleep(min(SETTLE_S, remembered_s - time.monotonic()))
    pasts = await _pull_all(fleet, nodes, wanted, on_read)
    if not pasts:
        return None
    # Reports of different nodes are further apart than live ones: a contradiction that lasts no longer is no event.
    patient = {name: getattr(thresholds, name) + wanted.period_s for name in ("silent_s", "confirm_s", "grace_s")}
    slower, figures = msgspec.structs.replace(thresholds, **patient), History(3 * wanted.period_s)
    job_id = "" if wish.shown is None else wish.shown()
    replay = ReplayModel(nodes, slower, figures, job_id, is_excerpt=True, is_of_all=wish.is_of_all)
    work = looks(replay, [past.reports() for past in pasts], min(past.last_s for past in pasts))
    await in_slices(work, PAUSE_S if wish.until_s is None else 0.0)
    return replay


def looks(replay: ReplayModel, past_reports: Iterable[Iterator[PastReport]], end_s: float) -> Iterator[None]:
    """Replay reports of nodes, each in its order, up to a moment; yields between pieces of work."""
    begun = []
    for one in past_reports:
        begun.append(chain([*islice(one, 1)], one))
        yield
    next_s = None
    for at_s, node, frame in heapq.merge(*begun, key=lambda one: one[0]):
        if at_s > end_s:
            break
        next_s = at_s if next_s is None else next_s
        while next_s < at_s:
            replay.look(next_s)
            next_s += LOOK_S
            yield
        replay.receive(node, frame, at_s)
        yield
    replay.look(end_s)


async def in_slices(work: Iterator[None], pause_s: float = PAUSE_S) -> None:
    """Do work piece by piece, with pauses in which keys and reports have their turn."""
    deadline_s = time.monotonic() + SLICE_S
    for _ in work:
        if time.monotonic() > deadline_s:
            await asyncio.sleep(pause_s)
            deadline_s = time.monotonic() + SLICE_S


async def _pull_all(
    fleet: Fleet, nodes: Sequence[str], wanted: Plan, on_read: Callable[[str], object]
) -> list[NodePast]:
    """Return the past reports of the nodes that still record them."""
    turns = asyncio.Semaphore(PARALLEL_NODES)
    command = PullHistory(Tier.RECENT, 0, wanted.max_age_s, wanted.period_s, is_packed=True)

    async def pull(node: str) -> NodePast | None:
        past = NodePast(node, MAX_PACKED_BYTES // len(nodes))
        async with turns:
            try:
                await pull_past(fleet, past, command, math.nextafter(wanted.period_s, 0.0))
            except AppError:
                return None  # its row shows that it is away, if it is
            finally:
                on_read(node)
        return past if past.last_s >= time.monotonic() - LATE_S else None

    try:
        async with asyncio.timeout(MAX_S):
            return [past for past in await asyncio.gather(*map(pull, nodes)) if past is not None]
    except TimeoutError:
        return []


async def pull_past(fleet: Fleet, past: NodePast, wanted: PullHistory, end_age_s: float) -> None:
    """Ask a node, in pieces, for all that is wanted and older than `end_age_s`."""
    while True:
        reply = await fleet.ask(past.node, wanted)
        if not isinstance(reply, PackedHistory) or not len(reply.seqs) == len(reply.ages_s) == len(reply.sizes):
            return
        if not reply.seqs or reply.seqs[-1] <= wanted.since_seq:
            return
        wanted = msgspec.structs.replace(wanted, since_seq=reply.seqs[-1])
        past.add(reply, time.monotonic())
        if reply.ages_s[-1] <= end_age_s:
            return
