"""Named barriers over a real TCPStore; ranks are threads here, torchrun's processes in the integration tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ddpcore import barriers, probe
from ddpcore.barriers import _Gate
from ddpcore.errors import BarrierTimeoutError, StoreLostError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORLD_SIZE = 3


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def server() -> TCPStore:
    return serve()


@pytest.fixture
def gates(server: TCPStore) -> list[_Gate]:
    return [
        _Gate(TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=10)), rank, WORLD_SIZE)
        for rank in range(WORLD_SIZE)
    ]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        yield pool


def meet(threads: ThreadPoolExecutor, gates: list[_Gate], label: str, timeout_s: float = 10.0) -> None:
    for passing in [threads.submit(gate.pass_through, label, timeout_s) for gate in gates]:
        passing.result()


def test_all_pass_when_the_last_has_come(threads: ThreadPoolExecutor, gates: list[_Gate]) -> None:
    early = [threads.submit(gate.pass_through, "load", 10.0) for gate in gates[:2]]
    assert not any(passing.done() for passing in early)

    gates[2].pass_through("load", 10.0)

    for passing in early:
        passing.result(timeout=5)


def test_every_rank_that_gives_up_names_all_that_are_missing(threads: ThreadPoolExecutor, gates: list[_Gate]) -> None:
    with pytest.raises(BarrierTimeoutError) as caught:
        gates[1].pass_through("load", 0.1)

    assert (caught.value.missing, caught.value.label) == ([0, 2], "load")


def test_ranks_that_have_called_other_barriers_differently_often_still_meet(
    threads: ThreadPoolExecutor, gates: list[_Gate]
) -> None:
    with pytest.raises(BarrierTimeoutError):
        gates[0].pass_through("only rank 0", 0.05)

    for _ in range(3):
        meet(threads, gates, "all")


def test_a_rank_that_comes_after_the_others_gave_up_finds_them_at_the_next(
    threads: ThreadPoolExecutor, gates: list[_Gate]
) -> None:
    for gate in gates[:2]:
        with pytest.raises(BarrierTimeoutError):
            gate.pass_through("epoch", 0.05)
    gates[2].pass_through("epoch", 1.0)

    meet(threads, gates, "epoch")


def test_keys_of_gates_that_everybody_has_left_are_deleted(
    server: TCPStore, threads: ThreadPoolExecutor, gates: list[_Gate]
) -> None:
    for number in range(20):
        meet(threads, gates, f"epoch {number % 2}")

    assert server.num_keys() <= 2 * WORLD_SIZE + 1


def test_a_store_that_has_gone_is_said_to_be_gone() -> None:
    server = serve()
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=2))
    gate = _Gate(client, 0, 1)
    gate.pass_through("alone", 1.0)
    del server

    with pytest.raises(StoreLostError, match="store does not answer at barrier 'alone'"):
        gate.pass_through("alone", 1.0)


def test_outside_of_a_job_and_alone_in_one_a_barrier_returns_at_once(tmp_path: Path) -> None:
    barriers.barrier("nobody else")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        barriers.barrier("nobody else")
    finally:
        dist.destroy_process_group()
    assert probe.marks.barrier is None
