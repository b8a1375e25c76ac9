"""The base class of all live parts of the screen: a widget of lines, built once per data frame, painted by line.

A `LineView` has a fixed head and foot and a body of numbered rows that scrolls between them. It holds no children and
no reactive values; painting a line touches that line alone.

`FilteredView` is a live view whose rows can be filtered. `FilterBar` is the input for a filter, above the footer; an
error in the filter is shown above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from app.filters.language import MAX_FILTER_CHARS, read_filter
from app.filters.terms import EVERYTHING, Filter, WrongFilter
from app.text import LINE_LIMIT, clean
from app.tui.rendering import DirectWidget, make_strip
from app.tui.widgets.drawing import Line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.app import ComposeResult
    from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
    from textual.strip import Strip

    from app.filters.terms import Key
    from app.tui.ui_state import UiState
    from app.view.view import View

WHEEL_LINES = 3
LONG_LINES = "long lines"
"""What the key to the right is for, in a view whose lines are not wrapped."""
MAX_HIDDEN_LINES = 3
"""Lines that a view misses at most: so many the header gives back."""


class LineView(DirectWidget):
    """A widget of lines, made from the UI state.

    A subclass fills `head`, `lines` and `foot` in `build`; with too many rows to make it overrides `num_rows` and `row`
    instead.

    Attributes:
        top: Number of the first row shown.
        selected: Number of the row that the arrow keys move, when `has_selection`.
        num_free_lines: Empty lines that the header may take, as of the last build; negative when lines are hidden.
    """

    ALLOW_SELECT = False
    has_selection: ClassVar[bool] = False
    counts_free_lines: ClassVar[bool] = False
    """Whether its rows are as many in a window of any height, so that the lines below them are free."""

    def __init__(self, ui: UiState, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self.ui = ui
        self.look = ui.look
        self.head: list[Line] = []
        self.lines: list[Line] = []
        self.foot: list[Line] = []
        self.top = 0
        self.selected = 0
        self.num_free_lines = -MAX_HIDDEN_LINES

    def build(self) -> None:
        """Make the lines from the UI state; called once per data frame while the view is shown, and on a resize."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of rows of the body."""
        return len(self.lines)

    def row(self, index: int) -> Line:
        return self.lines[index]

    @property
    def body_height(self) -> int:
        """Lines of the screen between head and foot."""
        return max(0, self.size.height - len(self.head) - len(self.foot))

    def redraw(self) -> None:
        """Build, and paint what has changed, when the widget has a size."""
        if self.size.width and self.size.height:
            is_in_sight = self.has_selection and self.top <= self.selected < self.top + self.body_height
            self.build()
            # The body or the window has changed its size: other rows are in the window now.
            top = min(self.top, self._last_top)
            if is_in_sight:  # a larger foot does not hide it
                top = max(top, self.selected - self.body_height + 1)
            if top != self.top:
                self.top = top
                self.build()
            if self.counts_free_lines:
                self.num_free_lines = self.body_height - self.num_rows if self.num_rows <= self.body_height else -1
            rendered = [self.render_line(y) for y in range(self.size.height)]
            self.ui.is_owed |= self.show(rendered, self.ui.max_bytes)

    def line(self) -> Line:
        return Line(self.look)

    def pointed(self, line: Line) -> Line:
        """Return the line of the selected row; `line` begins with a blank."""
        pointed = self.line().put(self.look.glyphs.pointer, self.look.palette.accent)
        first, *others = line.segments
        pointed.segments += [Segment(first.text[1:], first.style), *others] if len(first.text) > 1 else others
        pointed.width = line.width
        return pointed.pad(self.size.width).laid_over(self.look.palette.selected)

    def heading(self, line: Line) -> Line:
        """Return a line as a heading over the whole width."""
        return line.fit(self.size.width, self.look.palette.heading)

    def banner(self, name: str, text: str) -> Line:
        """Return the first line of a full-screen view: its name and its subject."""
        palette = self.look.palette
        return self.line().put(f" {name} ", palette.tab).put(f"  {text}", palette.bar).fit(self.size.width, palette.bar)

    def keys(self, shown: Iterable[tuple[str, str]]) -> Line:
        """Return a line of keys with their effects."""
        palette, line = self.look.palette, self.line()
        for key, does in shown:
            line.put(f" {key}", palette.key).put(f" {does} ", palette.bar_muted)
        return line.fit(self.size.width, palette.bar)

    @property
    def known(self) -> View | None:
        """Rows of a job whose waits, time, memory and output are known; None of any other, and without a job."""
        view = self.ui.view
        return view if view is not None and view.num_ranks and not view.why_unknown else None

    def nothing_yet(self, title: str, sentence: str) -> list[Line]:
        """Return the head of a view without data, with a sentence about what it will show, or why it will not."""
        if self.ui.view is not None and (why := self.ui.view.why_unknown):
            hint = self.ui.keymap.hint
            sentence = "; ".join(filter(None, [f"not known: {why}", hint("ranks", "ranks"), hint("stacks", "stacks")]))
        heading = self.line().cell(f" {title}", self.size.width, self.look.palette.heading)
        return [heading, self.line().cell(f" {sentence}", self.size.width, self.look.palette.muted)]

    @property
    def selected_rank(self) -> int | None:
        """Rank that the selection is about; without a selection the first culprit."""
        verdicts = self.ui.view.verdicts() if self.ui.view is not None else []
        return next((verdict.culprits[0] for verdict in verdicts if verdict.culprits), None)

    @property
    def copied(self) -> tuple[str, str] | None:
        """Name and text of what is copied: the verdict with its hint, when nothing else is selected."""
        view = self.ui.view
        if view is None:
            return None
        verdicts = view.verdicts()
        if not verdicts:
            return "how things stand", view.headline().text
        return "the verdict", "\n".join(filter(None, (verdicts[0].text, verdicts[0].hint)))

    def pick(self, index: int, x: int) -> bool:  # noqa: ARG002 (of a grid)
        """Select the clicked row, in a view with a selection; return whether there is something."""
        if self.has_selection:
            self.move(index - self.selected)
        return True

    def on_click(self, event: Click) -> None:
        """Select the row; a double click opens it."""
        index = self.top + event.y - len(self.head)
        is_row = len(self.head) <= event.y < len(self.head) + self.body_height and index < self.num_rows
        if is_row and self.pick(index, event.x) and event.chain == 2:
            self.app.call_later(self.app.run_action, "screen.open")

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the widget."""
        width = self.size.width
        has_scrollbar = self.num_rows > self.body_height > 0
        line = self._line_at(y)
        if has_scrollbar and len(self.head) <= y < len(self.head) + self.body_height:
            line.fit(width - 1)
            self._put_scrollbar(line, y - len(self.head))
        fill = self.look.palette.heading if y < len(self.head) else None
        return make_strip(line.fit(width, fill).segments, width)

    def move(self, rows: int) -> None:
        """Move the selection, or the body in a view without one."""
        if not self.has_selection:
            self.scroll_rows(rows)
            return
        self.selected = max(0, min(self.num_rows - 1, self.selected + rows))
        self.top = max(self.selected - self.body_height + 1, min(self.top, self.selected))
        self.redraw()

    def scroll_rows(self, rows: int) -> None:
        """Scroll the body in its window."""
        self.top = max(0, min(self._last_top, self.top + rows))
        self.redraw()

    def page(self, pages: int) -> None:
        """Move by windows."""
        self.move(pages * max(1, self.body_height - 1))

    def to_edge(self, direction: int) -> None:
        """Go to the first row (-1) or the last (1)."""
        self.move(direction * self.num_rows)

    def sideways(self, cells: int) -> None:
        """Scroll the body to the side; does nothing unless a view is wider than its window."""

    def on_resize(self, _event: Resize) -> None:
        self.redraw()

    def on_mouse_scroll_down(self, _event: MouseScrollDown) -> None:
        self.scroll_rows(WHEEL_LINES)

    def on_mouse_scroll_up(self, _event: MouseScrollUp) -> None:
        self.scroll_rows(-WHEEL_LINES)

    @property
    def _last_top(self) -> int:
        return max(0, self.num_rows - self.body_height)

    def _line_at(self, y: int) -> Line:
        if y < len(self.head):
            return self.head[y]
        body_y = y - len(self.head)
        if body_y >= self.body_height:
            foot_y = body_y - self.body_height
            return self.foot[foot_y] if foot_y < len(self.foot) else self.line()
        index = self.top + body_y
        return self.row(index) if index < self.num_rows else self.line()

    def _put_scrollbar(self, line: Line, body_y: int) -> None:
        height = self.body_height
        thumb = max(1, height * height // self.num_rows)
        start = round((height - thumb) * self.top / max(1, self._last_top))
        if start <= body_y < start + thumb:
            line.put(self.look.glyphs.scroll_thumb, self.look.palette.muted)
        else:
            line.put(self.look.glyphs.scroll_track, self.look.palette.faint)


class FilteredView(LineView):
    """Shows the rows that match its filter.

    Attributes:
        filter: Filter typed after `/`.
        is_problems_only: Whether only problems are shown.
    """

    filter_keys: ClassVar[Sequence[Key]] = ()
    filter_example: ClassVar[str] = ""

    def __init__(self, ui: UiState, widget_id: str) -> None:
        super().__init__(ui, widget_id)
        self.filter = EVERYTHING
        self.is_problems_only = False

    def take_filter(self, text: str) -> str:
        """Apply a typed filter; return the error of a wrong one, which leaves the last filter in place."""
        read = read_filter(text, self.filter_keys)
        if isinstance(read, WrongFilter):
            return clean(f"at character {read.at + 1}: {read.why}", LINE_LIMIT)
        self._wish(read, is_problems_only=self.is_problems_only)
        return ""

    def show_problems(self, *, is_wanted: bool) -> None:
        """Show only problems, or everything."""
        self._wish(self.filter, is_problems_only=is_wanted)

    def clear(self) -> bool:
        """Show everything; return whether rows were left out before."""
        had_any = bool(self.filter) or self.is_problems_only
        self._wish(EVERYTHING, is_problems_only=False)
        return had_any

    def wish_changed(self) -> None:
        """Handle a change of the filter; called before the rows are drawn."""

    def put_wish(self, line: Line) -> Line:
        """Add the filter to a heading."""
        parts = ["problems only"] if self.is_problems_only else []
        parts += [self.filter.source] if self.filter else []
        for text in parts:
            line.put("  ", self.look.palette.heading).put(f" {clean(text, LINE_LIMIT)} ", self.look.palette.chosen)
        return line

    def _wish(self, wanted: Filter, *, is_problems_only: bool) -> None:
        if (wanted.source, is_problems_only) != (self.filter.source, self.is_problems_only):
            self.filter, self.is_problems_only = wanted, is_problems_only
            self.wish_changed()
            self.redraw()


class FilterBar(Vertical):
    """Filters a view while the user types; Enter keeps the filter, Esc clears it.

    Enter does nothing while the filter is wrong; whoever leaves by another way then has the filter from before.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "Clear", show=False)]

    def __init__(self, ui: UiState) -> None:
        super().__init__(id="filter")
        self.display = False
        self._shown = ui.look.shown
        self._view: FilteredView | None = None
        self._before = ""
        """Filter of the view when it was opened."""
        self._is_wrong = False

    def compose(self) -> ComposeResult:
        yield Static("", id="filter-trouble", markup=False)
        yield Horizontal(
            Static("/", id="filter-mark", markup=False),
            Input(id="filter-input", compact=True, max_length=MAX_FILTER_CHARS, select_on_focus=False),
            id="filter-line",
        )

    def open(self, view: FilteredView) -> None:
        """Edit the filter of a view, starting with its present one."""
        self._view, line = view, self.query_one(Input)
        line.placeholder = f"{view.filter_example}   Esc clears"
        with self.prevent(Input.Changed):
            line.value = self._before = view.filter.source
        line.cursor_position = len(line.value)
        self._show_trouble("")
        self.display = True
        line.focus()

    def close(self) -> None:
        """Keep the filter, or that from before where it is wrong, and return to the view."""
        if self._view is not None and self._is_wrong:
            self._view.take_filter(self._before)
        self.display = self._is_wrong = False
        self._view = None
        self.screen.set_focus(None)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the typed filter; a wrong one leaves the last filter in place."""
        if self._view is not None:
            self._show_trouble(self._view.take_filter(event.value))

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        if not self._is_wrong:
            self.close()

    def action_clear(self) -> None:
        """Clear the filter."""
        if self._view is not None:
            self._view.take_filter("")
        self._is_wrong = False
        self.close()

    def _show_trouble(self, trouble: str) -> None:
        line = self.query_one("#filter-trouble", Static)
        line.update(self._shown(trouble))
        line.display = self._is_wrong = bool(trouble)
