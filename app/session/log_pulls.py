"""The log lines of a session's nodes, pulled by cursor whenever a report shows that there are more.

`Repeats` drops what an agent sends again, since it has read the files from their beginning as the one before it did.
`AttemptMarks` marks in them where an attempt of a job begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.logs import LAUNCHER_RANK, LogLine
from app.errors import AppError
from app.recording.recorder import Past
from app.recording.records import LinesRecord
from app.text import attempt_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from app.fleet.fleet import Fleet
    from app.recording.records import Record

LOG_PERIOD_S = 0.2
"""Seconds between two checks for new log lines: below what a reader notices."""
LOG_PULL_S = 0.008
MAX_LOG_PERIOD_S = 2.0
"""Limit of that period in seconds; where many nodes print, it is `LOG_PULL_S` for each."""
MAX_PULLS = 5
"""Limit of pulls of one node in a row. Each brings little, so that reports pass between them on a slow link."""
MAX_PRINTED_BYTES = 4 * 2**20
"""Bytes of log lines kept for evidence, however old; kept apart from reports, which much output would push out."""
MAX_WAITING_LINES = 100_000
"""Lines pulled and not yet taken by the screen; older ones are dropped first."""
FIRST_LINES_S = 2.0
"""Seconds for which the first lines wait for those of the other nodes: what was printed before is merged by time."""

DatedLine = tuple[float, str, LogLine]
"""The moment at which a line was read, its node, and the line."""


class LogPulls:
    """Pulls lines; `drain_dated` is called from the frame loop and never blocks.

    Attributes:
        printed: Lines that are kept for evidence.
    """

    def __init__(self, nodes: Sequence[str], fleet: Callable[[], Fleet], record: Callable[[Record], None]) -> None:
        """Set up, before the first report.

        Args:
            nodes: Names of all nodes.
            fleet: Reaches them.
            record: Takes the pulled lines, for a recording.
        """
        self.printed = Past(max_age_s=math.inf, max_bytes=MAX_PRINTED_BYTES)
        self._nodes = frozenset(nodes)
        self._fleet = fleet
        self._record = record
        self._lines: deque[DatedLine] = deque(maxlen=MAX_WAITING_LINES)
        self._merges_until_s: float | None = math.inf
        """Moment at which the first lines wait no longer; infinity before there are any, None once they are taken."""
        self._cursor: dict[str, tuple[str, int]] = {}
        self._repeats: defaultdict[str, Repeats] = defaultdict(Repeats)
        self._wanted: dict[str, tuple[str, int]] = {}

    def want(self, node: str, epoch: str, latest: int) -> None:
        """Note the number of a node's latest line, and the epoch of its agent."""
        self._wanted[node] = (epoch, latest)

    def drain_dated(self) -> list[DatedLine]:
        """Return the lines that have come since the last call, merged by time; those of no known age count as new.

        The first lines come once those of all nodes are here, or after `FIRST_LINES_S`.
        """
        if not self._lines or self._is_merging():
            return []
        self._merges_until_s = None
        lines = in_time_order(self._lines)
        self._lines.clear()
        return lines

    def _is_merging(self) -> bool:
        """Return whether the first lines wait for those of other nodes."""
        if self._merges_until_s is None:
            return False
        return time.monotonic() < self._merges_until_s and not (self._nodes <= self._wanted.keys() and self._has_pulled)

    @property
    def has_all(self) -> bool:
        """True when every line that the nodes have reported is here, and may be taken."""
        return self._has_pulled and not (self._lines and self._is_merging())

    @property
    def _has_pulled(self) -> bool:
        for node, (epoch, latest) in self._wanted.items():
            known_epoch, cursor = self._cursor.get(node, (epoch, 0))
            if known_epoch != epoch or cursor < latest:
                return False
        return True

    async def follow(self) -> None:
        """Pull lines from all nodes that have some; one that does not answer delays no other."""
        under_way: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                under_way = {node: task for node, task in under_way.items() if not task.done()}
                num_pulls = 0
                for node, (epoch, latest) in list(self._wanted.items()):
                    known_epoch, cursor = self._cursor.get(node, (epoch, 0))
                    if known_epoch != epoch:
                        cursor = 0  # a new agent counts from one
                    if cursor < latest and node not in under_way:
                        num_pulls += 1
                        under_way[node] = asyncio.create_task(self._pull_into_cursor(node, epoch, cursor))
                await asyncio.sleep(max(LOG_PERIOD_S, min(num_pulls * LOG_PULL_S, MAX_LOG_PERIOD_S)))
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

    async def _pull_into_cursor(self, node: str, epoch: str, cursor: int) -> None:
        if self._cursor.get(node, (epoch, 0))[0] != epoch:
            self._repeats[node].restart(time.monotonic())
        self._cursor[node] = (epoch, cursor)
        for _ in range(MAX_PULLS):
            before, cursor = cursor, await self._pull(node, cursor)
            self._cursor[node] = (epoch, cursor)
            wanted_epoch, latest = self._wanted[node]
            if wanted_epoch != epoch or not before < cursor < latest:
                break

    async def _pull(self, node: str, cursor: int) -> int:
        """Pull what the node has after `cursor`; return the new cursor."""
        try:
            lines, first_seq = await self._fleet().pull_logs(node, cursor)
        except AppError:
            return cursor  # the node's own row shows that it does not answer; the next report asks again
        now_s = time.monotonic()
        gap = gap_line(cursor, first_seq, lines[0].age_s if lines else None)
        new = self._repeats[node].new_of(lines, now_s, has_gap=gap is not None)
        if self._merges_until_s == math.inf and lines:
            self._merges_until_s = now_s + FIRST_LINES_S
        self._lines.extend((now_s - (line.age_s or 0.0), node, line) for line in ([gap] if gap else []) + new)
        if new:
            received = LinesRecord(now_s, node, new)
            self.printed.add(received)
            self._record(received)
        return lines[-1].seq if lines else cursor


REPEAT_S = 30.0
"""Seconds after an agent's first lines within which it has read again what the one before it had read."""
_Stream = tuple[str, int, str, int]
"""Job, rank, stream and checksum of a line: the file that it is in."""


class _Seen(msgspec.Struct):
    """What has come of one file."""

    num: int = 0
    first: int = 0
    """Hash of its first line."""
    all: int = 0
    """Hash of all its lines, in order."""

    def add(self, text: str) -> None:
        self.first = self.first if self.num else hash(text)
        self.num += 1
        self.all = hash((self.all, text))


class Repeats:
    """The lines of one node, of which some come again when its agent is replaced. Pure.

    The lines of a file are a repeat if as many as before came, and these are equal; until then they are held back.
    Where an agent has sent less than all, its successor's lines all count as new.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[_Stream, _Seen] = defaultdict(_Seen)
        self._before: dict[_Stream, _Seen] = {}
        """What came from the agent before, of the files that may come again."""
        self._held: defaultdict[_Stream, list[LogLine]] = defaultdict(list)
        self._is_whole = True
        self._until_s = -math.inf

    def restart(self, now_s: float) -> None:
        """Note that the next lines are those of a new agent."""
        # Of what the agent before has not read again yet, the one before that has sent all.
        self._before = {**self._seen, **self._before} if self._is_whole else {}
        self._seen.clear()
        self._held.clear()
        self._is_whole, self._until_s = True, now_s + REPEAT_S

    def new_of(self, lines: Sequence[LogLine], now_s: float, *, has_gap: bool) -> list[LogLine]:
        """Return the lines that have not come before; `has_gap` is True if some are missing in front of them."""
        new: list[LogLine] = []
        self._is_whole = self._is_whole and not has_gap
        if not self._is_whole or now_s > self._until_s:
            for stream in [*self._before]:
                new += self._release(stream)
        for line in lines:
            stream = (line.job_id, line.rank, line.stream, line.file)
            seen = self._seen[stream]
            seen.add(line.text)
            before = self._before.get(stream)
            if before is None:
                new.append(line)
                continue
            self._held[stream].append(line)
            if seen.num == before.num or seen.first != before.first:
                held = self._release(stream)
                new += [] if seen == before else held
        return new

    def _release(self, stream: _Stream) -> list[LogLine]:
        """Compare a file no longer; return the lines that were held back."""
        del self._before[stream]
        return self._held.pop(stream, [])


class Begun(NamedTuple):
    """An attempt of a job that has begun.

    Attributes:
        node: First node of the job.
        at_s: When it began, by this console's clock.
        time_text: The same for users.
        is_live: Whether it has not ended.
    """

    job_id: str
    attempt: int
    node: str
    at_s: float
    time_text: str
    is_live: bool


class AttemptMarks:
    """Puts a line between the lines of two attempts of a job: `--- restart 1 began 12:03:04`. Pure."""

    def __init__(self) -> None:
        self._marked: set[tuple[str, int]] = set()

    def marked(self, lines: Sequence[DatedLine], attempts: Iterable[Begun]) -> list[DatedLine]:
        """Return lines merged by time with a mark for each of the attempts, each once.

        The mark comes before the attempt's first line. An attempt that is over and has no line here gets none.
        """
        marked = list(lines)
        for begun in attempts:
            if (begun.job_id, begun.attempt) in self._marked:
                continue
            self._marked.add((begun.job_id, begun.attempt))
            own = (place for place, (_, _, line) in enumerate(marked) if line.job_id == begun.job_id)
            place = next((place for place in own if marked[place][0] >= begun.at_s), None)
            if place is not None or begun.is_live:
                text = f"--- {attempt_text(begun.attempt)} began {begun.time_text}"
                mark = LogLine(0, LAUNCHER_RANK, "stdout", text, begun.job_id)
                marked.insert(len(marked) if place is None else place, (begun.at_s, begun.node, mark))
        return marked


def in_time_order(lines: Iterable[DatedLine]) -> list[DatedLine]:
    """Return lines of several nodes merged by time; a node's own lines keep their order, ages are rough."""
    latest_s: dict[str, float] = {}
    timed = []
    for one in lines:
        at_s, node, _ = one
        latest_s[node] = max(latest_s.get(node, at_s), at_s)
        timed.append((latest_s[node], one))
    return [one for _, one in sorted(timed, key=itemgetter(0))]


_GAP = "older than what the node keeps: see its files)"


def gap_line(cursor: int, first_seq: int, age_s: float | None) -> LogLine | None:
    """Return a line in place of those the node has dropped, as old as the oldest kept one; None if there are none."""
    num_lost = first_seq - cursor - 1
    if num_lost <= 0:
        return None
    lines = "1 line is" if num_lost == 1 else f"{num_lost:,} lines are"
    return LogLine(first_seq - 1, LAUNCHER_RANK, "stderr", f"({lines} {_GAP}", age_s=age_s)


def is_gap(line: LogLine) -> bool:
    """Return whether a line is one of `gap_line`."""
    return not line.job_id and line.rank == LAUNCHER_RANK and line.text.endswith(_GAP)
