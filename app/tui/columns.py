"""Tables that fit any width: columns leave by importance, one column takes what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from app.tui.drawing import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.tui.theme import Look

GAP = 2


class Aging(Protocol):
    """What a row tells of its age."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are no longer those of now."""
        ...


Row = TypeVar("Row", bound=Aging)


class Column(NamedTuple, Generic[Row]):
    """A column of a table.

    Attributes:
        title: Its heading.
        width: Its cells; of a flexible column the least it can do with.
        importance: 0 stays always; the highest leaves first when the width does not do.
        paint: Writes the row's cell into the line: exactly the given number of cells.
        is_right: Aligns the heading with right-aligned figures.
        is_flexible: Takes the cells that are left; at most one column of a table.
        is_lasting: True of what holds however old the row is: names, and what tells of its age. All else is faint in a
            row that is old, whatever it means: nothing old looks fresh.
    """

    title: str
    width: int
    importance: int
    paint: Callable[[Line, Row, int], object]
    is_right: bool = False
    is_flexible: bool = False
    is_lasting: bool = False


class Table(Generic[Row]):
    """The columns of a table that fit in `width` cells, and how to paint them."""

    def __init__(self, look: Look, columns: Sequence[Column[Row]], width: int, *, indent: int = 1) -> None:
        self._look = look
        self._indent = indent
        self._columns = _fitting(columns, width - indent - 1)

    @property
    def titles(self) -> list[str]:
        """Headings of the columns that fit."""
        return [column.title for column in self._columns]

    def heading(self) -> Line:
        """Return the line of headings."""
        style = self._look.palette.heading
        line = Line(self._look).pad(self._indent, style)
        for index, column in enumerate(self._columns):
            if index:
                line.pad(line.width + GAP, style)
            line.cell(column.title, column.width, style, is_right=column.is_right)
        return line

    def row(self, row: Row) -> Line:
        """Return the line of a row."""
        line = Line(self._look).pad(self._indent)
        is_old = row.is_old
        for index, column in enumerate(self._columns):
            if index:
                line.pad(line.width + GAP)
            before, num_segments = line.width, len(line.segments)
            column.paint(line, row, column.width)
            line.pad(before + column.width)
            if is_old and not column.is_lasting:
                line.fade(num_segments)
        return line


def _fitting(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    kept = list(columns)
    while kept and _width(kept) > width:
        leaving = max(kept, key=lambda column: column.importance)
        if leaving.importance == 0:
            break
        kept.remove(leaving)
    spare = max(0, width - _width(kept))
    return [column._replace(width=column.width + spare) if column.is_flexible else column for column in kept]


def _width(columns: Sequence[Column[Row]]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)
