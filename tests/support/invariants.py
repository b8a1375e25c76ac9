"""What holds under every fault, numbered as in the fault matrix, checked against the truth and not against reports.

`Invariants` is given what a console shows, at each of its frames, and looks at the processes of the hosts itself. What
is broken is kept as a sentence; `check` raises them all.

I1 no two generations of a job on a node · I2 after a stop no process of the job lives · I3 training is never ended by
our faults · I4 an age that is shown is within two periods of the truth · I5 the console's frames come · I6 the event
log has no duplicates and no holes · I7 memory is bounded · I8 all is green within a time of the end of the fault
(`tests.support.watch` waits for that).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.reports import decode_node_report
from app.fleet.report_reader import ReportReader
from app.recording.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.wire.codec import MalformedMessageError
    from agent.wire.relay import Merged
    from app.recording.events import Event
    from app.session.session import Session
    from tests.support.hosts import Host
    from tests.support.light_job import LightJob

PERIOD_S = 0.2
"""An agent reports five times a second."""
AGE_S = 2 * PERIOD_S
FRAME_LAG_S = 0.25
GROWTH_BYTES = 50 * 2**20
AGENT_BYTES = 120 * 2**20
KEPT_REPORTS = 100_000
STEPS_A_LINE = 40
"""As `tests/support/programs/light_rank.py` prints them."""


class TrueReports:
    """When each report of the agents was made: read beside them, through the file system that all hosts share."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._made_s: dict[tuple[str, str, int], float] = {}
        paths = {node: path / REPORTS_SOCKET for node, path in directories.items()}
        self._reader = ReportReader(paths, self._take, self._malformed)
        self._reader.start()

    def made_s(self, node: str, epoch: str, seq: int) -> float | None:
        """Return when it was made, by this machine's monotonic clock; None of one that was not read here."""
        return self._made_s.get((node, epoch, seq))

    def close(self) -> None:
        self._reader.close()

    def _take(self, node: str, merged: Merged, _way_s: float) -> None:
        now_s = time.monotonic()
        for entry in merged.reports:
            report = decode_node_report(entry.frame)
            key = (node, report.epoch, report.report_seq)
            # It was made no later than it came here, and no earlier than it says.
            self._made_s.setdefault(key, now_s - entry.age_ms / 1000)
        if len(self._made_s) > KEPT_REPORTS:
            self._made_s.clear()

    def _malformed(self, _node: str, error: MalformedMessageError) -> None:
        raise error


class CoreTime:
    """How long threads of this process have waited for a core: what a busy machine takes is not the console's lag."""

    def __init__(self) -> None:
        self._seen_ns: dict[str, int] = {}
        self._look()

    def waited_s(self) -> float:
        """Return how long they have since the last call, together."""
        return self._look() / 1e9

    def _look(self) -> int:
        before, self._seen_ns = self._seen_ns, {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                self._seen_ns[task.name] = int((task / "schedstat").read_text().split()[1])
        return sum(seen_ns - before.get(name, 0) for name, seen_ns in self._seen_ns.items())


class Training:
    """The ranks of a job as they were, to be found again."""

    def __init__(self, job: LightJob, hosts: Iterable[Host]) -> None:
        self.job = job
        self._hosts = list(hosts)
        self._ranks = self._living()
        self._progress = job.progress()

    def _living(self) -> dict[int, psutil.Process]:
        return {one.rank: one.process for one in self.job.processes(self._hosts) if one.rank is not None}

    def broken(self, *, without: Iterable[int] = ()) -> list[str]:
        """Return what is not as it was (I3), but for ranks that the fault itself ends; `moves` compares steps."""
        now = self._living()
        wanted = {rank: process for rank, process in self._ranks.items() if rank not in set(without)}
        return [f"I3: rank {rank} is another process or gone" for rank, one in wanted.items() if now.get(rank) != one]

    def moves(self) -> bool:
        """Whether each living rank has made steps since this was made."""
        progress, before = self.job.progress(), self._progress
        return all(progress.get(rank, (0, 0)) > before.get(rank, (0, 0)) for rank in self._living())


class Invariants:
    """What is broken of I1 and I4 to I7, seen from the frames of one session.

    Attributes:
        broken: Sentences, each with the number of the invariant and how often.
        longest_lag_s: Of a frame, beyond what a busy machine takes.
        num_ages: Ages that were compared with the truth.
    """

    def __init__(self, truth: TrueReports) -> None:
        self.broken: Counter[str] = Counter()
        self.longest_lag_s = 0.0
        self.num_ages = 0
        self.freshest_s = self.oldest_s = 0.0
        """How far shown ages were from the truth, at most: too fresh, too old."""
        self._truth = truth
        self._own_bytes = psutil.Process().memory_info().rss

    def look_at_frame(self, session: Session, lag_s: float, waited_s: float) -> None:
        """Look at what is shown: I4, I5, and I7 of the agents.

        Args:
            session: After a view was taken of it.
            lag_s: How late the frame came.
            waited_s: For how much of that threads have waited for a core.
        """
        self.longest_lag_s = max(self.longest_lag_s, lag_s - waited_s)
        if lag_s - waited_s > FRAME_LAG_S:
            self.broken[f"I5: a frame came {lag_s:.2f} s late, {waited_s:.2f} s of that for want of a core"] += 1
        now_s = time.monotonic()
        cluster = session._cluster
        for name, node in cluster.nodes.items():
            report = node.report
            if report is None:
                continue
            if report.agent_rss_bytes > AGENT_BYTES:
                self.broken[f"I7: the agent of {name} has {report.agent_rss_bytes >> 20} MiB"] += 1
            made_s = self._truth.made_s(name, report.epoch, report.report_seq)
            if made_s is None:
                continue
            self.num_ages += 1
            shown_s, true_s = now_s - float(cluster.last_report_s[node.index]), now_s - made_s
            self.freshest_s = max(self.freshest_s, true_s - shown_s)
            self.oldest_s = max(self.oldest_s, shown_s - true_s)
            if shown_s < true_s - AGE_S:
                self.broken[f"I4: {name} is shown as {shown_s:.2f} s old and is {true_s:.2f} s"] += 1

    def look_at_jobs(self, hosts: Sequence[Host], *jobs: LightJob) -> None:
        """Look for two generations, or two launchers of one (I1)."""
        for job in jobs:
            attempts: dict[str, set[int]] = {}
            ranks: Counter[tuple[str, int]] = Counter()
            for one in job.processes(hosts):
                attempts.setdefault(one.host, set()).add(one.attempt)
                if one.rank is not None:
                    ranks[one.host, one.rank] += 1
            for host, found in attempts.items():
                if len(found) > 1:
                    self.broken[f"I1: attempts {sorted(found)} of {job.job_id} run on {host}"] += 1
            for (host, rank), num in ranks.items():
                if num > 1:
                    self.broken[f"I1: rank {rank} of {job.job_id} runs {num} times on {host}"] += 1

    def check(self, session: Session, notices: Sequence[str] = ()) -> None:
        """Raise all that is broken, of the event log too (I6), and of this process's memory (I7)."""
        self.broken.update(broken_events(list(session.events.latest_first())[::-1]))
        self.broken.update(broken_notices(notices))
        grown = psutil.Process().memory_info().rss - self._own_bytes
        if grown > GROWTH_BYTES:
            self.broken[f"I7: the console has grown by {grown >> 20} MiB"] += 1
        events = [f"{event.at_s:.2f} {event.text}" for event in session.events.latest_first()][::-1]
        assert not self.broken, "\n".join([*(f"{text} ({num} times)" for text, num in self.broken.items()), *events])


def broken_events(events: Sequence[Event]) -> list[str]:
    """Return what is wrong with the order of some events (I6).

    A node goes on from the state that it was left in, a verdict comes once before it goes, and a job does not come to
    the state that it is in.
    """
    broken: list[str] = []
    states: dict[str, str] = {}
    standing: set[tuple[str, tuple[int, ...]]] = set()
    jobs: dict[str, str] = {}
    for event in events:
        if event.kind is EventKind.NODE:
            if event.text.startswith(("node ", "nodes ")):  # the rest is bad news of connections
                broken += _broken_step(event.text, states)
        elif event.kind is EventKind.JOB and not event.text.startswith("root cause"):
            who, _, state = event.text.partition(": ")
            if who not in jobs:  # another attempt: what was found of the one before it goes with it
                standing.clear()
            if jobs.get(who) == state:
                broken.append(f"I6: twice: {event.text}")
            jobs[who] = state
        elif event.kind is EventKind.VERDICT:
            key = (re.sub(r"[\d.,]+", "#", event.text), event.ranks)
            if key in standing:
                broken.append(f"I6: twice: {event.text}")
            standing.add(key)
        elif event.kind is EventKind.OVER:
            standing = {key for key in standing if key[1] != event.ranks}
    return broken


def _broken_step(text: str, states: dict[str, str]) -> list[str]:
    """Return what is wrong with `node h1: up, now stale` after the states of before; take the new ones."""
    found = re.fullmatch(r"nodes? (.*): (?:(\w+), now )?(\w+)", text)
    if found is None or " more" in found[1]:
        return [f"I6: not understood: {text}"]
    names = found[1].split(", ")
    wrong = [name for name in names if states.get(name, "connecting") != (found[2] or "connecting")]
    states.update(dict.fromkeys(names, found[3]))
    return [f"I6: a hole or a duplicate before: {text}"] if wrong else []


def broken_notices(notices: Sequence[str]) -> list[str]:
    """Return which hosts were said to be lost twice, without being back between (I6)."""
    broken: list[str] = []
    lost: set[str] = set()
    for notice in notices:
        found = re.match(r"(\S+): the (?:connection|agent) is (lost|back)", notice)
        if found and found[2] == "back":
            lost.discard(found[1])
        elif found:
            broken += [f"I6: twice: {notice}"] if found[1] in lost else []
            lost.add(found[1])
    return broken


def broken_lines(printed: Sequence[tuple[int, str]]) -> list[str]:
    """Return which lines of light ranks came twice, or not at all (I6)."""
    broken: list[str] = []
    last: dict[tuple[int, str], int] = {}
    for rank, text in printed:
        found = re.fullmatch(r"step (\d+) loss \S+ (attempt \d+)", text)
        if found is None:
            continue
        step, before = int(found[1]), last.get((rank, found[2]), int(found[1]) - STEPS_A_LINE)
        if step != before + STEPS_A_LINE:
            broken.append(f"I6: rank {rank} has a line of step {step} after that of step {before} of {found[2]}")
        last[rank, found[2]] = step
    return broken
