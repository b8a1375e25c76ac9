"""Keeps evidence of each incident, attended or not: stacks immediately, the file a little later.

One incident has one file, however many consoles come and go while it lasts.

`IncidentRecorder` lives on the session's event loop; nothing of it delays a frame. `Incidents` decides, without a
clock, which verdicts are worth evidence, and when.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections import deque
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from app.diagnosis.causes import Severity
from app.errors import AppError
from app.recording.bundle import bundle_name, encode_bundle
from app.recording.evidence import Answers, default_directory, latest_evidence, prune, write_evidence
from app.text import clean_name, ranks_text
from app.threads import in_daemon_thread
from app.view.verdict_text import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

    from app.diagnosis.causes import Cause
    from app.diagnosis.verdicts import Verdict
    from app.recording.bundle import Evidence

AFTER_S = 10.0
"""Seconds after an incident in which received reports belong to it."""
PATIENCE_S = 10.0
"""Timeout in seconds of the agents' answers; what has come by then is kept."""
HURRY_S = 2.0
"""The same timeout, for all that waits for an agent, once the session ends."""
CLOSING_S = 8.0
"""Timeout in seconds of all tasks under way when the session ends."""
WRITING_S = 20.0
"""Timeout in seconds of what is being written then: a network's disk may hang."""


class Kept(Protocol):
    """The session of which evidence is kept."""

    async def take_stacks(self, job_id: str, into: Answers) -> None:
        """Take the stacks of a job."""

    async def ask_agents(self, job_id: str, into: Answers) -> None:
        """Ask the agents for what they remember."""

    async def evidence(self, job_id: str, why: str, answers: Answers) -> Evidence:
        """Collect what is known by now."""


class IncidentRecorder:
    """Watches for incidents of a session."""

    def __init__(self, session: Kept, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self._incidents = Incidents()
        self._last_observed: tuple[list[Verdict], float] = ([], 0.0)
        """Last verdicts, and when they were observed."""
        self._tasks: dict[asyncio.Task[None], str] = {}
        """What is under way, and the ranks and job that it is about."""
        self._is_closing = asyncio.Event()
        self._writing: set[asyncio.Task[None]] = set()
        """Tasks whose evidence is complete and goes to the disk: a write cannot be taken back."""
        self._notices: list[str] = []
        self._by_file: dict[Path | str, str] = {}

    def observe(self, verdicts: Iterable[Verdict], live: Iterable[tuple[str, int]], now_s: float) -> None:
        """Take the current verdicts, and which attempts of jobs have not ended; ignored once it closes."""
        if self._is_closing.is_set():
            return
        self._incidents.see_alive(live)
        self._last_observed = (list(verdicts), now_s)
        was_limited = self._incidents.is_limited
        begun = self._incidents.begun(self._last_observed[0], now_s)
        if self._incidents.is_limited and not was_limited:
            self._add_notice(f"no evidence of more incidents is kept: {MAX_INCIDENTS} within an hour are the limit")
        for incident in begun:
            task = asyncio.create_task(self._keep(incident), name="rankdeck-evidence")
            self._tasks[task] = incident.who
            task.add_done_callback(self._on_done)

    def drain_notices(self) -> list[str]:
        """Return sentences about evidence kept since the last call."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def sentences(self) -> list[str]:
        """All sentences about evidence, one for each file: of several incidents that one file is about, the first."""
        return list(self._by_file.values())

    @property
    def is_keeping(self) -> bool:
        """Whether evidence is being collected or written: closing waits for it."""
        return bool(self._tasks)

    def _add_notice(self, sentence: str, path: Path | None = None) -> None:
        self._by_file.setdefault(path or sentence, sentence)
        self._notices.append(sentence)

    async def close(self) -> None:
        """Write what is under way, or was about to be, with what there is by now.

        Takes at most `CLOSING_S`, and `WRITING_S` more for files that are being written.
        """
        verdicts, observed_at_s = self._last_observed
        self.observe(verdicts, (), observed_at_s + SETTLE_S)
        self._is_closing.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
            for task in late - self._writing:
                task.cancel()
                self._add_notice(f"no evidence of {self._tasks[task]} is kept: it took too long to collect")
            _, unwritten = await asyncio.wait(late, timeout=WRITING_S) if late else (late, late)
            for who in (self._tasks[task] for task in unwritten):
                self._add_notice(f"no evidence of {who} is kept: {self._directory} took too long to write it")

    def _on_done(self, task: asyncio.Task[None]) -> None:
        who = self._tasks.pop(task)
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours here must neither end the console nor be lost.
            self._add_notice(f"no evidence of {who} is kept: {type(error).__name__}: {error}")

    async def _keep(self, incident: Incident) -> None:
        begun_s = time.time() - incident.stood_s  # noqa: TID251 - files are dated by it
        find = partial(latest_evidence, self._directory, incident.job_id, begun_s + SETTLE_S)
        if await self._is_kept(incident, find):
            return
        answers = Answers()
        await self._while_open(self._session.take_stacks(incident.job_id, answers), PATIENCE_S)
        await self._while_open(asyncio.sleep(AFTER_S), AFTER_S, hurry_s=0.0)
        await self._while_open(self._session.ask_agents(incident.job_id, answers), PATIENCE_S)
        if await self._is_kept(incident, find):
            return  # by another console
        try:
            evidence = await self._session.evidence(incident.job_id, incident.text, answers)
            path = self._directory / bundle_name(evidence.opening)
            self._writing |= {task for task in self._tasks if task is asyncio.current_task()}
            path = await in_daemon_thread(partial(_write, path, evidence, find))
        except AppError as error:
            self._add_notice(f"no evidence of {incident.who} is kept: {error}")
            return
        self._add_notice(f"evidence of {incident.who} is kept; look at it again: rankdeck replay {path}", path)

    async def _is_kept(self, incident: Incident, find: Callable[[], Path | None]) -> bool:
        """Return whether there is evidence from since the incident began, and add a sentence about it."""
        path = await in_daemon_thread(find)
        if path is not None:
            self._add_notice(f"evidence of {incident.who} was kept before; look again: rankdeck replay {path}", path)
        return path is not None

    async def _while_open(self, work: Coroutine[None, None, None], patience_s: float, hurry_s: float = HURRY_S) -> None:
        """Do some work until it is done or takes too long; once the session closes it has `hurry_s` left."""
        doing = asyncio.ensure_future(work)
        closing = asyncio.ensure_future(self._is_closing.wait())
        try:
            await asyncio.wait({doing, closing}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait({doing}, timeout=hurry_s)
        finally:
            for task in (doing, closing):
                task.cancel()
            await asyncio.gather(doing, closing, return_exceptions=True)


def _write(path: Path, evidence: Evidence, find: Callable[[], Path | None]) -> Path:
    content = encode_bundle(evidence)
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks
            stack.callback(os.close, directory := os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(directory, fcntl.LOCK_EX)
        path = find() or write_evidence(path, content)  # another console of this incident may have written one
    if path.parent == default_directory():
        prune(path.parent)  # a directory that the user names is the user's to keep in order
    return path


SETTLE_S = 1.0
"""Seconds; a verdict that stands for less is not worth a file, and more ranks may be found in what follows."""
AGAIN_S = 600.0
"""Seconds between two incidents of one kind and job."""
MAX_INCIDENTS = 20
"""Limit of incidents of one session within `LIMITED_S`."""
LIMITED_S = 3600.0


class Incident(NamedTuple):
    """A hang, a bad end, a lost node: a critical verdict worth evidence. Its ranks and job are `who`."""

    job_id: str
    attempt: int
    cause: Cause
    text: str
    who: str
    stood_s: float
    """Seconds since it began, as far as that is known."""


class Incidents:
    """Follows the verdicts.

    Attributes:
        is_limited: Whether the last incident that became certain is left out: there were too many before it.
    """

    def __init__(self) -> None:
        self.is_limited = False
        self._since_s: dict[tuple[str, int, Cause], float] = {}
        self._kept_at_s: dict[tuple[str, int, Cause], float] = {}
        self._begun_at_s: dict[tuple[str, int], float] = {}
        """When the last incident of an attempt was found: what follows within `AFTER_S` is in its file."""
        self._seen_alive: set[tuple[str, int]] = set()
        self._latest_s: deque[float] = deque(maxlen=MAX_INCIDENTS)
        """When the last incidents of all were found."""

    def see_alive(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Take which attempts of jobs have not ended: one that ended unseen leaves nothing to keep."""
        self._seen_alive.update(attempts)

    def begun(self, verdicts: Iterable[Verdict], now_s: float) -> list[Incident]:
        """Take the current verdicts; return the incidents that have just become certain."""
        critical = {
            (verdict.job, verdict.attempt, verdict.cause): verdict
            for verdict in verdicts
            if verdict.severity is Severity.CRITICAL and (verdict.job, verdict.attempt) in self._seen_alive
        }
        self._since_s = {key: self._since_s.get(key, now_s) for key in critical}
        found = []
        for key, verdict in critical.items():
            if now_s - self._kept_at_s.get(key, float("-inf")) < AGAIN_S:
                self._kept_at_s[key] = now_s  # one that lasts is one
            elif now_s - self._since_s[key] < SETTLE_S:
                continue
            elif now_s - self._begun_at_s.get(key[:2], float("-inf")) < AFTER_S:
                self._kept_at_s[key] = now_s
            elif len(self._latest_s) == MAX_INCIDENTS and now_s - self._latest_s[0] < LIMITED_S:
                self.is_limited = True  # one that lasts is kept later
            else:
                self._kept_at_s[key] = self._begun_at_s[key[:2]] = now_s
                self._latest_s.append(now_s)
                self.is_limited = False
                ranks = f" ({ranks_text(verdict.culprits)})" if verdict.culprits else ""
                who = f"job {clean_name(verdict.job)}{ranks}"
                found.append(Incident(*key, sentence(verdict), who, _stood_s(verdict)))
        return found


def _stood_s(verdict: Verdict) -> float:
    """Return the seconds since what a verdict is about began; 0 where nothing of it is known."""
    return max(verdict.for_s or 0.0, verdict.waited_s, 0.0 if verdict.exit is None else verdict.exit.age_s)
