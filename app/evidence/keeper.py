"""Keeps evidence of each incident while a person watches, or sleeps: stacks at once, the file a little later.

Lives on the session's event loop; nothing of it holds up a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from app.errors import AppError
from app.evidence.bundle import bundle_name, encode_bundle
from app.evidence.incidents import Incidents
from app.evidence.store import prune, write_evidence

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from app.diagnosis.verdicts import Verdict
    from app.evidence.bundle import Evidence
    from app.evidence.incidents import Incident

AFTER_S = 10.0
"""What is heard for so long after an incident belongs to it."""
CLOSING_S = 5.0
"""For what is under way when the session ends."""


class Kept(Protocol):
    """The session of which evidence is kept."""

    async def keep_stacks(self, job_id: str) -> None:
        """Take the stacks of a job, and remember them."""
        ...

    async def evidence(self, job_id: str, why: str) -> Evidence:
        """Collect what is known by now."""
        ...


class EvidenceKeeper:
    """Watches for incidents of a session."""

    def __init__(self, session: Kept, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self._incidents = Incidents()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = asyncio.Event()
        self._notices: list[str] = []

    def observe(self, verdicts: Iterable[Verdict], now_s: float) -> None:
        """Take what is said now."""
        for incident in self._incidents.begun(verdicts, now_s):
            task = asyncio.create_task(self._keep(incident), name="rankdeck-evidence")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def drain_notices(self) -> list[str]:
        """Return sentences about what was kept since the last call."""
        notices, self._notices = self._notices, []
        return notices

    async def close(self) -> None:
        """Write what is under way with what there is by now; takes at most `CLOSING_S`."""
        self._is_closing.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _keep(self, incident: Incident) -> None:
        await self._session.keep_stacks(incident.job_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_closing.wait(), AFTER_S)
        try:
            evidence = await self._session.evidence(incident.job_id, incident.text)
            path = self._directory / bundle_name(evidence.opening)
            path = await asyncio.to_thread(_write, path, evidence)
        except AppError as error:
            self._notices.append(f"no evidence of this is kept: {error}")
            return
        self._notices.append(f"evidence of this is kept; look at it again: rankdeck replay {path}")


def _write(path: Path, evidence: Evidence) -> Path:
    path = write_evidence(path, encode_bundle(evidence))
    prune(path.parent)
    return path
