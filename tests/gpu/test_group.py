"""Opening and closing with NCCL, on a machine with a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpcore.process_group.open_group import open_process_group
from tests.support.gpus import NUM_GPUS, needs_gpu
from tests.support.meeting import FREE, free_port
from tests.support.warm_ranks import run_ranks, try_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]


def add_up_on_gpu() -> dict[str, Any]:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    with open_process_group(join_timeout_s=60) as group:
        total = torch.ones(1, device=group.device)
        dist.all_reduce(total)
        on_cpu = torch.ones(1)
        dist.all_reduce(on_cpu)
        current = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(group.device).uuid)
    return {
        "total": total.item(),
        "on_cpu": on_cpu.item(),
        "device": str(group.device),
        "current": current,
        "backend": group.backend,
        "uuid": uuid,
    }


def test_a_rank_trains_on_its_gpu_and_knows_which_it_is() -> None:
    (told,) = run_ranks(add_up_on_gpu, 1, has_group=False, timeout_s=120)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout

    assert (told["total"], told["on_cpu"], told["device"], told["current"]) == (1.0, 1.0, "cuda:0", 0)
    assert told["backend"] == "cpu:gloo,cuda:nccl"
    assert f"GPU-{told['uuid']}" in listed


@pytest.mark.skipif(NUM_GPUS < 2, reason="this machine has no two NVIDIA GPUs")
def test_each_rank_has_a_gpu_of_its_own() -> None:
    told = run_ranks(add_up_on_gpu, 2, has_group=False, timeout_s=120)

    assert [one["device"] for one in told] == ["cuda:0", "cuda:1"]
    assert [one["total"] for one in told] == [2.0, 2.0]


def share_a_gpu(init_method: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    open_process_group(init_method, join_timeout_s=60)


def test_two_ranks_on_one_gpu_are_named_before_nccl_is_started() -> None:
    outcomes = try_ranks(share_a_gpu, 2, f"tcp://127.0.0.1:{free_port()}", env=FREE, has_group=False, timeout_s=120)

    for outcome in outcomes:
        assert "would use one GPU, GPU-" in outcome.error


def test_more_ranks_than_gpus_are_refused_before_any_waiting() -> None:
    world_size = NUM_GPUS + 1
    for outcome in try_ranks(add_up_on_gpu, world_size, has_group=False, timeout_s=120):
        assert f"{world_size} ranks on this machine, but this process sees {NUM_GPUS}" in outcome.error


def leave_with_a_kernel_running() -> float:
    group = open_process_group(join_timeout_s=60)
    work = dist.all_reduce(torch.ones(1, device=group.device), async_op=True)
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    began_s = time.monotonic()
    group.close(has_failed=True)
    del work
    return time.monotonic() - began_s


def test_a_failing_rank_does_not_wait_for_its_gpu_for_ever() -> None:
    assert run_ranks(leave_with_a_kernel_running, 1, has_group=False, timeout_s=120)[0] < 15
