"""An app with the user's settings: its own themes only, keys and palette from the action table."""

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
from app.view.summary import is_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.app import App
    from textual.binding import BindingType
    from textual.filter import LineFilter
    from textual.notifications import SeverityLevel
    from textual.screen import Screen

    from app.settings.schema import ConsoleSettings
    from app.tui.dialogs.questions import QuestionScreen
    from app.tui.source import ConsoleSource
    from app.tui.theme import Look
    from app.view.view import View


class PersonalApp(KeysInOrder, PacedApp):
    """The base of the console: the parts that follow the user's settings.

    Attributes:
        look: The look of the views; the stock widgets have the theme of the same name.
        ui: State that the views read.
        active: Name of the shown view.
    """

    ENABLE_COMMAND_PALETTE = False  # only Textual's own key for the palette: the user's settings choose the key
    # These work above every dialog, whatever keys the user has chosen.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True, system=True)]

    def __init__(self, source: ConsoleSource, look: Look, settings: ConsoleSettings) -> None:
        # The settings have applied it already; Textual would gray out even a theme that the user has chosen.
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
        self._is_overtaken: Callable[[View], bool] | None = None
        """Whether the rows have overtaken the notice that is shown until then; None without one."""

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Add a filter of colours that stock widgets use and the theme does not have."""
        filters, theme = super().get_line_filters(), THEMES[self.look.theme]
        if theme.colours is not None:
            return filters
        return [*filters, self._own_colours if theme.has_colour else self._no_colours]

    @property
    @abstractmethod
    def shown(self) -> LineView:
        """View that is shown."""

    @abstractmethod
    def action_show_view(self, name: str) -> None:
        """Show a view by name."""

    @abstractmethod
    def paint(self) -> None:
        """Build and paint everything shown."""

    def action_command_palette(self) -> None:
        """Open the palette, with an ASCII placeholder, unlike Textual's."""
        self.push_screen(CommandPalette(placeholder="Search for commands"))

    def action_suspend_process(self) -> None:
        """Suspend to the shell; refused when no shell started this console, since nothing could resume it."""
        if _has_shell():
            super().action_suspend_process()
        else:
            self.show_notice("No shell has started this console: there is nothing to go to.", "warning")

    def repaint(self, _app: App[object]) -> None:
        """Paint every line, also unchanged ones: the shell has used the terminal."""
        for screen in self.screen_stack:
            for widget in screen.walk_children():
                widget.refresh()

    def show_notice(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a sentence above the keys for some seconds."""
        self.notify(self.ui.tellable(text), severity=severity, markup=False)

    def show_until(self, text: str, is_overtaken: Callable[[View], bool], severity: SeverityLevel) -> None:
        """Show a sentence for some seconds, or until the rows have overtaken it."""
        self._is_overtaken = is_overtaken
        self.show_notice(text, severity)

    def show_until_ended(self, text: str) -> None:
        """Show a sentence about the end of the job, until the first line has it or the job has ended."""
        about = text.partition("; ")[0]
        self.show_until(text, lambda view: is_over(view) or about in view.headline().text, "information")

    def follow_session(self) -> None:
        """Show the present question of a host, and take a notice away that the rows have overtaken."""
        self._follow_questions()
        view = self.ui.view
        if view is not None and self._is_overtaken is not None and self._is_overtaken(view):
            self._is_overtaken = None
            self.clear_notifications()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002 (Textual's)
        """Fill the palette from the action table, without Textual's own commands and themes."""
        for action in available(self.ui.source):
            if action.in_palette:
                run = partial(self.call_later, self.run_action, action.call)
                keys = self.ui.keymap.shown(action.name)
                yield SystemCommand(f"{action.title}  {keys}" if keys else action.title, action.help, run)

    def _follow_questions(self) -> None:
        """Show the present question of a host, and close it when it is over."""
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
        """Change the theme of the whole app."""
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
    """Return whether a job-control shell started this process: same session, its own process group."""
    parent = os.getppid()
    return os.getsid(0) == os.getsid(parent) and os.getpgid(parent) != os.getpgrp()
