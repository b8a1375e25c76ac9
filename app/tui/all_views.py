"""Every view by its name, in the order of the number keys, and the page of a rank, which has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.actions import VIEW_NAMES
from app.tui.views.barriers import BarriersView
from app.tui.views.charts import ChartsView
from app.tui.views.events import EventsView
from app.tui.views.logs import LogsView
from app.tui.views.memory import MemoryView
from app.tui.views.overview import OverviewView
from app.tui.views.rank import RankPage
from app.tui.views.ranks import RanksView
from app.tui.views.stragglers import StragglersView

if TYPE_CHECKING:
    from app.tui.line_view import LineView
    from app.tui.stage import Stage


RANK_PAGE = "rank"


def make_views(stage: Stage) -> dict[str, LineView]:
    """Return the views of a console."""
    views = (OverviewView, RanksView, BarriersView, StragglersView, MemoryView, LogsView, ChartsView, EventsView)
    return {**dict(zip(VIEW_NAMES, (view(stage) for view in views), strict=True)), RANK_PAGE: RankPage(stage)}
