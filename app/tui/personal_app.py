"""An app as a person has chosen it: our themes and no others, keys and palette from the action table."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.filter import NoColor

from app.settings.themes import THEMES
from app.tui.actions import Keymap, available
from app.tui.key_order import KeysInOrder
from app.tui.rendering import PacedApp
from app.tui.theme import OwnColours, textual_theme
from app.tui.ui_state import UiState
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.app import App
    from textual.binding import BindingType
    from textual.filter import LineFilter
    from textual.notifications import SeverityLevel
    from textual.screen import Screen

    from app.settings.schema import ConsoleSettings
    from app.tui.dialogs.questions import QuestionScreen
    from app.tui.source import ConsoleSource
    from app.tui.theme import Look


class PersonalApp(KeysInOrder, PacedApp):
    """What of the console a person may choose.

    Attributes:
        look: What the views wear; the stock widgets wear the theme of the same name.
        ui: What the views read.
        active: Name of the view that is shown.
    """

    ENABLE_COMMAND_PALETTE = False  # Textual's own key for it, not the palette: the key is a person's to give
    # Work above every dialog, whatever keys a person has chosen.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True, system=True)]

    def __init__(self, source: ConsoleSource, look: Look, settings: ConsoleSettings) -> None:
        # The settings have heeded it already; Textual would gray out a theme that a person has named all the same.
        os.environ.pop("NO_COLOR", None)
        super().__init__()
        self.look = look
        self._no_colours, self._own_colours = NoColor(), OwnColours()
        for name in THEMES:
            self.register_theme(textual_theme(name))
        self._wear(look.theme)
        self.set_class(look.is_ascii, "ascii")
        self.use_command_palette = True
        self.ui = UiState(look, source, Keymap(settings.keys))
        self.active = settings.start_view
        self._question_screen: QuestionScreen | None = None

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Take away the colours that a stock widget brings and the theme does not."""
        filters, theme = super().get_line_filters(), THEMES[self.look.theme]
        if theme.colours is not None:
            return filters
        return [*filters, self._own_colours if theme.has_colour else self._no_colours]

    @property
    @abstractmethod
    def shown(self) -> LineView:
        """The view that is shown."""

    @abstractmethod
    def action_show_view(self, name: str) -> None:
        """Show a view by name."""

    @abstractmethod
    def paint(self) -> None:
        """Build and paint all that is shown."""

    def action_command_palette(self) -> None:
        """Open the palette; Textual's own placeholder is not ASCII."""
        self.push_screen(CommandPalette(placeholder="Search for commands"))

    def action_suspend_process(self) -> None:
        """Go to the shell; where none has started this console, nobody could bring it back."""
        if _has_shell():
            super().action_suspend_process()
        else:
            self.show_notice("No shell has started this console: there is nothing to go to.", "warning")

    def paint_anew(self, _app: App[object]) -> None:
        """Paint every line, also those that have not changed: the shell has had the terminal meanwhile."""
        for screen in self.screen_stack:
            for widget in screen.walk_children():
                widget.refresh()

    def show_notice(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a sentence above the keys, for some seconds."""
        self.notify(self.ui.tellable(text), severity=severity, markup=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002 (Textual's)
        """Fill the palette from the action table: Textual's own commands, its themes among them, are not in it."""
        for action in available(self.ui.source):
            if action.in_palette:
                run = partial(self.call_later, self.run_action, action.call)
                keys = self.ui.keymap.shown(action.name)
                yield SystemCommand(f"{action.title}  {keys}" if keys else action.title, action.help, run)

    def follow_questions(self) -> None:
        """Show what the person is asked, as long as it is a question."""
        questions = self.ui.source.questions
        question = questions.question if questions is not None else None
        if self._question_screen is not None and (question is None or question.number != self._question_screen.number):
            self._question_screen.leave()
            self._question_screen = None
        if questions is not None and question is not None and self._question_screen is None:
            from app.tui.dialogs.questions import QuestionScreen  # noqa: PLC0415 - most consoles ask nothing

            self._question_screen = QuestionScreen(self.ui.look, question, questions.answer)
            self.push_screen(self._question_screen)

    def action_wear(self, theme: str) -> None:
        """Change the colours of everything."""
        self._wear(theme)
        self.refresh_css(animate=False)
        for screen in self.screen_stack:
            screen.refresh(layout=True)
            for view in screen.query(LineView):
                if view.display:
                    view.redraw()

    def _wear(self, theme: str) -> None:
        self.look.wear(theme)
        self.no_color = not self.look.has_colour
        self.theme = theme


def _has_shell() -> bool:
    """Return whether a shell with jobs has started this process: in a group of its own, of the same session."""
    parent = os.getppid()
    return os.getsid(0) == os.getsid(parent) and os.getpgid(parent) != os.getpgrp()
