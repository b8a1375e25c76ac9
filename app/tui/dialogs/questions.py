"""The question of a host that the user must answer to log in, over the current screen. Loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult

    from app.ssh.questions import Question
    from app.tui.theme import Look

MAX_CHARS = 1024
"""Limit of characters in an answer."""


class AnswerInput(Input):
    """An input for the answer; a secret is painted as dots and goes only to `answer`."""

    def action_copy(self) -> None:
        """Copy the selection, unless it is a secret."""
        if not self.password:
            super().action_copy()

    def action_cut(self) -> None:
        """Cut the selection; a secret never reaches the clipboard."""
        if self.password:
            self.delete_selection()
        else:
            super().action_cut()

    def taken(self) -> str:
        """Return what was typed, and clear the field."""
        text = self.value
        self.clear()
        return text


class QuestionScreen(ModalScreen[None]):
    """Shows one question as the terminal would ask it; all text is the host's, and is shown unchanged.

    Attributes:
        number: Number of the question.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "put_off", "Not now")]

    def __init__(self, look: Look, question: Question, answer: Callable[[int, str | None], None]) -> None:
        """Take a question; `answer` gets its number and the typed text, or None."""
        super().__init__()
        self.number = question.number
        self._look = look
        self._question = question
        self._answer = answer
        self._is_over = False

    def compose(self) -> ComposeResult:
        notes = [Static(self._shown(line), classes="question-note", markup=False) for line in self._question.notes]
        lines = [Static(self._shown(line), markup=False) for line in self._question.lines]
        field = AnswerInput(password=not self._question.is_shown, max_length=MAX_CHARS, compact=True, id="answer")
        body = VerticalScroll(*notes, *lines, field, classes="dialog wide question", can_focus=False)
        body.border_title = self._shown(f"To reach {self._question.host}")
        what = "" if self._question.is_shown else "; what is typed is not shown"
        body.border_subtitle = self._shown(f"Enter answers, Esc: not now{what}")
        yield body

    def on_mount(self) -> None:
        self.query_one(AnswerInput).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._answer(self.number, self.query_one(AnswerInput).taken())
        self.leave()

    def action_put_off(self) -> None:
        """Put the question off, and leave."""
        self._answer(self.number, None)
        self.leave()

    def leave(self) -> None:
        """Close and clear the answer; under another screen, close once that is gone."""
        self._is_over = True
        for field in self.query(AnswerInput):
            field.taken()
        if self.is_active:
            self.dismiss()

    def on_screen_resume(self) -> None:
        """Close if the question was over before the screen on top closed."""
        if self._is_over:
            self.dismiss()

    def _shown(self, text: str) -> Text:
        return Text(self._look.shown(text))
