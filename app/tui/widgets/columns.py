"""Tables that fit any width, and the columns of ranks, nodes and GPUs that all such tables share.

`Table` drops columns by importance, and one column takes the remaining width. All tables of ranks, nodes and GPUs share
`rank_columns`, `node_columns` and `gpu_columns`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from rich.cells import cell_len

from app.diagnosis.causes import RankState, Severity
from app.text import bytes_cell, bytes_text, loss_text, percent_text, seconds_cell, seconds_text
from app.tui.widgets.drawing import Line
from app.view.ranks import STATE_SEVERITY, rank_call
from app.view.rows import OLD_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rich.style import Style

    from app.tui.theme import Look
    from app.view.memory import MemoryRow
    from app.view.pace import PaceRow
    from app.view.rows import GpuRow, NodeRow, RankRow
    from app.view.view import View

    AnyRankRow = RankRow | PaceRow | MemoryRow

GAP = 2
NEEDFUL = 3
"""Importance up to which a column is worth the end of a flexible one, such as the function of a line."""


class Aging(Protocol):
    """A row that knows whether it is old."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are out of date."""


Row = TypeVar("Row", bound=Aging)


class Column(NamedTuple, Generic[Row]):
    """A column of a table.

    Attributes:
        title: The heading.
        width: Its cells; a flexible column gets less only by `spare`, or when no other column can be dropped.
        importance: 0 is never dropped; the highest is dropped first when the width is too small.
        paint: Writes the row's cell into the line, in exactly the given number of cells.
        is_right: Aligns the heading with right-aligned figures.
        is_flexible: Takes the remaining cells; at most one column of a table.
        is_lasting: True for columns that stay valid in an old row, such as names and the age. All other cells of an old
            row are faint, so that nothing old looks fresh.
        spare: Cells that a flexible column gives up before a column of importance `NEEDFUL` or less is dropped.
    """

    title: str
    width: int
    importance: int
    paint: Callable[[Line, Row, int], object]
    is_right: bool = False
    is_flexible: bool = False
    is_lasting: bool = False
    spare: int = 0


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
        style = self.look.palette.heading
        line = Line(self.look).pad(self._indent, style)
        for index, column in enumerate(self._columns):
            if index:
                line.pad(line.width + GAP, style)
            line.cell(column.title, column.width, style, is_right=column.is_right)
        return line

    def row(self, row: Row) -> Line:
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
        """Return the line of a row with a sentence in place of its figures, between its names and its age."""
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
        """Return the cell of a lasting column; None for other columns, or when it is empty."""
        cell = Line(self.look)
        column.paint(cell, row, column.width)
        has_text = any(not segment.text.isspace() for segment in cell.segments)
        return cell.pad(column.width) if column.is_lasting and has_text else None


def _fitting(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    kept = list(columns)
    while kept and _width(kept) > width:
        leaving = max(kept, key=lambda column: column.importance)
        to_give = sum(column.spare for column in kept) if leaving.importance <= NEEDFUL else 0
        if leaving.importance == 0 or _width(kept) - to_give <= width:
            break
        kept.remove(leaving)
    spare = width - _width(kept)
    return [column._replace(width=max(1, column.width + spare)) if column.is_flexible else column for column in kept]


def _width(columns: Sequence[Column[Row]]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


STATE_WIDTH = 10
MAX_NODE_WIDTH = 16
PERCENT_WIDTH = 5

_BLAMED_STATES = {state for state, how in STATE_SEVERITY.items() if how in {Severity.WARNING, Severity.CRITICAL}}


def rank_columns(view: View) -> list[Column[RankRow]]:
    """Return every column of a rank.

    Place and wait of a rank that does not report are its relevant facts: they last, as "last seen".
    """
    return [
        *place_columns(view),
        state_column(view),
        figure("STEP", 7, 0, lambda row: row.step_text),
        figure("LOSS", 6, 3, lambda row: "" if row.loss is None else loss_text(row.loss)),
        Column("PHASE", 10, 6, cells(lambda row: row.phase_text, "muted")),
        Column("LAST CALL", 16, 4, cells(rank_call)),
        Column("WAITING", 7, 0, _paint_waiting, is_right=True, is_lasting=True),
        Column("WAIT SHARE", 16, 8, partial(paint_wait_frac, has_mark=False)),
        figure("MEMORY", 6, 5, lambda row: size_text(row.rss_bytes)),
        Column("AGE", 6, 7, _paint_rank_age, is_right=True, is_lasting=True),
        Column(
            "WHERE",
            26,
            0,
            partial(_paint_where, culprits=_culprits(view)),
            is_flexible=True,
            is_lasting=True,
            spare=10,
        ),
    ]


def cells(text: Callable[[Row], str], ink: str = "ink") -> Callable[[Line, Row, int], object]:
    """Return a function that paints a text of a row; `ink` is a style of the palette."""
    return lambda line, row, width: line.cell(text(row), width, getattr(line.look.palette, ink))


def figure(
    title: str, width: int, importance: int, text: Callable[[Row], str], ink: str = "ink", *, is_lasting: bool = False
) -> Column[Row]:
    """Return a right-aligned column of figures."""

    def paint(line: Line, row: Row, width: int) -> None:
        line.cell(text(row), width, getattr(line.look.palette, ink), is_right=True)

    return Column(title, width, importance, paint, is_right=True, is_lasting=is_lasting)


def size_text(num_bytes: float | None, unit: str = "") -> str:
    """Return bytes as text for a column; empty when not known."""
    return "" if num_bytes is None else bytes_cell(num_bytes) + unit


def place_columns(view: View) -> list[Column[Any]]:
    """Return the columns of a row's rank and node."""
    return [
        figure("RANK", max(4, len(str(view.num_ranks))), 0, lambda row: str(row.rank), "strong", is_lasting=True),
        Column(
            "NODE",
            max(4, min(node_width(view.node_names), MAX_NODE_WIDTH)),
            2,
            cells(lambda row: row.node, "muted"),
            is_lasting=True,
        ),
    ]


def state_column(view: View) -> Column[RankRow]:
    """Return the column of a rank's state: glyph, name and colour."""
    return Column("STATE", STATE_WIDTH, 0, partial(_paint_state, culprits=_culprits(view)), is_lasting=True)


def _culprits(view: View) -> Collection[int]:
    return {rank for verdict in view.verdicts() for rank in verdict.culprits}


def _is_victim(row: RankRow, culprits: Collection[int]) -> bool:
    """Return whether a rank has ended because another one did: it is not the culprit."""
    return row.state is RankState.EXITED and bool(culprits) and row.rank not in culprits


def node_width(names: Sequence[str]) -> int:
    """Return the width in cells of the longest node name."""
    return max(map(len, names), default=0)


def _paint_state(line: Line, row: RankRow, width: int, culprits: Collection[int]) -> None:
    style = line.look.palette.muted if _is_victim(row, culprits) else line.look.state_style(row.state)
    line.cell(f"{line.look.glyphs.states[row.state]} {row.state}", width, style)


def paint_wait_frac(line: Line, row: RankRow, width: int, *, has_mark: bool = False) -> None:
    """Paint the share of time that the rank spent waiting, as a bar and a figure."""
    palette = line.look.palette
    if row.wait_frac is None:
        line.cell("", width)
        return
    line.bar(row.wait_frac, width - PERCENT_WIDTH - 1, palette.busy, mark_frac=0.5 if has_mark else None)
    line.put(" ").cell(percent_text(row.wait_frac), PERCENT_WIDTH, palette.muted, is_right=True)


def _paint_waiting(line: Line, row: RankRow, width: int) -> None:
    palette = line.look.palette
    if row.waiting_s is None:
        line.cell("", width)
        return
    style = {Severity.CRITICAL: palette.critical, Severity.WARNING: palette.warning}.get(row.severity, palette.busy)
    line.cell(seconds_cell(row.waiting_s), width, style, is_right=True)


def _paint_rank_age(line: Line, row: RankRow, width: int) -> None:
    palette = line.look.palette
    has_ended = row.state in {RankState.DONE, RankState.STOPPED, RankState.ENDED}
    is_stale = row.age_s is not None and row.age_s > OLD_S and not has_ended
    line.cell(
        "" if row.age_s is None else seconds_cell(row.age_s),
        width,
        palette.warning if is_stale else palette.muted,
        is_right=True,
    )


def _paint_where(line: Line, row: RankRow, width: int, culprits: Collection[int]) -> None:
    palette = line.look.palette
    is_blamed = row.state in _BLAMED_STATES and not _is_victim(row, culprits)
    # What comes second is left out where there is no room.
    first, *others = row.places or [""]
    text = "  ".join((first, *others))
    line.cell(text if cell_len(text) <= width else first, width, palette.ink if is_blamed else palette.muted)


NODE_STATE_WIDTH = 12
MEMORY_TEXT_WIDTH = 18


RANKS_WIDTH = 7


def _ranks_cell(row: NodeRow) -> str:
    """Return which ranks are on a node; one alone must not read as a count."""
    named = f"rank {row.ranks}" if row.ranks.isdigit() else row.ranks
    return named if len(named) <= RANKS_WIDTH else named.replace("rank ", "r")


def node_columns(name_width: int) -> list[Column[NodeRow]]:
    """Return every column of a node, for names of at most `name_width` cells."""
    return [
        node_name_column(name_width),
        Column("STATE", NODE_STATE_WIDTH, 0, _paint_node_state, is_lasting=True),
        Column("RANKS", RANKS_WIDTH, 1, cells(_ranks_cell), is_lasting=True),
        Column("RUN", 5, 3, _paint_running, is_right=True),
        Column("CPU", 13, 4, _paint_cpu),
        Column("MEMORY OF THE HOST", 28, 2, paint_node_memory, is_flexible=True),
        report_column(),
    ]


def node_name_column(name_width: int, ink: str = "strong") -> Column[Any]:
    """Return the column of a node's name, for names of at most `name_width` cells."""
    width = max(4, min(MAX_NODE_WIDTH, name_width))
    return Column(
        "NODE",
        width,
        0,
        lambda line, row, _: line.cell(row.node, width, getattr(line.look.palette, ink)),
        is_lasting=True,
    )


def node_line(table: Table[NodeRow], row: NodeRow) -> Line:
    """Return the line of a node; the reason why it is unreachable replaces its figures."""
    if not row.trouble:
        return table.row(row)
    return table.row_with(row, row.trouble, table.look.severity_style(row.severity))


def report_column() -> Column[NodeRow]:
    """Return the column of the age of a node's report."""
    return Column("REPORT", 6, 0, _paint_node_age, is_right=True, is_lasting=True)


def paint_node_memory(line: Line, row: NodeRow, width: int) -> None:
    """Paint used and total memory of the host, as a bar and figures."""
    palette = line.look.palette
    if row.memory_used_bytes is None or not row.memory_total_bytes:
        line.cell("", width)
        return
    frac = row.memory_used_bytes / row.memory_total_bytes
    bar_width = max(0, width - MEMORY_TEXT_WIDTH - 1)
    line.bar(frac, bar_width, palette.warning if frac > 0.9 else palette.busy)
    text = f"{bytes_text(row.memory_used_bytes)} / {bytes_text(row.memory_total_bytes)}"
    line.put(" ").cell(text, MEMORY_TEXT_WIDTH, palette.muted, is_right=True)


def _paint_node_state(line: Line, row: NodeRow, width: int) -> None:
    style = line.look.severity_style(row.severity)
    line.cell(f"{line.look.glyphs.severities[row.severity]} {row.state}", width, style)


def _paint_running(line: Line, row: NodeRow, width: int) -> None:
    palette = line.look.palette
    style = palette.muted if row.num_running == row.num_ranks else palette.warning
    line.cell(f"{row.num_running}/{row.num_ranks}" if row.num_ranks else "", width, style, is_right=True)


def _paint_cpu(line: Line, row: NodeRow, width: int) -> None:
    if row.cpu_frac is None:
        line.cell("", width)
        return
    line.bar(row.cpu_frac, width - PERCENT_WIDTH - 1, line.look.palette.busy)
    line.put(" ").cell(percent_text(row.cpu_frac), PERCENT_WIDTH, line.look.palette.muted, is_right=True)


def _paint_node_age(line: Line, row: NodeRow, width: int) -> None:
    palette = line.look.palette
    style = palette.muted if row.severity is Severity.OK else line.look.severity_style(row.severity)
    line.cell("" if row.age_s is None else seconds_cell(row.age_s), width, style, is_right=True)


ODD = (Severity.WARNING, Severity.CRITICAL)
HOT_CELSIUS = 85.0
"""Temperature of a warning; most data-centre GPUs slow down a few degrees above."""


def gpu_columns(name_width: int) -> list[Column[GpuRow]]:
    """Return every column of a GPU, for nodes' names of at most `name_width` cells."""
    return [
        node_name_column(name_width)._replace(importance=2),
        figure("GPU", 3, 0, lambda row: str(row.gpu), "strong", is_lasting=True),
        Column("RANK", 6, 0, cells(lambda row: ",".join(str(rank) for rank in row.ranks)), is_lasting=True),
        figure("BUSY", 5, 0, lambda row: "" if row.busy_frac is None else percent_text(row.busy_frac)),
        Column("USED/TOTAL", 11, 0, _paint_gpu_memory, is_right=True),
        figure("TORCH", 5, 6, lambda row: size_text(row.torch_reserved_bytes), "muted"),
        Column("TEMP", 5, 1, _paint_temperature, is_right=True),
        figure("POWER", 9, 3, _power_text, "muted"),
        figure(
            "CLOCK", 9, 4, lambda row: "" if row.sm_clock_hz is None else f"{row.sm_clock_hz / 1e6:.0f} MHz", "muted"
        ),
        Column("MODEL", 22, 5, cells(lambda row: row.name.removeprefix("NVIDIA "), "muted")),
        Column("STATE", 28, 0, _paint_gpu_state, is_flexible=True, is_lasting=True),
    ]


def _paint_gpu_memory(line: Line, row: GpuRow, width: int) -> None:
    if row.memory_used_bytes is None:
        line.cell("", width)
        return
    line.cell(f"{bytes_cell(row.memory_used_bytes)}/{bytes_cell(row.memory_total_bytes)}", width, is_right=True)


def _power_text(row: GpuRow) -> str:
    limit = "" if row.power_limit_watts is None else f"/{row.power_limit_watts:.0f}"
    return "" if row.power_watts is None else f"{row.power_watts:.0f}{limit} W"


def _paint_temperature(line: Line, row: GpuRow, width: int) -> None:
    palette, celsius = line.look.palette, row.temperature_celsius
    style = palette.warning if celsius is not None and celsius >= HOT_CELSIUS else palette.muted
    line.cell("" if celsius is None else f"{celsius:.0f} C", width, style, is_right=True)


def _paint_gpu_state(line: Line, row: GpuRow, width: int) -> None:
    look = line.look
    style = look.severity_style(row.severity) if row.severity in ODD else look.palette.muted
    text = row.detail if row.detail and row.state != "silent" else row.state
    if row.is_old:
        text = f"{text}, {seconds_text(row.age_s)} ago"
    line.cell(f"{look.glyphs.severities[row.severity]} {text}", width, style)
