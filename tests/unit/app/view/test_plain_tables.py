"""Tables of plain text: aligned, without columns that nobody fills."""

from __future__ import annotations

import re

import pytest

from app.view.plain_tables import barrier_lines, memory_lines, rank_lines, straggler_lines
from tests.support.sim import SimCluster
from tests.support.sim_program import Call


def test_an_ended_rank_has_its_end_before_its_line() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(20)
    sim.kill(1)
    sim.run(4)

    _, victim, culprit = rank_lines(sim.view().ranks(), {})
    assert re.search(r"  killed by SIGKILL  bytegpt\.py:\d+ in \w+$", culprit), culprit
    assert "SIGKILL" not in victim


def test_ranks_are_aligned_and_what_nobody_knows_has_no_column() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=6)
    sim.run_to_step(20)

    header, *lines = rank_lines(sim.view().ranks(), {})

    assert header.split()[:4] == ["RANK", "NODE", "STATE", "STEP"]
    assert "GPU" not in header
    assert [line.split()[:2] for line in lines] == [[str(rank), f"demo-{rank // 6}"] for rank in range(12)]
    places = {line.index("demo-") for line in lines}
    assert places == {header.index("NODE")}
    assert all(line == line.rstrip() for line in lines)
    assert rank_lines([], {}) == []


def test_only_ranks_that_wait_show_the_number_of_their_call() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(20)
    sim.freeze(2)
    sim.run(5)
    _, *lines = rank_lines(sim.view().ranks(), {})

    assert ["all_reduce #" in line for line in lines] == [True, True, False, True], "a moving rank's is seconds old"


def test_a_wait_is_told_with_both_sides() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(20)
    sim.freeze(2)
    sim.run(5)

    header, line = barrier_lines(sim.view().barriers(), {})

    assert header.split()[:4] == ["CALL", "WAITED", "WAITING", "MISSING"]
    assert line.startswith("all_reduce #")
    assert "  0-1, 3  " in line
    assert line[header.index("MISSING") :].startswith("2 ")


@pytest.mark.parametrize(("rank", "others"), [(0, "1-3"), (1, "0, 2-3")])
@pytest.mark.parametrize("op", ["broadcast", "all_reduce"])
def test_ranks_in_another_call_are_not_counted_among_those_of_the_row(rank: int, others: str, op: str) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(20)
    sim.mismatch(rank, Call(op, 18, "main", sizes=((3,),)))
    sim.run(5)

    header, line = barrier_lines(sim.view().barriers(), {})

    assert line.startswith("all_reduce #21 ")
    assert line[header.index("WAITING  ") :].startswith(f"{others} ")
    call = "all_reduce with 3 elements" if op == "all_reduce" else op
    assert line[header.index("OTHER CALLS") :] == f"rank {rank} calls {call} at bytegpt.py:18 in main"


def test_memory_is_beside_the_median() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(20)

    header, *lines = memory_lines(sim.view().memory(), {})

    assert header.split()[:3] == ["RANK", "NODE", "RSS"]
    assert len(lines) == 2
    assert all("%" in line for line in lines)


def test_a_straggler_comes_first_with_what_it_does_more() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.slow(3, 3.0)
    sim.run_to_step(200)
    pace = sim.view().pace
    assert pace is not None

    header, first, *others = straggler_lines(pace.rows(range(4)), {})

    assert header.split()[:5] == ["RANK", "NODE", "COST", "WAITS", "LAST"]
    assert first.split()[0] == "3"
    assert first[header.index("MORE TIME IN") :].strip()
    assert len(others) == 3
    assert straggler_lines([], {}) == []


def test_the_columns_of_a_table_that_is_printed_again_only_grow() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(20)
    sim.freeze(2)
    sim.run(15)
    widths: dict[str, int] = {}
    before, *_ = rank_lines(sim.view().ranks(), widths)
    sim.thaw(2)
    sim.run(15)

    after, *lines = rank_lines(sim.view().ranks(), widths)

    alone, *_ = rank_lines(sim.view().ranks(), {})
    assert len(alone) < len(before), "ranks that move have shorter rows"
    assert len(after) >= len(before)
    assert after.split() == before.split(), "no column goes either"
    assert len(lines) == 4


def test_a_phase_that_has_had_a_column_keeps_it() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(200)
    pace = sim.view().pace
    assert pace is not None
    widths = {" CHECKPOINT": 10}

    assert "CHECKPOINT" not in straggler_lines(pace.rows(range(4)), {})[0]
    assert "CHECKPOINT" in straggler_lines(pace.rows(range(4)), widths)[0]
