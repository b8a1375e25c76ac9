"""Random faults in simulated clusters with lossy roads: the culprit is named in time, and nobody else ever is."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from app.diagnosis.causes import Cause
from tests.support.examples import few_and_many
from tests.support.sim import SimCluster

FAULTS = {
    "freeze": (Cause.FROZEN, 3.0),
    "kill": (Cause.EXITED, 3.0),
    "terminate": (Cause.EXITED, 4.0),
    "exit": (Cause.EXITED, 4.0),
    "leave": (Cause.FEWER_CALLS, 4.0),
    "hold_gil": (Cause.SILENT, 6.0),
    "slow": (Cause.STRAGGLER, 17.0),
}
"""Cause of each fault, and within how many seconds it must be named over a lossy road."""


def inject(sim: SimCluster, fault: str, rank: int) -> None:
    if fault == "freeze":
        sim.freeze(rank)
    elif fault == "kill":
        sim.kill(rank)
    elif fault == "terminate":
        sim.kill(rank, signal=15)
    elif fault == "exit":
        sim.exit(rank, code=3)
    elif fault == "leave":
        sim.exit(rank)
    elif fault == "hold_gil":
        sim.hold_gil(rank)
    else:
        sim.slow(rank, 8)


@few_and_many(
    10,
    40,
    fault=st.sampled_from(sorted(FAULTS)),
    rank=st.integers(0, 3),
    step=st.integers(2, 90),
    seed=st.integers(0, 10_000),
    road=st.sampled_from([(0.0, 0.0), (0.1, 0.1), (0.25, 0.5)]),
    hangs_on_death=st.booleans(),
)
def test_the_culprit_is_named_in_time_and_nobody_else_ever(
    *, fault: str, rank: int, step: int, seed: int, road: tuple[float, float], hangs_on_death: bool
) -> None:
    """The road is (share of messages lost, longest delay in seconds)."""
    drop, delay_s = road
    sim = SimCluster(seed=seed, noise=0.4, drop=drop, delay_s=delay_s, hangs_on_death=hangs_on_death)
    sim.run_to_step(step)
    sim.run_until(lambda: not np.isnan(sim.cluster.jobs["demo"].report_at_s).any(), 10, "a report of every rank")
    inject(sim, fault, rank)
    cause, within_s = FAULTS[fault]

    sim.run_until(lambda: (cause, (rank,)) in sim.causes(), within_s, f"{fault} of rank {rank}")
    sim.run(15)

    assert {(told, culprits) for _, told, culprits in sim.told} == {(cause, (rank,))}


@few_and_many(
    4, 15, seed=st.integers(0, 10_000), drop=st.sampled_from([0.0, 0.1, 0.3]), delay_s=st.sampled_from([0.0, 0.6])
)
def test_freezing_and_thawing_over_and_over_never_blames_a_victim(seed: int, drop: float, delay_s: float) -> None:
    sim = SimCluster(seed=seed, noise=0.4, drop=drop, delay_s=delay_s)
    sim.run_to_step(5)
    for round_number in range(5):
        rank = (seed + round_number) % 4
        sim.freeze(rank)
        sim.run(1.0 + (seed % 13))
        sim.thaw(rank)
        sim.run(1.5 + round_number)

    assert {cause for _, cause, _ in sim.told} <= {Cause.FROZEN}
    sim.run(3)
    assert sim.causes() == set()
