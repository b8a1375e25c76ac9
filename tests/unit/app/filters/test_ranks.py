"""Which ranks are shown, in which order, and when that may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from app.diagnosis.causes import RankState, Severity
from app.filters.language import read_filter
from app.filters.ranks import MAX_TEXTS, RANK_KEYS, REFRESH_S, RankOrder, RankSelection, RankWish, rank_mask
from app.filters.terms import Filter
from tests.support.sim import SimCluster, played_once

if TYPE_CHECKING:
    from app.view.view import View


def wish(text: str = "", order: RankOrder = RankOrder.RANK, *, is_problems_only: bool = False) -> RankWish:
    read = read_filter(text, RANK_KEYS)
    assert isinstance(read, Filter), read
    return RankWish(read, order, is_problems_only)


@played_once
def frozen() -> SimCluster:
    """Return a training of four ranks on two nodes, of which rank 2 has been frozen for seconds."""
    sim = SimCluster()
    sim.freeze(2, at_step=20)
    sim.run_until(lambda: bool(sim.verdicts()), 30, "a verdict")
    sim.run(3)
    return sim


def shown(view: View, wanted: RankWish) -> list[int]:
    selection = RankSelection()
    selection.update(view, wanted)
    return [int(rank) for rank in selection.ranks]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", [0, 1, 2, 3]),
        ("state=frozen", [2]),
        ("!state=frozen", [0, 1, 3]),
        ("state=waiting node=demo-0", [0, 1]),
        ("node=demo-?", [0, 1, 2, 3]),
        ("node=other", []),
        ("rank=1-2", [1, 2]),
        ("wait>1s", [0, 1, 3]),
        ("!wait>1s", [2]),
        ("wait>1h", []),
        ("step<100000", [0, 1, 2, 3]),
        ("memory>1K", [0, 1, 2, 3]),
        ("memory<1K", []),
        ("frozen", [2]),
        ("!frozen rank=0,2", [0]),
        (r"/rank [13]\b/", [1, 3]),
        ("all_reduce !rank=0", [1, 2, 3]),
    ],
)
def test_a_filter_shows_the_ranks_that_it_is_true_of(text: str, ranks: list[int]) -> None:
    assert shown(frozen().view(), wish(text)) == ranks


def test_a_phase_is_only_known_of_a_rank_that_has_told_it() -> None:
    sim = frozen()
    phases = {row.rank: row.phase for row in sim.view().ranks()}

    for phase in set(phases.values()):
        assert shown(sim.view(), wish(f"phase={phase}")) == [rank for rank in phases if phases[rank] == phase]
    young = SimCluster()
    young.run(0.5)
    assert shown(young.view(), wish("phase=starting")) == [
        row.rank for row in young.view().ranks() if row.phase == "starting"
    ]


def test_problems_are_the_ranks_whose_rows_are_not_well() -> None:
    for sim in (frozen(), SimCluster()):
        sim.run(1)
        view = sim.view()
        odd = [row.rank for row in view.ranks() if row.severity in {Severity.WARNING, Severity.CRITICAL}]

        assert shown(view, wish(is_problems_only=True)) == odd


def test_the_arrays_tell_what_the_rows_tell() -> None:
    sim = frozen()
    view = sim.view()
    table, rows = view.rank_table, view.ranks()

    assert table is not None
    assert [tuple(RankState)[code] for code in table.states] == [row.state for row in rows]
    assert [table.node_names[index] for index in table.node_of] == [row.node for row in rows]
    assert table.step.tolist() == [row.step for row in rows]
    assert table.rss_bytes.tolist() == [row.rss_bytes for row in rows]
    assert table.cpu_cores.tolist() == [row.cpu_cores for row in rows]
    waits = [np.nan if row.waiting_s is None else row.waiting_s for row in rows]
    np.testing.assert_allclose(table.waiting_s, waits)


def test_ranks_are_sorted_by_what_is_asked_for_and_what_is_not_known_comes_last() -> None:
    sim = frozen()
    view = sim.view()
    rows = view.ranks()

    assert shown(view, wish(order=RankOrder.RANK)) == [0, 1, 2, 3]
    by_wait = shown(view, wish(order=RankOrder.WAIT))
    assert by_wait[-1] == 2
    assert by_wait == sorted(by_wait, key=lambda rank: -(rows[rank].waiting_s or 0.0))
    for order, figures in (
        (RankOrder.STEP, [row.step or 0 for row in rows]),
        (RankOrder.MEMORY, [-(row.rss_bytes or 0) for row in rows]),
        (RankOrder.CPU, [-(row.cpu_cores or 0.0) for row in rows]),
    ):
        expected = [rank for _, rank in sorted((figure, rank) for rank, figure in enumerate(figures))]
        assert shown(view, wish(order=order)) == expected


def test_rows_keep_their_places_for_a_while_and_a_new_wish_counts_at_once() -> None:
    sim = frozen()
    selection, wanted = RankSelection(), wish("state=frozen")
    selection.update(sim.view(), wanted)
    sim.thaw(2)
    sim.run(REFRESH_S / 2)
    selection.update(sim.view(), wanted)
    assert selection.ranks.tolist() == [2]

    selection.update(sim.view(), wish("state=frozen"))
    assert selection.ranks.tolist() == []

    selection.update(sim.view(), wish())
    assert selection.ranks.tolist() == [0, 1, 2, 3]


def test_what_stands_for_a_while_is_looked_at_again() -> None:
    sim = frozen()
    for text in ("state=frozen", "frozen"):
        selection, wanted = RankSelection(), wish(text)
        selection.update(sim.view(), wanted)
        assert selection.ranks.tolist() == [2]
        sim.thaw(2)
        sim.run(REFRESH_S + 0.1)
        selection.update(sim.view(), wanted)

        assert selection.ranks.tolist() == []
        sim.freeze(2)
        sim.run(5)


def test_a_new_culprit_is_among_the_problems_at_once() -> None:
    sim = frozen()
    sim.thaw(2)
    sim.run(8)
    selection, wanted = RankSelection(), wish(is_problems_only=True)
    selection.update(sim.view(), wanted)
    assert selection.ranks.tolist() == []

    sim.freeze(1)
    sim.run_until(lambda: bool(sim.verdicts()), 1, "a verdict")
    selection.update(sim.view(), wanted)

    assert 1 in selection.ranks.tolist()


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
@pytest.mark.parametrize("text", ["", "rank=6", "demo-1", "!frozen"])
def test_a_job_that_goes_on_with_other_ranks_is_looked_at_at_once(text: str, sizes: tuple[int, int]) -> None:
    before, after = (SimCluster(ranks_per_node=size) for size in sizes)
    for sim in (before, after):
        sim.run(1)
    selection, wanted = RankSelection(), wish(text)
    selection.update(before.view(), wanted)

    selection.update(after.view(), wanted)

    assert selection.ranks.tolist() == shown(after.view(), wanted)


def test_there_is_nothing_to_show_without_a_job() -> None:
    selection = RankSelection()
    selection.update(frozen().view(), wish())
    assert len(selection.ranks) == 4

    selection.update(SimCluster().view(), wish())

    assert selection.ranks.tolist() == []


def test_text_of_many_ranks_is_searched_in_several_goes_and_says_how_far_it_has_come() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=MAX_TEXTS)
    sim.run(1)
    selection, wanted = RankSelection(), wish("demo-1")
    found = []
    for _ in range(4):
        selection.update(sim.view(), wanted)
        found.append((len(selection.ranks), selection.num_unsearched))

    assert found == [(0, MAX_TEXTS), (MAX_TEXTS, 0), (MAX_TEXTS, 0), (MAX_TEXTS, 0)]


def test_a_mask_is_one_flag_a_rank() -> None:
    table = frozen().view().rank_table

    assert table is not None
    assert rank_mask(table, wish("rank=3 anything").filter).tolist() == [False, False, False, True]
