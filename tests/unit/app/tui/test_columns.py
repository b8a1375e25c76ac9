"""A table fits any width: the least important columns leave first, and every row is as wide as its heading."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from app.tui.theme import Look
from app.tui.widgets.columns import Column, Table

if TYPE_CHECKING:
    from app.tui.widgets.drawing import Line

LOOK = Look()


class Row(NamedTuple):
    text: str
    is_old: bool = False


def paint(line: Line, row: Row, width: int) -> None:
    line.cell(row.text, width)


def paint_nothing(_line: Line, _row: Row, _width: int) -> None:
    pass


def paint_bar(line: Line, row: Row, width: int) -> None:
    line.bar(0.5, width - 2, LOOK.palette.busy).put(row.text)


COLUMNS = [
    Column("RANK", 4, 0, paint, is_right=True),
    Column("NODE", 8, 2, paint),
    Column("LOSS", 6, 3, paint_nothing),
    Column("WHERE", 10, 0, paint, is_flexible=True),
]


def text(line: Line) -> str:
    return "".join(segment.text for segment in line.segments)


def test_the_least_important_columns_leave_first() -> None:
    titles = [Table(LOOK, COLUMNS, width).titles for width in (80, 36, 35, 26, 10)]

    assert titles == [
        ["RANK", "NODE", "LOSS", "WHERE"],
        ["RANK", "NODE", "LOSS", "WHERE"],
        ["RANK", "NODE", "WHERE"],
        ["RANK", "WHERE"],
        ["RANK", "WHERE"],
    ]


def test_a_flexible_column_gives_up_its_spare_cells_before_a_needful_column_leaves() -> None:
    columns = [*COLUMNS[:-1], COLUMNS[-1]._replace(spare=4)]

    titles = [Table(LOOK, columns, width).titles for width in (32, 31)]

    assert titles == [["RANK", "NODE", "LOSS", "WHERE"], ["RANK", "NODE", "WHERE"]]
    assert Table(LOOK, columns, 32).heading().width == 31


def test_the_flexible_column_takes_what_is_left() -> None:
    row = Table(LOOK, COLUMNS, 60).row(Row("abcdefghijklmnopqrstuvwxyz"))

    assert text(row) == " abc\u2026  abcdefg\u2026          abcdefghijklmnopqrstuvwxyz" + " " * 8
    assert row.width == 59


@given(width=st.integers(20, 200), cell=st.text(st.sampled_from("ab \u4e16\u754c\u00e9"), max_size=60))
def test_every_row_is_as_wide_as_the_heading(width: int, cell: str) -> None:
    table = Table(LOOK, COLUMNS, width)

    row = table.row(Row(cell))
    assert row.width == table.heading().width <= max(width, 18)
    assert sum(segment.cell_length for segment in row.segments) == row.width


def test_headings_of_figures_stand_at_the_right() -> None:
    columns: list[Column[Row]] = [Column("A", 5, 0, paint, is_right=True), Column("B", 5, 0, partial(paint))]

    assert text(Table(LOOK, columns, 40).heading()) == "     A  B    "


def test_of_an_old_row_only_what_lasts_keeps_its_colour() -> None:
    columns = [
        Column("NAME", 4, 0, paint, is_lasting=True),
        Column("BUSY", 9, 0, paint_bar),
        Column("AGE", 4, 0, paint, is_lasting=True),
    ]
    fresh, old = (Table(LOOK, columns, 40).row(Row("ab", is_old=is_old)) for is_old in (False, True))

    assert text(fresh) == text(old)
    assert LOOK.palette.busy in {segment.style for segment in fresh.segments}
    styles = [segment.style for segment in old.segments if segment.text.strip()]
    assert styles == [LOOK.palette.ink, *[LOOK.palette.faint] * 3, LOOK.palette.ink]
