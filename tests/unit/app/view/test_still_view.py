"""Rows that stand still tell the same whatever the model below them takes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.text import json_value
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.view.view import View


def told(view: View) -> list[object]:
    """Return everything that a view tells."""
    pace, table = view.pace, view.rank_table
    assert pace is not None
    assert table is not None
    rows = (view.headline(), view.job(), view.nodes(), view.ranks(), view.barriers(), view.verdicts(), view.memory())
    arrays = (table.states, table.step, table.waiting_s, table.cpu_cores, table.is_problem)
    return [
        [json_value(row) for row in rows],
        [json_value(part) for part in (view.memory_summary(), view.progress(), pace.summary(), pace.rows(range(9)))],
        [np.asarray(array).tolist() for array in arrays[:2]],
        [np.nan_to_num(array, nan=-1.0).tolist() for array in arrays[2:]],
    ]


def test_what_comes_later_leaves_no_trace_in_a_view_that_stands_still() -> None:
    sim = SimCluster(groups={"pair": (0, 2)})
    sim.run(12)
    still = sim.view().still()
    before = told(still)

    sim.slow(1, 2.0)
    sim.run(5)
    sim.freeze(2)
    sim.run(3)
    sim.kill(0)
    sim.run(3)

    # What was asked for is kept, so a second copy is asked anew.
    assert told(still.still()) == before
    assert told(sim.view()) != before


def test_a_view_without_a_job_stands_still_too() -> None:
    still = SimCluster().view().still()

    assert still.job() is None
    assert still.num_ranks == 0
