"""The state that the views read each frame: latest rows, log lines, events and the figures' history."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from agent.wire.jobs import JobState
from app.diagnosis.rank_facts import CONNECTING
from app.filters.lines import ERRORS, FROM_RANKS, RANK_ERRORS, LineWish
from app.text import LINE_LIMIT, clean, clean_name
from app.tui.logs.matches import LogMatches
from app.tui.logs.store import LogStore
from app.view.summary import is_over

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.wire.logs import LogLine
    from app.recording.events import EventLog
    from app.recording.history import History
    from app.tui.actions import Keymap
    from app.tui.logs.matches import CollapsedLines
    from app.tui.logs.store import StoredLine
    from app.tui.source import ConsoleSource, Outside, Player
    from app.tui.theme import Look
    from app.view.nodes import Progress
    from app.view.view import View

MAX_NOTICES = 100
MAX_SHOWN = 300
"""Limit of characters in a notification: it covers part of the screen only."""
FRAMES_PER_VIEW = 2
"""Frames between two views: agents report five times a second, so every second frame makes rows."""
MAX_FRAMES_PER_VIEW = 10
LOOK_FRAC = 0.02
"""Share of a core for making rows: rows of 16,384 ranks take ten times as long as of 1,024, and are made less
often."""
FRAME_S = 0.1
NOTICE_FRAMES = 80
"""Frames for which a new notice is shown, though it takes the room of keys."""
STOPPED_STATES = frozenset({JobState.STOPPING, JobState.STOPPED})
MAX_PASSED_OVER = 256
"""Lines before the latest ones among which the program's own are looked for, where the latest have lines of torch."""
_OF_TORCH = re.compile(
    r"(?:\[rank\d+\]: ?)?\[?[IW]\d{4} [\d:.]+ .*?(?:\w\.cpp:\d+|torch/distributed/[\w/]+\.py:\d+)\]"
    r"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks"
)
"""Notes and warnings of c10d, its store and its backends, and of torchrun; errors are not among them.

Source: torch 2.8 to 2.13, c10/util/Logging.cpp and torch/_logging; gloo/rendezvous/context.cc.
"""
SEARCH_S = 0.01
"""Seconds per frame for the search of log lines, so that keys do not wait."""


class UiState:
    """The state of the screen: the console writes it once per frame, the views read it when they build.

    While the picture is frozen, the views keep their data, and new data is collected behind it.

    Attributes:
        view: The shown rows; None before the first frame.
        latest_view: The latest rows, also while the picture is frozen; actions apply to these.
        notices: The latest sentences about the session.
        tick: Number of frames, for animations.
        noticed_at_tick: Tick of the latest notice.
        farewell: What the console does while it leaves; empty while it stays.
        frozen_s: Age in seconds of the frozen picture; None while it moves.
        max_bytes: Approximate limit of bytes for automatic changes of a view; infinity for answers to the user.
        is_owed: Whether changes were left out because the link was full.
        max_frames_per_view: Limit of frames between two views, however long one takes.
    """

    def __init__(self, look: Look, source: ConsoleSource, keymap: Keymap) -> None:
        self.look = look
        self.source = source
        self.keymap = keymap
        self.logs = LogStore()
        self.view: View | None = None
        self.latest_view: View | None = None
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self.tick = 0
        self.noticed_at_tick, self._noticed_end = 0, self._end
        self.farewell = ""
        self.frozen_s: float | None = None
        self.max_bytes = math.inf
        self.is_owed = False
        self.max_frames_per_view = MAX_FRAMES_PER_VIEW
        self._own_source = source
        """Source that is shown again after jobs that rankdeck did not start."""
        self._errors = LogMatches(ERRORS, self.logs)
        self._own_lines: LogMatches | None = None
        """Lines of the shown job, when other jobs have printed lines too."""
        self._rank_lines: LogMatches | None = None
        """Lines of its ranks, when it was stopped."""
        self._frozen_at_s = 0.0
        self._frozen_events: EventLog | None = None
        self._frozen_history: History | None = None
        self._num_rewinds = 0
        self._next_look = 0
        """Tick of the next view."""
        self._live_logs: LogStore | None = None
        """Lines of a replay since it went back while the picture was frozen."""

    @property
    def events(self) -> EventLog:
        """Events until now, or until the picture was frozen."""
        return self._frozen_events if self._frozen_events is not None else self.source.events

    @property
    def history(self) -> History:
        """History of the job's figures until now, or until the picture was frozen."""
        return self._frozen_history if self._frozen_history is not None else self.source.history

    @property
    def errors(self) -> LogMatches:
        """Log lines at level error; of a job that was stopped, those of its ranks."""
        wanted = RANK_ERRORS if self._is_stopped else ERRORS
        wish = msgspec.structs.replace(wanted, job_id=self.job_of_logs)
        if self._errors.logs is not self.logs or self._errors.wish != wish:
            self._errors = LogMatches(wish, self.logs)
        return self._errors

    def latest_lines(self, num_lines: int) -> list[StoredLine]:
        """Return the latest log lines of the shown job's latest attempt, as far as they have been found.

        Notes and warnings of torch itself, as each rank has some at its start, give way to the program's own lines.
        """
        latest = self._latest_lines(num_lines)
        if not any(_OF_TORCH.match(line.text) for line in latest):
            return latest
        own = [line for line in self._latest_lines(num_lines + MAX_PASSED_OVER) if not _OF_TORCH.match(line.text)]
        return own[-num_lines:] or latest

    def _latest_lines(self, num_lines: int) -> list[StoredLine]:
        """Return the latest log lines of the shown job, from the mark of its latest attempt on.

        Of a job that was stopped they are those of its ranks, if it has any: torchrun ends with a traceback then.
        """
        logs, job_id, first = self.logs, self.job_of_logs, self.first_of_attempt
        if self._is_stopped:
            self._rank_lines = self._latest(self._rank_lines, LineWish(FROM_RANKS, job_id=job_id))
            if lines := self._rank_lines.last(num_lines, first):
                return lines
        if not job_id:
            return [logs.line(number) for number in range(max(first, logs.end - num_lines), logs.end)]
        self._own_lines = self._latest(self._own_lines, LineWish(job_id=job_id))
        return self._own_lines.last(num_lines, first)

    def _latest(self, matches: LogMatches | None, wish: LineWish) -> LogMatches:
        """Return the matches of a wish, with some more lines searched; other ones are replaced."""
        if matches is None or matches.logs is not self.logs or matches.wish != wish:
            matches = LogMatches(wish, self.logs)
        self.search(matches)
        return matches

    @property
    def _is_stopped(self) -> bool:
        """Whether the shown job was stopped, or is being stopped."""
        job = self.view.job() if self.view is not None else None
        return job is not None and job.state in STOPPED_STATES

    @property
    def job_of_logs(self) -> str:
        """Job whose log lines are shown; empty while no other job has lines."""
        job_id = self.view.job_id if self.view is not None else ""
        return job_id if self.logs.has_other_jobs(job_id) else ""

    @property
    def first_of_attempt(self) -> int:
        """Number of the log line from which on lines are of the shown job's latest attempt."""
        return self.logs.first_of_attempt(self.view.job_id if self.view is not None else "")

    @property
    def no_lines_text(self) -> str:
        """Sentence in place of log lines while the shown job has none."""
        if (job := self.view and self.view.job()) and job.is_adopted:
            return "what its ranks print stays where their launcher puts it"
        if self.view and job and is_over(self.view) and self.source.player is None:
            return f"no agent keeps its lines: rankdeck logs {clean_name(job.job_id)} reads the files"
        job_id = self.job_of_logs
        return f"job {clean_name(job_id)} has printed nothing yet" if job_id else "nothing printed yet"

    def no_lines_of(self, rank: int) -> str:
        """Return the sentence in place of log lines of one rank, while others of its job may have some."""
        if (job := self.view and self.view.job()) and job.is_adopted:
            return self.no_lines_text
        kept = f" in the latest {len(self.logs):,} lines of all ranks" if self.logs.first else ""
        return f"rank {rank} has printed nothing{kept or ' yet'}"

    def take_frame(self) -> bool:
        """Take what is new; return whether there are new rows.

        Raises:
            AppError: The session cannot go on.
        """
        self.tick += 1
        self.take_logs(self.source.drain_logs())
        self.take_notices(self.source.drain_notices())
        self.search(self.errors)
        if self.tick < self._next_look:
            return False
        began_s = time.thread_time()
        self.latest_view = view = self.source.view()
        frames = math.ceil((time.thread_time() - began_s) / LOOK_FRAC / FRAME_S)
        frames = max(FRAMES_PER_VIEW, min(self.max_frames_per_view, frames))
        if (player := self.source.player) is not None:
            frames = 1 if player.is_behind else FRAMES_PER_VIEW  # what playing takes, its speed decides
            self._follow(player)
        self._next_look = self.tick + frames
        if self.frozen_s is None:
            self.view = view
        else:
            self.frozen_s = max(0.0, view.now_s - self._frozen_at_s)
        return True

    def freeze(self) -> None:
        """Freeze the picture, or let it go on."""
        if self.frozen_s is not None:
            self.frozen_s = self._frozen_events = self._frozen_history = None
            if self._live_logs is not None:
                self.logs, self._live_logs = self._live_logs, None
        elif self.view is not None:
            self.view = self.view.still()
            self.frozen_s, self._frozen_at_s = 0.0, self.view.now_s
            self._frozen_events, self._frozen_history = self.source.events.still(), self.source.history.still()
        self.logs.hold(is_held=self.frozen_s is not None)

    def turn(self, outside: Outside) -> None:
        """Show a job that rankdeck did not start, the next one, or the session again; log lines are kept."""
        if self.frozen_s is not None:
            self.freeze()
        if not outside.is_shown:
            self._own_source = self.source
        self._show(outside if outside.turn() else self._own_source)

    def leave(self, outside: Outside) -> None:
        """Show the session again in the place of a job that rankdeck did not start."""
        if self.frozen_s is not None:
            self.freeze()
        outside.leave()
        self._show(self._own_source)

    def _show(self, source: ConsoleSource) -> None:
        self.source = source
        self.view, self.latest_view, self._next_look = None, None, 0

    @property
    def own_view(self) -> View | None:
        """Latest rows of the session itself, also while a job is shown that rankdeck did not start."""
        outside = self.source.outside
        return outside.own_view if outside is not None and outside is self.source else self.latest_view

    @property
    def opening(self) -> Progress | None:
        """Progress of reaching the nodes, while none of them has reported; None from then on."""
        view, progress = self.view, self.source.starting
        is_opening = view is not None and not view.num_ranks and bool((view.node_codes == CONNECTING).all())
        return progress if is_opening else None

    def search(self, lines: LogMatches | CollapsedLines) -> None:
        """Search log lines for a frame's share of time, directly or by threads."""
        now_s = time.monotonic()
        deadline_s = now_s + SEARCH_S
        while lines.search():
            began_s, now_s = now_s, time.monotonic()
            lines.pace(now_s - began_s)
            if now_s >= deadline_s:
                return

    def _follow(self, player: Player) -> None:
        """Discard data collected from a replay once it has gone back."""
        if player.num_rewinds != self._num_rewinds:
            self._num_rewinds = player.num_rewinds
            self.notices.clear()
            if self.frozen_s is None:
                self.logs = LogStore()
            else:
                self._live_logs = LogStore()

    def take_notices(self, sentences: Iterable[str]) -> None:
        """Clean and keep sentences about the session."""
        for sentence in sentences:
            self.notices.append(clean(sentence, LINE_LIMIT))
            self.noticed_at_tick, self._noticed_end = self.tick, self._end

    @property
    def new_notice(self) -> str:
        """Latest sentence, empty some seconds later, or once an attempt is over that was not when it came."""
        is_new = self.tick - self.noticed_at_tick < NOTICE_FRAMES and self._end in (None, self._noticed_end)
        return self.notices[-1] if self.notices and is_new else ""

    @property
    def _end(self) -> tuple[str, int] | None:
        """Job and attempt that are shown and over; None while there is none such."""
        job = self.view.job() if self.view is not None and is_over(self.view) else None
        return None if job is None else (job.job_id, job.attempt)

    def tellable(self, text: str) -> str:
        """Return text for a notification, clean and cut: an agent on another machine may send anything."""
        shown = self.look.shown(clean(text, LINE_LIMIT))
        return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + self.look.glyphs.ellipsis

    def take_logs(self, lines: Iterable[tuple[str, LogLine]]) -> None:
        """Clean and keep log lines."""
        logs = self.logs if self._live_logs is None else self._live_logs
        job = self.latest_view.job() if self.latest_view is not None else None
        stopped = job.job_id if job is not None and job.state in STOPPED_STATES else None
        for node, line in lines:
            text, is_stderr = clean(line.text, LINE_LIMIT), line.stream == "stderr"
            is_stopped = line.job_id == stopped
            name = clean_name(node)
            logs.append(name, line.rank, text, is_stderr=is_stderr, job_id=line.job_id, is_stopped=is_stopped)
