"""What the errors of a rank say to the person who must act."""

from __future__ import annotations

from ddpcore.errors import BarrierTimeoutError


def test_a_barrier_s_error_names_one_missing_rank_in_the_singular() -> None:
    error = BarrierTimeoutError("epoch end", [3], 1800.0)

    assert str(error).startswith("rank 3 did not reach barrier 'epoch end' in 1800 s: ")


def test_a_barrier_s_error_names_all_missing_ranks() -> None:
    error = BarrierTimeoutError("epoch end", [1, 3], 2.5)

    assert str(error).startswith("ranks 1, 3 did not reach barrier 'epoch end' in 2.5 s: ")
    assert (error.label, error.missing, error.timeout_s) == ("epoch end", [1, 3], 2.5)
