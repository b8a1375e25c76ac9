"""The same fleet on Textual's own widgets, as one would write it first: a DataTable of ranks and a RichLog below.

python -m tests.bench.stock_console DIRECTORY NODES
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from textual.app import App, ComposeResult
from textual.coordinate import Coordinate
from textual.widgets import DataTable, RichLog, Static

from tests.bench.fleet_console import FleetSession
from tests.bench.fleet_feeder import node_directory, node_names

if TYPE_CHECKING:
    from app.view.rows import RankRow

COLUMNS = ("rank", "node", "state", "step", "loss", "phase", "call", "wait", "memory", "age", "where")
LOOK_S = 0.2
LINES_S = 0.1
MAX_LINES = 10_000


class StockConsole(App[None]):
    """What our console is measured beside."""

    CSS = "DataTable { height: 3fr; } RichLog { height: 1fr; }"

    def __init__(self, session: FleetSession) -> None:
        super().__init__()
        self._session = session

    def compose(self) -> ComposeResult:
        yield Static("stock", id="about", markup=False)
        yield DataTable(cursor_type="row")
        yield RichLog(max_lines=MAX_LINES)

    async def on_mount(self) -> None:
        await self._session.start()
        self._table: DataTable[str] = self.query_one(DataTable)
        self._lines = self.query_one(RichLog)
        self._keys = self._table.add_columns(*COLUMNS)
        self._table.focus()
        self.set_interval(LOOK_S, self._look)
        self.set_interval(LINES_S, self._take_lines)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        self.query_one("#about", Static).update(f" RANK {event.cursor_row} ")

    def _look(self) -> None:
        rows = self._session.view().ranks()
        for row in rows[self._table.row_count :]:
            self._table.add_row(*_cells(row), key=str(row.rank))
        for place, row in enumerate(rows):
            for column, text in enumerate(_cells(row)):
                if self._table.get_cell_at(Coordinate(place, column)) != text:
                    self._table.update_cell_at(Coordinate(place, column), text)

    def _take_lines(self) -> None:
        for node, line in self._session.drain_logs():
            self._lines.write(f"{node}:r{line.rank} {line.text}")


def _cells(row: RankRow) -> tuple[str, ...]:
    wait = "" if row.wait_frac is None else f"{row.wait_frac:.0%}"
    age = "" if row.age_s is None else f"{row.age_s:.1f}s"
    memory = "" if row.rss_bytes is None else f"{row.rss_bytes / 2**30:.1f}G"
    told = (row.state, row.step, row.loss, row.phase, row.op, wait, memory, age, row.where)
    return (str(row.rank), row.node, *map(str, told))


def main() -> None:
    """Show the fleet until it is ended."""
    directory, num_nodes = sys.argv[1], int(sys.argv[2])
    directories = {name: node_directory(directory, index) for index, name in enumerate(node_names(num_nodes))}
    asyncio.run(StockConsole(FleetSession(directories)).run_async())


if __name__ == "__main__":
    main()
