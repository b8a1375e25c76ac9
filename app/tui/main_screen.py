"""The screen below every dialog, and the actions of its keys.

`make_views` returns the views by name, in the order of the number keys, and the page of a rank, which has no number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.binding import Binding
from textual.screen import Screen

from app.diagnosis.verdicts import ENDS
from app.filters.ranks import RankOrder
from app.text import nodes_text
from app.tui.actions import ACTIONS, VIEW_NAMES
from app.tui.views.barriers import BarriersView
from app.tui.views.charts import ChartsView
from app.tui.views.events import EventsView
from app.tui.views.logs import LogsView
from app.tui.views.memory import MemoryView
from app.tui.views.overview import OverviewView
from app.tui.views.rank import RankPage
from app.tui.views.ranks import RanksView
from app.tui.views.stragglers import StragglersView
from app.tui.widgets.line_view import FilterBar, FilteredView
from app.view.summary import is_over

if TYPE_CHECKING:
    from textual.binding import BindingType

    from app.tui.personal_app import PersonalApp
    from app.tui.ui_state import UiState
    from app.tui.widgets.line_view import LineView
    from app.view.view import View

SKIP_S = 10.0


class MainScreen(Screen[None], inherit_bindings=False):
    """The screen whose keys are those of the action table only; see `keyed_screen`."""

    AUTO_FOCUS = ""  # keys belong to the screen until the user types a filter

    @property
    def console(self) -> PersonalApp:
        """The app that shows this screen."""
        return cast("PersonalApp", self.app)

    @property
    def ui(self) -> UiState:
        """State that the views read."""
        return self.console.ui

    def check_action(self, _action: str, _parameters: tuple[object, ...]) -> bool:
        """Refuse everything while the console closes."""
        return not self.ui.farewell

    def action_help(self) -> None:
        """Show every key."""
        from app.tui.dialogs.confirm import HelpScreen  # noqa: PLC0415 - the first frame does not pay for dialogs

        self.app.push_screen(HelpScreen(self.ui))

    def action_filter(self) -> None:
        """Open the filter of the shown view; of the ranks when it has none."""
        self.query_one(FilterBar).open(self._filtered())

    def action_problems(self) -> None:
        """Show only problems, or everything; in the ranks when the shown view has no filter."""
        is_shown = isinstance(self.console.shown, FilteredView)
        view = self._filtered()
        view.show_problems(is_wanted=not (is_shown and view.is_problems_only))

    def action_open(self) -> None:
        """Open the selected rank, or that of the selected row; on its page, its log lines."""
        shown, page = self.console.shown, self.query_one(RankPage)
        if shown is page:
            logs = self.query_one(LogsView)
            logs.show_traceback(is_wanted=False)
            logs.take_filter(f"rank={page.rank}")
            self.console.action_show_view("logs")
            logs.came_from_rank = True
            return
        rank = shown.selected_rank
        if rank is None:
            self._show_notice("Nothing here is about one rank.")
            return
        page.open(rank, self.console.active)
        self.console.action_show_view(RANK_PAGE)

    def action_back(self) -> None:
        """Leave the page of a rank, or clear the filter; log lines opened from that page lead back to it.

        Where nothing is left to go back from, the session is shown again in the place of a job it did not start.
        """
        shown, outside = self.console.shown, self.ui.source.outside
        if isinstance(shown, RankPage):
            self.console.action_show_view(shown.came_from)
            return
        has_cleared = isinstance(shown, FilteredView) and shown.clear()
        if isinstance(shown, LogsView) and shown.came_from_rank:
            self.console.action_show_view(RANK_PAGE)
        elif outside is not None and outside.is_shown and outside.leads_back and not has_cleared:
            self.ui.leave(outside)
            self.console.paint()

    def action_copy(self) -> None:
        """Copy the selection, or the verdict, into the terminal's clipboard (OSC 52)."""
        copied = self.console.shown.copied
        if copied is None:
            self._show_notice("There is nothing to copy yet.")
            return
        what, text = copied
        self.app.copy_to_clipboard(text)
        self.console.show_notice(f"Copied {what}: {text.splitlines()[0]}")

    def action_freeze(self) -> None:
        """Freeze the picture, or let it go on."""
        self.ui.freeze()
        self.console.paint()

    def action_sort(self, order: str = "") -> None:
        """Show the ranks sorted by `order`, or by the next order in turn."""
        self.console.action_show_view("ranks")
        self.query_one(RanksView).sort_by(RankOrder(order) if order else None)

    def action_shape(self) -> None:
        """Show the ranks as a grid, or as a table when they are one."""
        ranks = self.query_one(RanksView)
        is_grid = self.console.shown is ranks and ranks.is_grid
        self.console.action_show_view("ranks")
        ranks.show_grid(is_wanted=not is_grid)

    def action_error(self, direction: int) -> None:
        """Show the next log line at level error, or the previous one."""
        logs = self.query_one(LogsView)
        self.console.action_show_view("logs")
        if not logs.to_error(direction):
            where = "further down" if direction > 0 else "further up"
            self._show_notice(
                f"No line at level error {where}." if len(self.ui.errors) else "No line at level error yet."
            )

    def action_collapse(self) -> None:
        """Show log lines that several ranks print alike as one, or separately again."""
        self.console.action_show_view("logs")
        self.query_one(LogsView).collapse()

    def action_root_cause(self) -> None:
        """Show why the job failed; a second call shows the log lines again."""
        logs = self.query_one(LogsView)
        if logs.cause is None:
            text = no_cause_text(self.ui.view)
            self.console.show_until(text, lambda view: no_cause_text(view) != text, "warning")
            return
        logs.show_traceback(is_wanted=not (logs.display and logs.shows_traceback))
        self.console.action_show_view("logs")

    def action_zoom(self, steps: int) -> None:
        """Make the charts show a longer or a shorter time; elsewhere, show the charts first."""
        charts = self.query_one(ChartsView)
        if self.console.shown is charts:
            charts.zoom(steps)
        else:
            self.console.action_show_view("charts")

    def action_play(self, how: str) -> None:
        """Control the replay; does nothing in a live session."""
        player = self.ui.source.player
        if player is None:
            return
        match how:
            case "pause":
                player.pause()
            case "verdict":
                player.to_next_verdict()
            case "back" | "on":
                player.skip(SKIP_S if how == "on" else -SKIP_S)
            case "slower" | "faster":
                player.change_speed(1 if how == "faster" else -1)

    def action_answer(self) -> None:
        """Connect to the hosts that want an answer, and ask their questions."""
        questions = self.ui.source.questions
        if questions is None:
            self._show_notice("From this console nobody is asked anything.")
        elif not (hosts := questions.waiting):
            self._show_notice("No host wants an answer.")
        else:
            self.console.show_notice(f"going to {nodes_text(hosts)}")
            self.run_worker(questions.begin())

    def action_outside(self) -> None:
        """Show a job that rankdeck did not start, the next one, or rankdeck's own again."""
        outside = self.ui.source.outside
        if outside is None:
            self._show_notice("From this console no host can be looked at from outside.")
            return
        self.ui.turn(outside)
        self.console.paint()

    def action_doctor(self) -> None:
        """Check all hosts, as before a job."""
        doctor = self.ui.source.doctor
        if doctor is None:
            self._show_notice("There are no hosts to look at: not in a recording, nor behind a relay.")
            return
        from app.tui.dialogs.doctor import DoctorScreen  # noqa: PLC0415 - the first frame does not pay for it

        self.app.push_screen(DoctorScreen(self.ui, doctor))

    def action_stacks(self) -> None:
        from app.tui.dialogs.stacks import StacksScreen  # noqa: PLC0415 - the first frame does not pay for it

        self.app.push_screen(StacksScreen(self.ui))

    def _filtered(self) -> FilteredView:
        """Return the shown view; switches to the ranks when it has no filter."""
        if not isinstance(self.console.shown, FilteredView):
            self.console.action_show_view("ranks")
        return cast("FilteredView", self.console.shown)

    def _show_notice(self, text: str) -> None:
        self.console.show_notice(text, "warning")


def no_cause_text(view: View | None) -> str:
    """Return why there is no root cause to show; empty where there is one."""
    job = view.job() if view is not None else None
    if view is None or job is None:
        return "No rank has failed."
    if job.root_cause is not None:
        return ""
    if job.state != "failed" and not any(verdict.cause in ENDS for verdict in view.verdicts()):
        return "No rank has failed."
    return "No traceback is known." if is_over(view) else "The root cause is not known yet: the job has not ended."


def keyed_screen(ui: UiState) -> MainScreen:
    """Return the screen with the chosen keys; two actions that never exist together may share a key.

    Textual's own keymap (`App.set_keymap`, 8.2) is not used: it gives an action other keys but cannot remove a key.
    """
    context = "live" if ui.source.player is None else "replay"
    bound = [
        Binding(",".join(keys), action.call, action.title, show=False)
        for action in ACTIONS
        if context in action.contexts and (keys := ui.keymap.keys(action.name))
    ]

    class KeyedScreen(MainScreen, inherit_bindings=False):
        BINDINGS: ClassVar[list[BindingType]] = list(bound)

    return KeyedScreen(id="main")


RANK_PAGE = "rank"


def make_views(ui: UiState) -> dict[str, LineView]:
    views = (OverviewView, RanksView, BarriersView, StragglersView, MemoryView, LogsView, ChartsView, EventsView)
    return {**dict(zip(VIEW_NAMES, (view(ui) for view in views), strict=True)), RANK_PAGE: RankPage(ui)}
