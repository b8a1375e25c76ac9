"""What the GPU that a rank computes on says of why the rank may be slow, and what it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from agent.node_state.gpu_signals import RATE_S, GpuSignals, numa_nodes
from agent.node_state.signals import SignalTracks
from agent.wire.machine import (
    GpuCondition,
    GpuFigures,
    GpuHolder,
    GpuReport,
    JobRank,
    NvLinks,
    PcieLink,
    ThrottleReason,
)
from agent.wire.signals import Signal

GIB = 2**30
CLOCKS = {Signal.GPU_CLOCK, Signal.GPU_MEMORY_CLOCK, Signal.PCIE_WIDTH, Signal.PCIE_GENERATION}
THROTTLES = (Signal.GPU_THERMAL, Signal.GPU_POWER_CAP, Signal.GPU_POWER_BRAKE, Signal.GPU_HW_SLOWDOWN)


def whose(rank: int) -> JobRank:
    return JobRank("job", rank)


def holder(rank: int | None, pid: int = 0, **fields: Any) -> GpuHolder:
    owner = None if rank is None else whose(rank)
    return GpuHolder(pid or 100 + (rank or 0), fields.pop("used_bytes", GIB), whose=owner, **fields)


def gpu(index: int, *, owners: tuple[int, ...] | None = None, holders: Any = None, **figures: Any) -> GpuReport:
    """Return a busy GPU with the rank of its index on it."""
    known: dict[str, Any] = {
        "busy_frac": 0.97,
        "temperature_celsius": 61.0,
        "power_limit_watts": 700.0,
        "sm_clock_hz": 1_980_000_000,
        "memory_clock_hz": 2_619_000_000,
        "pcie": PcieLink(5, 16, replays=0),
        "nvlinks": NvLinks(18, 18, 0),
        "ecc_corrected_errors": 0,
        "is_row_remap_pending": False,
        "has_row_remap_failed": False,
    }
    return GpuReport(
        GpuFigures(index, f"GPU-{index}", **known | figures),
        [whose(rank) for rank in ((index,) if owners is None else owners)],
        [holder(index)] if holders is None else list(holders),
    )


def after(*samples: list[GpuReport], period_s: float = 1.0) -> dict[tuple[int, Signal], float]:
    """Return the values of the last sample, by rank and signal."""
    signals = GpuSignals()
    found: dict[tuple[int, Signal], float] = {}
    for at, gpus in enumerate(samples):
        found = {(rank.rank, signal): value for rank, signal, value in signals.values(gpus, at * period_s)}
    return found


def test_a_busy_gpu_that_is_well_gives_its_levels_and_zeros() -> None:
    found = after(*[[gpu(0)]] * 11)

    levels = {Signal.GPU_CLOCK: 1.98e9, Signal.GPU_MEMORY_CLOCK: 2.619e9, Signal.GPU_TEMPERATURE: 61.0}
    links = {Signal.PCIE_WIDTH: 16, Signal.PCIE_GENERATION: 5, Signal.NVLINKS: 18, Signal.GPU_POWER_LIMIT: 700.0}
    neutral = dict.fromkeys([signal for _, signal in found if signal not in levels | links], 0.0)
    assert {signal: value for (_, signal), value in found.items()} == levels | links | neutral
    assert {*THROTTLES, Signal.PCIE_REPLAYS, Signal.NVLINK_ERRORS, Signal.GPU_ECC_CORRECTED} < neutral.keys()
    assert {Signal.GPU_ROW_REMAP, Signal.GPU_OTHERS} < neutral.keys()


def test_an_idle_gpu_gives_no_clock_and_no_link_and_its_power_limit_slows_nobody() -> None:
    low: dict[str, Any] = {
        "sm_clock_hz": 345_000_000,
        "pcie": PcieLink(1, 16),
        "throttle_reasons": [ThrottleReason.SW_POWER_CAP],
    }
    found = after(*[[gpu(0, busy_frac=0.0, **low)]] * 3)

    assert CLOCKS.isdisjoint(signal for _, signal in found)
    assert found[0, Signal.GPU_POWER_CAP] == 0.0
    assert found[0, Signal.GPU_TEMPERATURE] == 61.0


def test_a_clock_counts_once_the_gpu_has_had_time_to_raise_it() -> None:
    idle, busy = [gpu(0, busy_frac=0.0, sm_clock_hz=345_000_000)], [gpu(0, sm_clock_hz=345_000_000)]

    assert (0, Signal.GPU_CLOCK) not in after(busy, busy, idle, busy)
    assert after(busy, busy, idle, busy, busy)[0, Signal.GPU_CLOCK] == 345e6


def test_a_gpu_that_does_not_say_whether_it_is_busy_gives_no_clock() -> None:
    found = after(*[[gpu(0, busy_frac=None, throttle_reasons=[ThrottleReason.SW_POWER_CAP])]] * 3)

    assert CLOCKS.isdisjoint(signal for _, signal in found)
    assert found[0, Signal.GPU_POWER_CAP] == 1.0


HW = ThrottleReason.HW_SLOWDOWN


@pytest.mark.parametrize(
    ("reasons", "slowed"),
    [
        ([], set()),
        ([ThrottleReason.SYNC_BOOST], set()),
        ([ThrottleReason.SW_THERMAL], {Signal.GPU_THERMAL}),
        ([HW, ThrottleReason.HW_THERMAL], {Signal.GPU_THERMAL}),
        ([HW, ThrottleReason.HW_POWER_BRAKE], {Signal.GPU_POWER_BRAKE}),
        ([HW], {Signal.GPU_HW_SLOWDOWN}),
        ([ThrottleReason.SW_POWER_CAP], {Signal.GPU_POWER_CAP}),
    ],
)
def test_a_throttled_gpu_gives_the_cause_that_nvml_knows(reasons: list[ThrottleReason], slowed: set[Signal]) -> None:
    found = after([gpu(0, throttle_reasons=reasons)])

    assert {signal for signal in THROTTLES if found[0, signal]} == slowed


def test_counters_become_rates_and_a_new_driver_begins_again() -> None:
    def replays(*counts: int) -> float | None:
        return after(*([gpu(0, pcie=PcieLink(replays=count))] for count in counts), period_s=RATE_S / 2).get(
            (0, Signal.PCIE_REPLAYS)
        )

    assert replays(5000) is None
    assert replays(5000, 5100) is None
    assert replays(5000, 5100, 5200) == 200 / RATE_S
    assert replays(5000, 5100, 5200, 5900) is None, "each window counts once"
    assert replays(5000, 5100, 5200, 5900, 5900) == 700 / RATE_S
    assert replays(5000, 5100, 5200, 5200, 5200) == 0.0
    assert replays(5000, 5100, 5200, 7) is None


def test_one_burst_of_errors_is_no_value_and_errors_that_go_on_are() -> None:
    def corrected(*counts: int) -> set[float]:
        signals, tracks, seen = GpuSignals(), SignalTracks(), set[float]()
        for now_s, count in enumerate(counts):
            for rank, signal, value in signals.values([gpu(0, ecc_corrected_errors=count)], now_s):
                tracks.take(rank, signal, value, now_s)
            reading = tracks.readings(whose(0), now_s).get(Signal.GPU_ECC_CORRECTED)
            seen.add(0.0 if reading is None else round(reading.value))
        return seen

    assert corrected(*[0] * 25, *[500] * 60) == {0.0}
    assert max(corrected(*[0] * 25, *(50 * second for second in range(60)))) > 45.0


def test_errors_of_links_and_memory_are_rates_too() -> None:
    samples = [[gpu(0, nvlinks=NvLinks(18, 18, 30 * at), ecc_corrected_errors=10 * at)] for at in range(2)]
    found = after(*samples, period_s=RATE_S)

    assert (found[0, Signal.NVLINK_ERRORS], found[0, Signal.GPU_ECC_CORRECTED]) == (3.0, 1.0)


@pytest.mark.parametrize(("pending", "failed", "value"), [(True, False, 1.0), (None, True, 1.0), (None, None, None)])
def test_a_row_of_memory_to_be_replaced(pending: bool | None, failed: bool | None, value: float | None) -> None:
    found = after([gpu(0, is_row_remap_pending=pending, has_row_remap_failed=failed)])

    assert found.get((0, Signal.GPU_ROW_REMAP)) == value


def test_gpus_without_a_rank_and_lost_ones_give_nothing_of_themselves() -> None:
    lost = gpu(1, condition=GpuCondition.LOST)
    found = after(*[[gpu(0), gpu(2, owners=(), holders=[holder(None, 999)]), lost]] * 2)

    assert {rank for rank, signal in found if signal is not Signal.GPU_OTHERS} == {0}


def others(*gpus: GpuReport) -> dict[int, float]:
    return {rank: value for (rank, signal), value in after(list(gpus)).items() if signal is Signal.GPU_OTHERS}


def test_others_are_all_processes_but_the_rank_s_own_and_mps_s() -> None:
    own_child = holder(0, 200)
    server = holder(None, 300, name="nvidia-cuda-mps")
    stranger, neighbour = holder(None, 400, name="python"), holder(1)

    assert others(gpu(0, holders=[holder(0), own_child, server])) == {0: 0.0}
    assert others(gpu(0, holders=[holder(0), stranger])) == {0: 1.0}
    assert others(gpu(0, holders=[holder(0), own_child, stranger, neighbour])) == {0: 2.0}
    assert others(gpu(0, owners=(0, 1), holders=[holder(0), holder(1)])) == {0: 1.0, 1: 1.0}


def test_where_the_rank_is_not_seen_itself_nobody_is_called_another() -> None:
    assert others(gpu(0, holders=[holder(None, 5), holder(None, 6)])) == {}
    assert others(gpu(0, holders=[])) == {}


def test_others_share_the_instance_of_a_gpu_in_parts() -> None:
    def part(rank: int | None, number: int) -> GpuHolder:
        return holder(rank, 100 * number + (rank or 0), mig_uuid=f"MIG-{number}")

    apart = gpu(0, owners=(0, 1), holders=[part(0, 1), part(1, 2), part(None, 3)])
    together = gpu(0, owners=(0, 1), holders=[part(0, 1), part(1, 2), part(None, 2)])
    assert others(apart) == {0: 0.0, 1: 0.0}
    assert others(together) == {0: 0.0, 1: 1.0}


def test_a_rank_on_the_wrong_gpu_is_slowed_by_that_one() -> None:
    first = gpu(0, temperature_celsius=90.0, numa_node=0, holders=[holder(0), holder(1)])
    found = after([first, gpu(1, holders=[], numa_node=1)])

    assert (found[1, Signal.GPU_TEMPERATURE], found[1, Signal.GPU_OTHERS]) == (90.0, 1.0)
    assert numa_nodes([first, gpu(1, holders=[], numa_node=1)]) == {whose(0): 0, whose(1): 0}
    assert numa_nodes([first, gpu(1, numa_node=None)]) == {whose(0): 0}


def test_smoothed_a_throttled_gpu_stands_out_and_hot_gpus_are_alike() -> None:
    tracks, signals = SignalTracks(), GpuSignals()
    hot: dict[str, Any] = {"throttle_reasons": [HW, ThrottleReason.HW_THERMAL], "sm_clock_hz": 1_230_000_000}
    for at in range(120):
        gpus = [gpu(0, temperature_celsius=88.0), gpu(1, temperature_celsius=88.0, **hot if at >= 60 else {})]
        for rank, signal, value in signals.values(gpus, float(at)):
            tracks.take(rank, signal, value, float(at))

    well, slow = (tracks.readings(whose(rank), 119.0) for rank in range(2))
    assert slow["gpu_clock"].value == pytest.approx(1.23e9, rel=0.01)
    assert slow["gpu_clock"].before == pytest.approx(1.98e9, rel=0.01)
    assert slow["gpu_clock"].since_s == pytest.approx(60.0, abs=2.0)
    assert slow["gpu_thermal"].value == pytest.approx(1.0, abs=0.01)
    assert (well["gpu_clock"].value, well["gpu_clock"].since_s, "gpu_thermal" in well) == (1.98e9, None, False)
    assert well["gpu_temperature"] == slow["gpu_temperature"]
