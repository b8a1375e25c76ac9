"""The console: one screen, its views, a frame loop, and keys that never wait for data."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work

from app.errors import AppError
from app.settings.schema import ConsoleSettings
from app.tui.actions import VIEW_NAMES
from app.tui.main_screen import keyed_screen, make_views
from app.tui.personal_app import PersonalApp
from app.tui.rendering import calm_collector
from app.tui.theme import Look
from app.tui.views.logs import LogsView
from app.tui.views.ranks import RanksView
from app.tui.widgets.footer import Footer, TooSmall, is_too_small
from app.tui.widgets.header import Header
from app.tui.widgets.line_view import FilterBar
from app.view.actions import NOT_AGAIN

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Print, Resize
    from textual.screen import Screen

    from app.tui.source import ConsoleSource
    from app.tui.widgets.line_view import LineView

DEFAULT_SETTINGS = ConsoleSettings()
FRAMES_PER_S = 10
"""Rate at which logs move; a higher one shows no more and overloads a slow terminal."""


class Console(PersonalApp):
    """Shows a session until the user quits.

    Attributes:
        failure: The error that ended the session; None when the user quit.
    """

    TITLE = "rankdeck"
    CSS_PATH = Path(__file__).with_name("console.tcss")

    def __init__(
        self, source: ConsoleSource, look: Look | None = None, settings: ConsoleSettings = DEFAULT_SETTINGS
    ) -> None:
        """Show a source with the user's settings; `look` replaces the look of the settings."""
        super().__init__(source, look or Look.chosen(settings), settings)
        self.failure: AppError | None = None
        self.has_painted = asyncio.Event()
        """Set once the first frame is painted."""
        self.printed: list[str] = []
        """Captured prints, which must not reach the terminal under the screen."""
        self._left_undone = ""
        """Restart in progress that the user was warned about when quitting."""

    def get_default_screen(self) -> Screen[None]:
        return keyed_screen(self.ui)

    def compose(self) -> ComposeResult:
        ui = self.ui
        self._header = Header(ui)
        self._header.active = self.active
        self._footer, self._too_small = Footer(ui), TooSmall(ui)
        self._views = make_views(ui)
        yield self._header
        for view in (*self._views.values(), self._too_small):
            view.add_class("view")
            yield view
        yield FilterBar(ui)
        yield self._footer

    def on_mount(self) -> None:
        self.app_resume_signal.subscribe(self, self.repaint)
        self._arrange()
        self.start_frames()

    def start_frames(self) -> None:
        """Start the frame timer; a console that stands still for a test or a picture overrides this."""
        self.set_interval(1 / FRAMES_PER_S, self.frame)

    def on_ready(self) -> None:
        """Keep garbage collection from delaying keys."""
        calm_collector()
        self.has_painted.set()

    def on_print(self, event: Print) -> None:
        self.printed.append(event.text)
        self.ui.take_notices(filter(None, event.text.splitlines()))

    def on_resize(self, _event: Resize) -> None:
        """Rearrange the views; the app's own size is the new one only after this message."""
        self.call_later(self._arrange)

    def action_show_view(self, name: str) -> None:
        self.query_one(LogsView).came_from_rank &= name == self.active
        self.active = name
        if name in VIEW_NAMES:
            self._header.active = name
        self.query_one(FilterBar).close()
        self._arrange()

    def action_next_view(self, steps: int) -> None:
        """Show the view that is so many places further."""
        self.action_show_view(VIEW_NAMES[(VIEW_NAMES.index(self._header.active) + steps) % len(VIEW_NAMES)])

    def action_scroll(self, how: str, amount: int) -> None:
        """Move within the view: by `rows`, by `pages`, to an `edge` or to the `side`."""
        view = self.shown
        {"rows": view.move, "pages": view.page, "edge": view.to_edge, "side": view.sideways}[how](amount)

    @work
    async def action_fault(self) -> None:
        """Ask which fault to inject, and inject it."""
        from app.tui.job_actions import ask_for_fault  # noqa: PLC0415

        await ask_for_fault(self, self.query_one(RanksView).follow_culprit(view) if (view := self.ui.view) else 0)

    @work
    async def action_control(self) -> None:
        """Ask what to do to the job as a whole, and do it."""
        from app.tui.job_actions import ask_for_control  # noqa: PLC0415

        await ask_for_control(self)

    @work
    async def action_start_program(self) -> None:
        """Ask which program to start where no job runs, and start it."""
        from app.tui.job_actions import ask_for_program  # noqa: PLC0415

        await ask_for_program(self)

    async def action_quit(self) -> None:
        """End the session and leave; a second call leaves immediately. Warns first when an action is in progress."""
        if self.ui.farewell:
            self.exit()
            return
        control = self.ui.source.control
        if control is not None and control.doing and control.doing != self._left_undone:
            self._left_undone = control.doing
            key = self.ui.keymap.first("quit")
            self.show_notice(f"{control.doing}. Without this console {NOT_AGAIN}; {key} again leaves.", "warning")
            return
        self.ui.farewell = f"leaving: {self.ui.source.leaving}; {self.ui.keymap.first('quit')} again leaves at once"
        self._header.redraw()
        self.run_worker(self._leave(), exit_on_error=True)

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool:
        """Refuse all but a second quit while the console closes: what is typed is meant for the shell."""
        return not self.ui.farewell or action == "quit"

    @property
    def shown(self) -> LineView:
        return self._views[self.active]

    def _arrange(self) -> None:
        has_room = not is_too_small(self.size)
        for name, view in self._views.items():
            view.display = has_room and name == self.active
        self._header.display = self._footer.display = has_room
        if not has_room:
            self.query_one(FilterBar).close()
        self._too_small.display = not has_room
        self.paint()

    def frame(self) -> None:
        """Take what is new and paint it, as far as the terminal can take it."""
        try:
            has_new_rows = self.ui.take_frame()
        except AppError as error:
            self.failure = error
            self.exit(return_code=error.exit_code)
            return
        ui = self.ui
        self.follow_session()
        ui.is_owed |= has_new_rows
        if not self.may_move:
            return
        ui.max_bytes = self.pacer.slice_bytes
        if ui.is_owed:
            ui.is_owed = False
            self.paint()
        elif self.active == "logs":
            self.shown.redraw()
        ui.max_bytes = math.inf

    def paint(self) -> None:
        for view in (self._header, self.shown, self._footer, self._too_small):
            if view.display:
                view.redraw()

    async def _leave(self) -> None:
        await self.ui.source.close()
        self.exit()
