"""An app as a person has chosen it: our themes and no others, keys and palette from the action table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding

from app.tui.actions import available
from app.tui.keymap import Keymap
from app.tui.line_view import LineView
from app.tui.main_screen import keyed_screen
from app.tui.stage import Stage
from app.tui.strips import PacedApp
from app.tui.themed_app import ThemedApp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.binding import BindingType
    from textual.screen import Screen

    from app.settings.schema import ConsoleSettings
    from app.tui.question_dialog import QuestionScreen
    from app.tui.source import ConsoleSource
    from app.tui.theme import Look


class PersonalApp(ThemedApp[None], PacedApp):
    """What of the console a person may choose.

    Attributes:
        stage: What the views read; its look is what they wear, and the stock widgets wear the theme of the same name.
    """

    ENABLE_COMMAND_PALETTE = False  # Textual's own key for it, not the palette: the key is a person's to give
    # Work above every dialog, whatever keys a person has chosen.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True, system=True)]

    def __init__(self, source: ConsoleSource, look: Look, settings: ConsoleSettings) -> None:
        super().__init__(look)
        self.use_command_palette = True
        self.stage = Stage(look, source, Keymap(settings.keys))
        self._asking: QuestionScreen | None = None

    def get_default_screen(self) -> Screen[None]:
        """Return the screen with the person's keys."""
        return keyed_screen(self.stage)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002 (Textual's)
        """Fill the palette from the action table: Textual's own commands, its themes among them, are not in it."""
        for action in available(self.stage.source):
            if action.in_palette:
                run = partial(self.call_later, self.run_action, action.call)
                keys = self.stage.keymap.shown(action.name)
                yield SystemCommand(f"{action.title}  {keys}" if keys else action.title, action.help, run)

    def follow_questions(self) -> None:
        """Show what the person is asked, as long as it is a question."""
        questions = self.stage.source.questions
        question = questions.question if questions is not None else None
        if self._asking is not None and (question is None or question.number != self._asking.number):
            self._asking.leave()
            self._asking = None
        if questions is not None and question is not None and self._asking is None:
            from app.tui.question_dialog import QuestionScreen  # noqa: PLC0415 - most consoles ask nothing

            self._asking = QuestionScreen(self.stage.look, question, questions.answer)
            self.push_screen(self._asking)

    def action_wear(self, theme: str) -> None:
        """Change the colours of everything."""
        self.wear(theme)
        self.refresh_css(animate=False)
        for screen in self.screen_stack:
            screen.refresh(layout=True)
            for view in screen.query(LineView):
                if view.display:
                    view.redraw()
