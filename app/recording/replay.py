"""A recording in the place of a session: the same console shows it, paused, faster, from any moment on."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from agent.wire.secret_mask import masked_text
from app.diagnosis.rank_facts import Thresholds
from app.errors import AppError, UsageError
from app.recording.playback import BEGIN_S, Moment, Playback, timeline, verdict_key
from app.stacks.groups import NodeStacks
from app.text import clock_text, seconds_text
from app.view.verdict_text import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.wire.logs import LogLine
    from app.recording.events import Event, EventLog
    from app.recording.history import History
    from app.recording.records import Recording
    from app.view.view import View
    from ddpcore.wire import Fault

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
ON_REQUEST = "requested by a user"
"""Why evidence was kept that no incident was the reason for."""
_DURATION = re.compile(r"\d[\d.,]* (?:ms|s|min|h|d)\b(?: \d+ (?:s|min|h)\b)?")
MAX_FRAME_S = 0.05
"""Longest time in seconds that one frame may spend on catching up: keys do not wait."""


class Replay:
    """Plays a recording; the methods are those of `app.tui.source.ConsoleSource`, and of its player."""

    watched_job = ""
    must_succeed = False
    cut_off = ""
    leaving = "a recording is left as it was"
    can_inject = False
    control = None
    starter = None
    starting = None
    questions = None
    doctor = None
    outside = None
    how_to_begin = reading = ""
    reads_loss = False
    evidence_notices = ()

    def __init__(
        self,
        recording: Recording,
        *,
        speed: float = 1.0,
        start_s: float | None = None,
        thresholds: Thresholds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Play from `start_s` on, at `speed` times the pace at which it was recorded; `clock` returns seconds.

        Evidence of an incident is shown from where its verdict begins, and paused there, unless `start_s` is given.
        Verdicts are by the `thresholds` of now, not by those of when it was recorded.
        """
        self._is_cut = recording.is_cut
        self._thresholds = thresholds or Thresholds()
        self._playback = Playback(recording, self._thresholds)
        self._speed = speed
        self._is_paused = False
        self._goal_s = min(max(0.0, start_s or 0.0), recording.length_s)
        why = recording.opening.why
        self._incident = "" if start_s is not None or why == ON_REQUEST else _about(why)
        """Begin of the verdict that is searched for; empty for any."""
        self._is_searching = bool(self._incident)
        """Whether the next verdict is searched for."""
        self._known: set[tuple[object, ...]] | None = None
        """Verdicts known since the search began; None until it begins."""
        self._clock = clock
        self._looked_at_s = clock()
        self.started_at_s = self._looked_at_s
        self.num_rewinds = 0

    @property
    def title(self) -> str:
        """Text that it is a recording, and where in it we are."""
        playback = self._playback
        where = f"replay {clock_text(playback.at_s)}/{clock_text(playback.length_s)}"
        if self._is_searching or self._goal_s > playback.at_s + 2.0 * self._speed:
            how = "seeking"
        else:
            how = "the end" if playback.is_over else "paused" if self._is_paused else ""
        return " ".join(filter(None, (where, how, "" if self._speed == 1.0 else f"x{self._speed:g}")))

    @property
    def is_behind(self) -> bool:
        """Whether it is on its way to a later moment."""
        return self._is_searching or self._playback.at_s < self._goal_s

    @property
    def stall_s(self) -> float:
        """Seconds from which a wait is a stall."""
        return self._thresholds.stall_s

    @property
    def player(self) -> Replay:
        """Target of the keys of a replay."""
        return self

    async def start(self) -> None:
        """Do nothing: all is there."""

    def view(self) -> View:
        """Go on by as much as is due, and return the rows of that moment."""
        now_s = self._clock()
        elapsed_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        playback = self._playback
        if not self._is_searching and not self._is_paused:
            self._goal_s = min(playback.length_s, self._goal_s + elapsed_s * self._speed)
        deadline_s = now_s + MAX_FRAME_S
        while not playback.is_over and (playback.at_s < self._goal_s or self._is_searching):
            if playback.at_s < self._goal_s:
                playback.step(self._goal_s)
            else:
                self._search()
            if self._clock() > deadline_s:
                break
        if playback.is_over and self._incident:
            self._seek(0.0)  # its verdict is not in it
        elif playback.is_over:
            self._stop_searching()
        return playback.view()

    def _search(self) -> None:
        """Take one step towards the next verdict."""
        playback = self._playback
        if self._known is None:
            self._known = self._verdict_keys()
        playback.step(playback.length_s)
        self._goal_s = playback.at_s
        keys = self._verdict_keys()
        if self._incident:
            is_found = self._incident in [_about(masked_text(sentence(verdict))) for verdict in playback.verdicts]
        else:
            is_found = bool(keys - self._known)
        if is_found:
            self._stop_searching()
            self._is_paused = True
        else:
            self._known &= keys  # what has ended may come again

    def _stop_searching(self) -> None:
        self._is_searching, self._known, self._incident = False, None, ""

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        """Return the log lines that have been played since the last call."""
        return self._playback.drain_logs()

    def drain_notices(self) -> list[str]:
        """Return the sentences that have been played since the last call."""
        return self._playback.drain_notices()

    @property
    def events(self) -> EventLog:
        """Events up to this moment of the recording."""
        return self._playback.events

    @property
    def history(self) -> History:
        """Figures of the job up to this moment of the recording."""
        return self._playback.history

    def time_text(self, event: Event) -> str:
        """Return when an event was by its place in the recording."""
        return clock_text(max(0.0, event.at_s - BEGIN_S))

    async def inject(self, fault: Fault) -> str:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"rank {fault.rank} is in a recording: nothing can be done to it")

    async def stacks(self, *, is_native: bool) -> list[NodeStacks]:  # noqa: ARG002 - they are as they were taken
        """Return the latest stacks up to this moment, else the first ones after it, marked as later.

        Raises:
            AppError: There are none in the recording.
        """
        found, at_s = self._playback.nearest_stacks()
        if not found:
            raise AppError("no stacks were taken in this recording")
        late_s = at_s - self._playback.at_s
        return found if late_s <= 0.0 else [NodeStacks("later", None, f"taken {seconds_text(late_s)} on"), *found]

    def farewell(self) -> str:
        """Return what the user should know about the file."""
        problems = ["the recording was cut short: what came last is not in it"] if self._is_cut else []
        if lost := self._playback.num_malformed:
            problems.append(f"{lost:,} report{'' if lost == 1 else 's'} in the recording could not be read")
        return f"rankdeck: {'; '.join(problems)}" if problems else ""

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    def pause(self) -> None:
        """Pause, or go on; at the end, restart."""
        if self._playback.is_over:
            self._seek(0.0)
            self._is_paused = False
        else:
            self._is_paused = not self._is_paused

    def change_speed(self, steps: int) -> None:
        """Play faster or slower by so many places of `SPEEDS`."""
        nearest = min(range(len(SPEEDS)), key=lambda place: abs(SPEEDS[place] - self._speed))
        self._speed = SPEEDS[min(max(nearest + steps, 0), len(SPEEDS) - 1)]

    def skip(self, seconds: float) -> None:
        """Go on, or back, by so many seconds of the recording."""
        self._seek(self._goal_s + seconds)

    def to_next_verdict(self) -> None:
        """Go on to the next verdict that does not stand now, and pause there."""
        self._is_searching = True

    def play_to_end(self) -> Iterator[Moment]:
        """Yield each new verdict and notice until the end; blocks as long as it takes."""
        self._stop_searching()
        yield from timeline(self._playback)
        self._goal_s = self._playback.at_s

    def _seek(self, to_s: float) -> None:
        self._stop_searching()
        self._goal_s = min(max(0.0, to_s), self._playback.length_s)
        if self._goal_s < self._playback.at_s:
            self._playback.begin()
            self.num_rewinds += 1

    def _verdict_keys(self) -> set[tuple[object, ...]]:
        return {verdict_key(verdict) for verdict in self._playback.verdicts}


def _about(text: str) -> str:
    """Return what stays the same of a verdict's sentence while it lasts."""
    return _DURATION.sub("#", text.partition(";")[0])
