"""The screen below every dialog."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen

from app.tui.actions import screen_bindings
from app.tui.views.charts import ChartsView
from app.tui.views.logs import LogsView

if TYPE_CHECKING:
    from textual.binding import BindingType


SKIP_S = 10.0


class MainScreen(Screen[None], inherit_bindings=False):
    """Its keys are the action table's, and no others."""

    BINDINGS: ClassVar[list[BindingType]] = list(screen_bindings())

    async def action_root_cause(self) -> None:
        """Show why the job failed; asked again, the lines of the logs."""
        logs = self.query_one(LogsView)
        if logs.cause is None:
            self.notify("No rank has failed.", severity="warning", markup=False)
            return
        logs.show_traceback(is_wanted=not (logs.display and logs.shows_traceback))
        await self.app.run_action("app.show_view('logs')")

    async def action_zoom(self, steps: int) -> None:
        """Let the charts show a longer time, or a shorter one; elsewhere, show them first."""
        charts = self.query_one(ChartsView)
        if charts.display:
            charts.zoom(steps)
        else:
            await self.app.run_action("app.show_view('charts')")

    def action_play(self, how: str) -> None:
        """Do something to the recording that is played; nothing to what is live."""
        player = self.query_one(LogsView).stage.source.player
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

    def action_stacks(self) -> None:
        """Show where every rank stands, frame by frame."""
        from app.tui.stacks_screen import StacksScreen  # noqa: PLC0415 - the first frame does not pay for it

        self.app.push_screen(StacksScreen(self.query_one(LogsView).stage))
