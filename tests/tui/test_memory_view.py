"""The memory view: GPUs where there are any, and processes, /dev/shm and swap where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.machine import GpuCondition, HostReport, ThrottleReason, Xid
from tests.support.consoles import TalkingSource, desk
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster, played_once
from tests.support.sim_gpus import GIB, SimGpus, give_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = ((80, 24), (120, 35))


@played_once
def gpu_source(spoil: Callable[[list[SimGpus]], object], ranks_per_node: int = 4) -> TalkingSource:
    """Return a training with a GPU for each rank, of which some are spoilt."""
    source = TalkingSource(SimCluster(2, ranks_per_node))
    spoil(give_gpus(source.sim))
    source.run(12)
    return source


def leave_alone(_: list[SimGpus]) -> None:
    """Spoil nothing."""


def spoil(gpus: list[SimGpus]) -> None:
    """Let ranks 1 to 3 hold memory on rank 0's GPU, one GPU be lost, and one be too hot."""
    for rank in (1, 2, 3):
        gpus[0].hold(0, rank)
    gone = {"busy_frac": None, "memory_used_bytes": None, "temperature_celsius": None, "power_watts": None}
    gpus[1].change(
        2, condition=GpuCondition.LOST, sm_clock_hz=None, throttle_reasons=[], xids=[Xid(79, 1, 12.0)], **gone
    )
    gpus[1].change(1, throttle_reasons=[ThrottleReason.HW_THERMAL], temperature_celsius=88.0)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_gpus_that_are_well_look_as_before(size: tuple[int, int]) -> None:
    async with desk(gpu_source(leave_alone, 2), size) as console:
        await console.show("memory")
        assert_looks_as_before(f"gpus-memory-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_gpus_that_are_not_look_as_before(size: tuple[int, int]) -> None:
    async with desk(gpu_source(spoil), size) as console:
        await console.show("memory")
        assert_looks_as_before(f"odd-gpus-memory-{size[0]}x{size[1]}", console.lines())


async def test_the_usual_fix_of_a_foreign_context_can_be_read_at_80_columns() -> None:
    async with desk(gpu_source(lambda gpus: gpus[0].hold(0, 1)), (80, 24)) as console:
        await console.show("memory")
        text = " ".join(" ".join(console.lines()).split())
        assert "rank 1 holds 512 MiB on GPU 0 of demo-0, home of rank 0" in text
        assert "torch.cuda.set_device(local_rank) before the first CUDA call" in text
        assert "map_location" in text


async def test_a_host_without_gpus_shows_pss_shm_and_swap() -> None:
    source = TalkingSource(SimCluster())
    for node in source.sim.nodes:
        node.host = HostReport(1.0, 4 * GIB, GIB, 8 * GIB, 79 * 2**27, 500 * GIB, 120 * GIB, 0.0, 0.0)
    source.run(12)
    async with desk(source, (120, 35)) as console:
        await console.show("memory")
        text = console.text()
        assert "PSS" in text
        assert "/DEV/SHM" in text
        assert "1.0G/4.0G" in text
        assert "GPU" not in text


async def test_with_more_gpus_than_lines_the_odd_ones_are_shown() -> None:
    source = gpu_source(lambda gpus: gpus[1].change(7, ecc_uncorrected_errors=4), 8)
    async with desk(source, (120, 24)) as console:
        await console.show("memory")
        text = console.text()
        assert "4 uncorrected memory errors" in text
        assert "more GPUs" in text


async def test_a_screen_without_room_for_gpus_still_shows_ranks() -> None:
    async with desk(gpu_source(leave_alone, 8), (80, 16)) as console:
        await console.show("memory")
        assert "RESIDENT" in console.text()
