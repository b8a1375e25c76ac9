"""What all views of one console share: the look, the session, the newest rows and the logs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from app.safe_text import LINE_LIMIT, clean, clean_name
from app.tui.log_store import LogStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.wire.logs import LogLine
    from app.tui.source import ConsoleSource, Player
    from app.tui.theme import Look
    from app.view import View

MAX_NOTICES = 100
MAX_TOLD = 300
"""Characters of a notification: it covers a part of the screen, not all of it."""


class Stage:
    """Written by the console once per frame, read by the views when they build.

    Attributes:
        view: The newest rows; None before the first frame.
        notices: The newest sentences about the session.
        beat: Counts frames, for what moves while one waits.
        noticed_at_beat: When the newest notice came.
        farewell: What the console is doing on its way out; empty while it stays.
    """

    def __init__(self, look: Look, source: ConsoleSource) -> None:
        self.look = look
        self.source = source
        self.logs = LogStore()
        self.view: View | None = None
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self.beat = 0
        self.noticed_at_beat = 0
        self.farewell = ""
        self._num_rewinds = 0

    def take_view(self, view: View) -> None:
        """Make these rows the newest."""
        self.view = view
        if self.source.player is not None:
            self._follow(self.source.player)

    def _follow(self, player: Player) -> None:
        """Let go of what was gathered of a recording once it has gone back."""
        if player.num_rewinds != self._num_rewinds:
            self._num_rewinds = player.num_rewinds
            self.logs = LogStore()
            self.notices.clear()

    def take_notices(self, sentences: Iterable[str]) -> None:
        """Clean and keep sentences about the session."""
        for sentence in sentences:
            self.notices.append(clean(sentence, LINE_LIMIT))
            self.noticed_at_beat = self.beat

    def tellable(self, text: str) -> str:
        """Return text for a notification: what an agent says comes from another machine, and may be anything."""
        shown = self.look.shown(clean(text, LINE_LIMIT))
        return shown if len(shown) <= MAX_TOLD else shown[:MAX_TOLD] + self.look.glyphs.ellipsis

    def take_logs(self, lines: Iterable[tuple[str, LogLine]]) -> None:
        """Clean and keep log lines."""
        for node, line in lines:
            self.logs.append(
                clean_name(node), line.rank, clean(line.text, LINE_LIMIT), is_stderr=line.stream == "stderr"
            )
