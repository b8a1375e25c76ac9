"""The line in which a filter is typed, above the footer; what is wrong with it stands above the line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from app.filters.language import MAX_FILTER_CHARS

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from app.tui.filtered_view import FilteredView
    from app.tui.stage import Stage


class FilterBar(Vertical):
    """Filters a view as one types; Enter keeps the filter, Esc takes it away."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "Clear", show=False)]

    def __init__(self, stage: Stage) -> None:
        super().__init__(id="filter")
        self.display = False
        self._shown = stage.look.shown
        self._view: FilteredView | None = None

    def compose(self) -> ComposeResult:
        """Lay out the sentence and the input."""
        yield Static("", id="filter-trouble", markup=False)
        yield Horizontal(
            Static("/", id="filter-mark", markup=False),
            Input(id="filter-input", compact=True, max_length=MAX_FILTER_CHARS, select_on_focus=False),
            id="filter-line",
        )

    def open(self, view: FilteredView) -> None:
        """Begin to type the filter of a view, or go on with it."""
        self._view, line = view, self.query_one(Input)
        line.placeholder = f"{view.filter_example}   Esc clears"
        with self.prevent(Input.Changed):
            line.value = view.filter.source
        line.cursor_position = len(line.value)
        self._say("")
        self.display = True
        line.focus()

    def close(self) -> None:
        """Keep the filter and go back to the view."""
        self.display = False
        self._view = None
        self.screen.set_focus(None)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter by what stands there now; while it is none, by what stood there last."""
        if self._view is not None:
            self._say(self._view.take_filter(event.value))

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep the filter."""
        self.close()

    def action_clear(self) -> None:
        """Take the filter away."""
        if self._view is not None:
            self._view.take_filter("")
        self.close()

    def _say(self, trouble: str) -> None:
        line = self.query_one("#filter-trouble", Static)
        line.update(self._shown(trouble))
        line.display = bool(trouble)
