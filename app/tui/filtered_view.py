"""A live view whose rows can be filtered."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from app.filters.language import read_filter
from app.filters.terms import EVERYTHING, Filter, WrongFilter
from app.safe_text import LINE_LIMIT, clean
from app.tui.line_view import LineView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.filters.terms import Key
    from app.tui.drawing import Line
    from app.tui.stage import Stage


class FilteredView(LineView):
    """Shows the rows that its filter is true of.

    Attributes:
        filter: What is typed behind `/`.
        is_problems_only: Whether only what is not well is shown.
    """

    filter_keys: ClassVar[Sequence[Key]] = ()
    filter_example: ClassVar[str] = ""

    def __init__(self, stage: Stage, widget_id: str) -> None:
        super().__init__(stage, widget_id)
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
        told = ["problems only"] if self.is_problems_only else []
        told += [self.filter.source] if self.filter else []
        for text in told:
            line.put("  ", self.look.palette.heading).put(f" {clean(text, LINE_LIMIT)} ", self.look.palette.chosen)
        return line

    def _wish(self, wanted: Filter, *, is_problems_only: bool) -> None:
        if (wanted.source, is_problems_only) != (self.filter.source, self.is_problems_only):
            self.filter, self.is_problems_only = wanted, is_problems_only
            self.wish_changed()
            self.redraw()
