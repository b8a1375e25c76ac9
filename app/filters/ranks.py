"""Which ranks a filter shows, and in which order: by arrays first, by text only for those that are left."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.rank_facts import STATES
from app.filters.terms import EVERYTHING, FigureTerm, Filter, Key, KeyKind, NameTerm, NumberTerm, WordTerm
from app.model.job_model import PHASES
from app.view.ranks import rank_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.filters.terms import Term
    from app.view.ranks import RankTable
    from app.view.view import View

_SECONDS = (("", 1.0), ("s", 1.0), ("ms", 0.001), ("m", 60.0), ("min", 60.0), ("h", 3600.0))
_BYTES = tuple(
    (f"{prefix}{suffix}", 1024.0**power)
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for suffix in ("", "b", "ib")
)

RANK_KEYS = (
    Key("state", KeyKind.WORD, choices=tuple(str(state) for state in STATES)),
    Key("node", KeyKind.NAME),
    Key("rank", KeyKind.NUMBER),
    Key("phase", KeyKind.WORD, choices=tuple(str(phase) for phase in PHASES)),
    Key("step", KeyKind.FIGURE),
    Key("wait", KeyKind.FIGURE, units=_SECONDS),
    Key("memory", KeyKind.FIGURE, units=_BYTES),
)

REFRESH_S = 2.0
"""Seconds for which rows keep their places, so that they can be read."""
MAX_TEXTS = 1024
"""Limit of ranks whose text is searched at a time: 10 to 15 ms."""


class RankOrder(StrEnum):
    """Sort order of ranks; what is not known comes last, and equals stand in rank order."""

    RANK = "rank"
    WAIT = "wait"
    """The longest first."""
    STEP = "step"
    """The lowest first."""
    MEMORY = "memory"
    """The most first."""
    CPU = "cpu"
    """The busiest first."""


class RankWish(msgspec.Struct, frozen=True, eq=False):
    """Ranks that the user wants to see; a changed wish is another object."""

    filter: Filter = EVERYTHING
    order: RankOrder = RankOrder.RANK
    is_problems_only: bool = False


class RankSelection:
    """The ranks that are shown now.

    Attributes:
        ranks: In the order in which they are shown.
        num_unsearched: Ranks whose text has not been searched yet.
    """

    def __init__(self) -> None:
        self.ranks: NDArray[np.int64] = np.zeros(0, np.int64)
        self.num_unsearched = 0
        self._wish = RankWish()
        self._context: object = None
        self._at_s = -np.inf
        self._has_text: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._pending: NDArray[np.int64] = np.zeros(0, np.int64)
        self._is_first_search = False

    def update(self, view: View, wish: RankWish) -> None:
        """Update the ranks as often as rows may move, and immediately after a change of wish, job, size or verdict."""
        table, job = view.rank_table, view.job()
        if table is None or job is None:
            self.__init__()  # type: ignore[misc]  # restart
            return
        culprits = tuple(tuple(verdict.culprits) for verdict in view.verdicts())
        context = (wish.is_problems_only and culprits, job.job_id, job.attempt, table.num_ranks)
        is_new = wish is not self._wish or context != self._context
        if is_new:
            self._wish, self._context = wish, context
            self._has_text = np.zeros(table.num_ranks, np.bool_)
            self._pending, self._is_first_search = np.zeros(0, np.int64), True
        if not is_new and not len(self._pending) and abs(view.now_s - self._at_s) < REFRESH_S:
            return
        shown = rank_mask(table, wish.filter)
        if wish.is_problems_only:
            shown &= table.is_problem
        if wish.filter.texts:
            shown = self._search(view, shown)
        else:
            self._at_s, self.num_unsearched = view.now_s, 0
        self.ranks = in_order(table, np.flatnonzero(shown), wish.order)

    def _search(self, view: View, candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Search the text of some candidates; return those whose text is known to fit."""
        if not len(self._pending):
            self._pending, self._at_s = np.flatnonzero(candidates), view.now_s
        now, self._pending = self._pending[:MAX_TEXTS].tolist(), self._pending[MAX_TEXTS:]
        texts = self._wish.filter.texts
        for rank, row in zip(now, view.ranks(now), strict=True):
            text = rank_text(row)
            self._has_text[rank] = all(term.pattern.is_in(text) is not term.is_inverse for term in texts)
        self._is_first_search &= bool(len(self._pending))
        self.num_unsearched = len(self._pending) if self._is_first_search else 0
        return candidates & self._has_text


def rank_mask(table: RankTable, wanted: Filter) -> NDArray[np.bool_]:
    """Return the ranks for which all terms of a filter hold, except those about text."""
    shown = np.ones(table.num_ranks, np.bool_)
    for term in wanted.terms:
        found = _found(table, term)
        if found is not None:
            shown &= found ^ term.is_inverse
    return shown


def _found(table: RankTable, term: Term) -> NDArray[np.bool_] | None:
    """Return the ranks for which a term holds, inversion aside; None for a term about text."""
    match term:
        case WordTerm(key="state", choices=choices):
            return np.array([state in choices for state in STATES])[table.states]
        case WordTerm(choices=choices):
            return np.array([*(phase in choices for phase in PHASES), False])[table.phases]
        case NameTerm():
            return np.array([*(term.fits(name) for name in table.node_names), False])[table.node_of]
        case NumberTerm():
            return term.among(np.arange(table.num_ranks))
        case FigureTerm(key="step"):
            return term.holds_of(table.step)
        case FigureTerm(key="wait"):
            return term.holds_of(table.waiting_s)
        case FigureTerm():
            return term.holds_of(table.rss_bytes)
        case _:
            return None


def in_order(table: RankTable, ranks: NDArray[np.int64], order: RankOrder) -> NDArray[np.int64]:
    """Return ranks, which are given in rank order, sorted."""
    match order:
        case RankOrder.RANK:
            return ranks
        case RankOrder.WAIT:
            figures = -table.waiting_s
        case RankOrder.STEP:
            figures = table.step
        case RankOrder.MEMORY:
            figures = -table.rss_bytes
        case _:
            figures = -table.cpu_cores
    return ranks[np.argsort(figures[ranks], kind="stable")]  # NaN comes last
