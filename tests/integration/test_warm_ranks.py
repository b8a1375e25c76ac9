"""The tests' own ranks: forked ones see each other, say how they failed, and die when they must."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import warm_ranks
from tests.support.warm_ranks import PATIENCE_S, WarmRanks, run_ranks, try_ranks


def add_up(value: int) -> float:
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_one() -> int:
    sys.stdout.write("here I am\n")
    dist.barrier()  # a rank that ends while others still connect to it would fail them
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    return int(os.environ["LOCAL_RANK"])


def wait_for_ever() -> None:
    dist.barrier()
    # Not before the barrier: a rank that is killed in it takes the other one along.
    Path(f"waiting-{dist.get_rank()}").touch()
    signal.pause()


def test_ranks_meet_in_a_collective() -> None:
    assert run_ranks(add_up, 4, 10) == [46.0] * 4


def test_an_outcome_says_how_a_rank_failed() -> None:
    fine, failed = try_ranks(fail_on_rank_one, 2, num_nodes=2)
    assert (fine.value, fine.error, fine.status) == (0, "", 0)
    assert failed.error == "ValueError: no such luck"
    assert "fail_on_rank_one" in failed.trace
    assert failed.log == "here I am\n"


def test_a_rank_can_be_killed_and_the_rest_ends_with_the_test() -> None:
    with WarmRanks(wait_for_ever, 2) as ranks:
        ranks.wait_for_file("waiting-0")
        ranks.wait_for_file("waiting-1")
        began_s = time.monotonic()
        ranks.kill(1)
        assert ranks.status(1) == -signal.SIGKILL
        with pytest.raises(AssertionError, match=r"ranks \[0\] have not ended"):
            ranks.outcomes(timeout_s=0.5)
        assert time.monotonic() - began_s < PATIENCE_S / 2


def test_ranks_that_start_too_slowly_fail_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(warm_ranks, "START_S", 0.0)
        with pytest.raises(TimeoutError):
            WarmRanks(add_up, 2, 10)

    assert run_ranks(add_up, 2, 10) == [21.0] * 2
