"""Tables that fit any width: columns leave by importance, one column takes what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from app.tui.drawing import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.style import Style

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
        self.look = look
        self._indent = indent
        self._columns = _fitting(columns, width - indent - 1)

    @property
    def titles(self) -> list[str]:
        """Headings of the columns that fit."""
        return [column.title for column in self._columns]

    def heading(self) -> Line:
        """Return the line of headings."""
        style = self.look.palette.heading
        line = Line(self.look).pad(self._indent, style)
        for index, column in enumerate(self._columns):
            if index:
                line.pad(line.width + GAP, style)
            line.cell(column.title, column.width, style, is_right=column.is_right)
        return line

    def row(self, row: Row) -> Line:
        """Return the line of a row."""
        line = Line(self.look).pad(self._indent)
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

    def row_with(self, row: Row, text: str, style: Style) -> Line:
        """Return the line of a row whose figures make room for a sentence, beside its names and its age."""
        line = Line(self.look).pad(self._indent)
        age = self._lasting_cell(self._columns[-1], row)
        room = self._indent + _width(self._columns) - (age.width + GAP if age is not None else 0)
        for column in self._columns[:-1]:
            if (cell := self._lasting_cell(column, row)) is None:
                break
            line.add(cell).pad(line.width + GAP)
        line.cell(text, room - line.width, style)
        return line if age is None else line.pad(line.width + GAP).add(age)

    def _lasting_cell(self, column: Column[Row], row: Row) -> Line | None:
        """Return a cell that holds however old the row is; None where there is none, or nothing in it."""
        cell = Line(self.look)
        column.paint(cell, row, column.width)
        has_text = any(not segment.text.isspace() for segment in cell.segments)
        return cell.pad(column.width) if column.is_lasting and has_text else None


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
