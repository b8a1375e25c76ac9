"""The base class of all that moves on the screen: a widget of lines, built once per data frame, painted by line.

A `LineView` has a fixed head and foot and a body of numbered rows that scrolls between them. It holds no children and
no reactive values; painting a line touches that line alone.

`FilteredView` is a live view whose rows can be filtered. `FilterBar` is the line in which a filter is typed, above the
footer; what is wrong with it stands above the line.
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

WHEEL_LINES = 3


class LineView(DirectWidget):
    """Lines made from the stage.

    A subclass fills `head`, `lines` and `foot` in `build`, or answers `num_rows` and `row` itself when its rows are too
    many to make.

    Attributes:
        top: Number of the first row shown.
        selected: Number of the row that the arrows move, where `has_selection`.
    """

    ALLOW_SELECT = False
    has_selection: ClassVar[bool] = False

    def __init__(self, ui: UiState, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self.ui = ui
        self.look = ui.look
        self.head: list[Line] = []
        self.lines: list[Line] = []
        self.foot: list[Line] = []
        self.top = 0
        self.selected = 0

    def build(self) -> None:
        """Make the lines from the stage; called once per data frame while the view is shown, and when it is resized."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """How many rows the body has."""
        return len(self.lines)

    def row(self, index: int) -> Line:
        return self.lines[index]

    @property
    def body_height(self) -> int:
        """Lines of the screen between head and foot."""
        return max(0, self.size.height - len(self.head) - len(self.foot))

    def redraw(self) -> None:
        """Build and paint what has changed, when there is room to paint on."""
        if self.size.width and self.size.height:
            is_in_sight = self.has_selection and self.top <= self.selected < self.top + self.body_height
            self.build()
            # The body shrank under its window, or the window grew: other rows are in it now.
            top = min(self.top, self._last_top)
            if is_in_sight:  # a foot that has grown does not hide it
                top = max(top, self.selected - self.body_height + 1)
            if top != self.top:
                self.top = top
                self.build()
            rendered = [self.render_line(y) for y in range(self.size.height)]
            self.ui.is_owed |= self.show(rendered, self.ui.max_bytes)

    def line(self) -> Line:
        return Line(self.look)

    def pointed(self, line: Line) -> Line:
        """Return the line of a row that is selected; it begins with a blank."""
        pointed = self.line().put(self.look.glyphs.pointer, self.look.palette.accent)
        first, *others = line.segments
        pointed.segments += [Segment(first.text[1:], first.style), *others] if len(first.text) > 1 else others
        pointed.width = line.width
        return pointed.pad(self.size.width).laid_over(self.look.palette.selected)

    def heading(self, line: Line) -> Line:
        """Return a line as a heading over the whole width."""
        return line.fit(self.size.width, self.look.palette.heading)

    def banner(self, name: str, text: str) -> Line:
        """Return the first line of what fills the screen: its name, and what it is about."""
        palette = self.look.palette
        return self.line().put(f" {name} ", palette.tab).put(f"  {text}", palette.bar).fit(self.size.width, palette.bar)

    def keys(self, shown: Iterable[tuple[str, str]]) -> Line:
        """Return a line of keys, and what each does."""
        palette, line = self.look.palette, self.line()
        for key, does in shown:
            line.put(f" {key}", palette.key).put(f" {does} ", palette.bar_muted)
        return line.fit(self.size.width, palette.bar)

    def nothing_yet(self, title: str, sentence: str) -> list[Line]:
        """Return the head of a view that has nothing to show: what there will be."""
        heading = self.line().cell(f" {title}", self.size.width, self.look.palette.heading)
        return [heading, self.line().cell(f" {sentence}", self.size.width, self.look.palette.muted)]

    @property
    def selected_rank(self) -> int | None:
        """The rank that a person looks at here: what is selected is about it; else the first culprit."""
        verdicts = self.ui.view.verdicts() if self.ui.view is not None else []
        return next((verdict.culprits[0] for verdict in verdicts if verdict.culprits), None)

    @property
    def copied(self) -> tuple[str, str] | None:
        """What is copied here, and its text: the verdict with its hint, where nothing else is selected."""
        view = self.ui.view
        if view is None:
            return None
        verdicts = view.verdicts()
        if not verdicts:
            return "how things stand", view.headline().text
        return "the verdict", "\n".join(filter(None, (verdicts[0].text, verdicts[0].hint)))

    def pick(self, index: int, x: int) -> bool:  # noqa: ARG002 (of a grid)
        """Select a row that was clicked in some column, where rows are selected; return whether something is there."""
        if self.has_selection:
            self.move(index - self.selected)
        return True

    def on_click(self, event: Click) -> None:
        """Select the row; clicked twice, it is opened."""
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
        """Move the selection, or the body where nothing is selected."""
        if not self.has_selection:
            self.scroll_rows(rows)
            return
        self.selected = max(0, min(self.num_rows - 1, self.selected + rows))
        self.top = max(self.selected - self.body_height + 1, min(self.top, self.selected))
        self.redraw()

    def scroll_rows(self, rows: int) -> None:
        """Move the body under its window."""
        self.top = max(0, min(self._last_top, self.top + rows))
        self.redraw()

    def page(self, pages: int) -> None:
        """Move by a windowful."""
        self.move(pages * max(1, self.body_height - 1))

    def to_edge(self, direction: int) -> None:
        """Go to the first row (-1) or the last (1)."""
        self.move(direction * self.num_rows)

    def sideways(self, cells: int) -> None:
        """Move the body to the side; nothing unless a view is wider than its window."""

    def on_resize(self, _event: Resize) -> None:
        """Build for the new size."""
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
    """Shows the rows that its filter is true of.

    Attributes:
        filter: What is typed behind `/`.
        is_problems_only: Whether only what is not well is shown.
    """

    filter_keys: ClassVar[Sequence[Key]] = ()
    filter_example: ClassVar[str] = ""

    def __init__(self, ui: UiState, widget_id: str) -> None:
        super().__init__(ui, widget_id)
        self.filter = EVERYTHING
        self.is_problems_only = False

    def take_filter(self, text: str) -> str:
        """Show what a typed filter says; return what is wrong with it, if anything is, and leave the last one."""
        read = read_filter(text, self.filter_keys)
        if isinstance(read, WrongFilter):
            return clean(f"at character {read.at + 1}: {read.why}", LINE_LIMIT)
        self._wish(read, is_problems_only=self.is_problems_only)
        return ""

    def show_problems(self, *, is_wanted: bool) -> None:
        """Show only what is not well, or everything."""
        self._wish(self.filter, is_problems_only=is_wanted)

    def clear(self) -> bool:
        """Show everything; return whether anything had been left out."""
        had_any = bool(self.filter) or self.is_problems_only
        self._wish(EVERYTHING, is_problems_only=False)
        return had_any

    def wish_changed(self) -> None:
        """Other rows are wanted from now on; before they are drawn."""

    def put_wish(self, line: Line) -> Line:
        """Add to a heading what is left out."""
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
    """Filters a view as one types; Enter keeps the filter, Esc takes it away."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "Clear", show=False)]

    def __init__(self, ui: UiState) -> None:
        super().__init__(id="filter")
        self.display = False
        self._shown = ui.look.shown
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
        self._show_trouble("")
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
            self._show_trouble(self._view.take_filter(event.value))

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep the filter."""
        self.close()

    def action_clear(self) -> None:
        """Take the filter away."""
        if self._view is not None:
            self._view.take_filter("")
        self.close()

    def _show_trouble(self, trouble: str) -> None:
        line = self.query_one("#filter-trouble", Static)
        line.update(self._shown(trouble))
        line.display = bool(trouble)
