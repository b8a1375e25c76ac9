from __future__ import annotations

import pytest

from agent.wire.machine import LimitKind
from app.diagnosis.causes import Cause, Severity
from app.recording.events import EventKind, EventLog
from app.view.summary import status_object
from ddpcore.wire import GpuMemoryReport
from tests.support.sim import SimCluster
from tests.support.sim_gpus import TOTAL_BYTES, give_gpus, gpu_uuid
from tests.support.sim_memory import BASE_BYTES, GIB, MIB, give_memory, leak
from tests.support.sim_program import Training

LIMIT_BYTES = 4 * GIB
FAST = 3 * GIB
"""A minute: a leak of a minute's life."""


def growing(sim: SimCluster) -> list[tuple[int, ...]]:
    return [verdict.culprits for verdict in sim.diagnosis.verdicts if verdict.cause is Cause.MEMORY_GROWTH]


def test_a_rank_that_leaks_is_named_with_its_rate_its_limit_and_the_time_that_is_left_and_then_out_of_memory() -> None:
    sim, events = SimCluster(), EventLog()
    sim.each_view = events.observe
    sim.run_to_step(3)
    leak(sim, 1, FAST, LIMIT_BYTES)
    sim.run_until(lambda: bool(growing(sim)), 60, "a warning")
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.severity) == (Cause.MEMORY_GROWTH, [1], Severity.WARNING)
    memory = verdict.memory
    assert memory is not None
    assert memory.rate_bytes_per_min == pytest.approx(FAST, rel=0.2)
    assert (memory.rank, memory.limit, memory.limit_bytes) == (1, "cgroup", LIMIT_BYTES)
    assert 10 < memory.remaining_s < 60
    printed = status_object(sim.view())["verdicts"][0]["memory"]
    assert printed["rate_bytes_per_min"] == pytest.approx(memory.rate_bytes_per_min)
    (row,) = sim.view().memory([1])
    assert (row.limit_bytes, row.remaining_s) == (LIMIT_BYTES, memory.remaining_s)
    sim.run_until(lambda: sim.ranks[1].end is not None, 70, "the end")
    sim.run(3)
    verdict = sim.verdicts()[0]
    assert (verdict.cause, verdict.culprits) == (Cause.OOM, [1])
    assert verdict.memory is not None
    assert verdict.memory.rate_bytes_per_min == pytest.approx(FAST, rel=0.2)
    told = [event for event in events.latest_first() if event.kind is EventKind.VERDICT]
    assert [event.ranks for event in told] == [(1,), (1,)]


def test_ranks_that_leak_alike_are_one_verdict_which_says_who_is_nearest() -> None:
    sim = SimCluster()
    sim.run_to_step(3)
    leak(sim, 1, FAST, LIMIT_BYTES + GIB)
    leak(sim, 2, 0.9 * FAST, LIMIT_BYTES)
    sim.run_until(lambda: (1, 2) in growing(sim), 60, "both")
    assert growing(sim) == [(1, 2)]
    (verdict,) = sim.verdicts()
    assert verdict.memory is not None
    assert verdict.memory.rank == 2


def test_ranks_that_share_a_limit_come_to_it_the_sooner() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    begin_s = sim.now_s

    def held_at(now_s: float) -> int:
        return int(BASE_BYTES + GIB * (now_s - begin_s) / 60.0)

    for rank in (0, 1):
        give_memory(sim, rank, held_at, 14 * GIB, LimitKind.MACHINE)
    # The machine of the simulation has 10 GiB left: each rank alone would have ten minutes.
    sim.run(70)
    rows = sim.view().memory()
    assert [row.growth_bytes_per_min for row in rows] == pytest.approx([GIB, GIB], rel=0.2)
    assert all(row.remaining_s is not None and row.remaining_s < 400 for row in rows)


def test_what_leaks_is_not_only_slow() -> None:
    sim = SimCluster()
    sim.run_to_step(3)
    sim.slow(1, 3.0)
    leak(sim, 1, FAST, LIMIT_BYTES)
    sim.run_until(lambda: bool(growing(sim)), 60, "a warning")
    assert sim.diagnosis.verdicts[0].cause is Cause.MEMORY_GROWTH


def test_a_leak_of_gpu_memory_is_told_against_the_whole_gpu() -> None:
    sim = SimCluster()
    give_gpus(sim)
    sim.run_to_step(3)
    rank, begin_s = sim.ranks[3], sim.now_s
    for _ in range(75):
        sim.run(1)
        held = int(20 * GIB + 40 * GIB * (sim.now_s - begin_s) / 60)
        rank.gpu_memory = (GpuMemoryReport(gpu_uuid(1, 1), held, held + GIB, held, held + GIB),)
        if growing(sim):
            break
    assert growing(sim) == [(3,)]
    memory = sim.verdicts()[0].memory
    assert memory is not None
    assert (memory.limit, memory.limit_bytes) == ("gpu", TOTAL_BYTES)
    assert memory.rate_bytes_per_min == pytest.approx(40 * GIB, rel=0.2)


def test_memory_that_the_allocator_keeps_is_fragmented_and_no_leak() -> None:
    sim = SimCluster()
    give_gpus(sim)
    sim.run_to_step(3)
    rank, begin_s = sim.ranks[3], sim.now_s
    for _ in range(75):
        sim.run(1)
        reserved = int(20 * GIB + 40 * GIB * (sim.now_s - begin_s) / 60)
        rank.gpu_memory = (GpuMemoryReport(gpu_uuid(1, 1), 15 * GIB, reserved, 18 * GIB, reserved),)
    assert not sim.alarms
    found = [finding for finding in sim.view().memory_findings(sim.view().memory()) if "reserved" in finding.text]
    assert [finding.severity for finding in found] == [Severity.WARNING]


def test_a_rank_far_above_the_others_is_a_finding_and_no_leak() -> None:
    sim = SimCluster()
    sim.run_to_step(3)
    give_memory(sim, 2, lambda _: 3 * GIB, 8 * GIB)
    sim.run(40)
    assert not sim.alarms
    texts = [finding.text for finding in sim.view().memory_findings(sim.view().memory())]
    assert len(texts) == 1
    assert texts[0].startswith("rank 2 holds 3.0 GiB")


@pytest.mark.parametrize("until_s", [25.0])
def test_a_cache_that_fills_after_the_first_step_and_a_checkpoint_are_no_alarm(until_s: float) -> None:
    sim = SimCluster(program=Training(checkpoint_s=2.0))
    sim.run_to_step(3)
    begin_s = sim.now_s

    def held_at(now_s: float) -> int:
        full = min(1.0, (now_s - begin_s) / until_s)
        return int(BASE_BYTES + 1.2 * GIB * full + 200 * MIB * ((now_s % 7) < 1))

    for rank in range(4):
        give_memory(sim, rank, held_at, LIMIT_BYTES)
    sim.run(90)
    assert not [alarm for alarm in sim.alarms if alarm[1] is Cause.MEMORY_GROWTH]
