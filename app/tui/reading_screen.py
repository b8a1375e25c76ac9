"""A modal screen of lines that a person reads: one view, and the keys that scroll it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen

if TYPE_CHECKING:
    from textual.binding import BindingType

    from app.tui.line_view import LineView

Result = TypeVar("Result")


class ReadingScreen(ModalScreen[Result]):
    """What screens over one `LineView` have in common; their own keys stand beside these."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "Up", show=False),
        Binding("down,j", "scroll(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(-1)", "First line", show=False),
        Binding("end,G", "edge(1)", "Last line", show=False),
    ]
    _view: LineView

    def action_scroll(self, rows: int) -> None:
        """Scroll by lines."""
        self._view.move(rows)

    def action_page(self, pages: int) -> None:
        """Scroll by screenfuls."""
        self._view.page(pages)

    def action_edge(self, direction: int) -> None:
        """Go to the first line or the last."""
        self._view.to_edge(direction)
