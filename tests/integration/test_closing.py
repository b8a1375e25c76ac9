"""Leaving a process group: together when all is well, at once when not, and never for ever."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from ddpcore.process_group.open_group import open_process_group
from tests.support.meeting import free_port
from tests.support.own_threads import thread_names
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDS = Path(__file__).parents[1] / "support" / "programs" / "ends.py"


AT_ONCE_S = 30.0
"""Far below the five minutes of a close and the half hour of a collective; on an idle machine it is three seconds."""

NOT_DESTROYED = "torch has not destroyed its process group"


def log_to_stdout() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)


def wait_for(name: str) -> None:
    until(Path(name).exists, 60, name)


def fail_on_rank_one() -> None:
    try:
        with open_process_group(join_timeout_s=30):
            if dist.get_rank() == 1:
                raise ValueError("no such luck")
    finally:
        Path(f"closed-{os.environ['RANK']}").touch()
        # Its process stays: what the other hears of it is its own word, not that it has died.
        wait_for("closed-0")


def test_an_exception_is_not_hidden_and_waits_for_nobody() -> None:
    other, failed = try_ranks(fail_on_rank_one, 2, has_group=False)

    assert failed.error == "ValueError: no such luck"
    assert other.error == ""
    assert "rank 0 closes its process group alone: barrier 'close of the process group' can never be" in other.log
    assert "rank 1 has ended" in other.log


def fail_while_a_collective_is_pending() -> float:
    log_to_stdout()
    group = open_process_group(join_timeout_s=30)
    if dist.get_rank() == 0:
        wait_for("closed")
        group.close(has_failed=True)
        return 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match="no such luck"), group:
        raise ValueError("no such luck")
    del work
    Path("closed").touch()
    return time.monotonic() - began_s


def test_a_collective_that_others_never_join_does_not_hold_up_a_failing_rank() -> None:
    with WarmRanks(fail_while_a_collective_is_pending, 2, has_group=False) as ranks:
        _, failed = ranks.outcomes()

    assert failed.value < AT_ONCE_S
    assert NOT_DESTROYED not in failed.log
    assert "leaves a collective behind that not all ranks have joined" in failed.log


def close_while_a_collective_is_pending() -> float:
    log_to_stdout()
    group = open_process_group(join_timeout_s=30)
    work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 1 else None
    began_s = time.monotonic()
    group.close()
    assert not dist.is_initialized()
    del work
    return time.monotonic() - began_s


def test_nor_does_it_hold_up_a_close_that_all_have_come_to() -> None:
    for outcome in try_ranks(close_while_a_collective_is_pending, 2, has_group=False):
        assert outcome.value < AT_ONCE_S
        assert NOT_DESTROYED not in outcome.log


def close_twice_and_after_the_program() -> str:
    group = open_process_group(join_timeout_s=30)
    group.close()
    group.close()
    with open_process_group(join_timeout_s=30):
        dist.barrier()
        dist.destroy_process_group()
    # A thread that has been joined may stand in the list a little longer.
    until(lambda: "pt_gloo_runloop" not in thread_names(), 60, "gloo's threads are gone")
    return "closed"


def test_closing_twice_or_after_the_program_has_destroyed_the_group_is_well() -> None:
    assert run_ranks(close_twice_and_after_the_program, 2, has_group=False) == ["closed"] * 2


def close_without_the_other() -> float:
    group = open_process_group(join_timeout_s=30)
    Path(f"open-{dist.get_rank()}").touch()
    wait_for("killed")
    began_s = time.monotonic()
    group.close(timeout_s=3)
    return time.monotonic() - began_s


def test_a_close_goes_on_without_a_rank_that_is_gone_and_names_it() -> None:
    with WarmRanks(close_without_the_other, 2, has_group=False) as ranks:
        # Not before the other is through as well: who is killed while ranks meet is missed there.
        for rank in (0, 1):
            ranks.wait_for_file(f"open-{rank}")
        ranks.kill(1)
        (ranks.directory / "killed").touch()
        outcome = ranks.outcomes()[0]

    assert outcome.value < AT_ONCE_S
    assert "rank 0 closes its process group alone: " in outcome.log
    assert "rank 1 has " in outcome.log


def close_in_a_child() -> float:
    with open_process_group(join_timeout_s=30) as group:
        child = os.fork()
        if child == 0:
            group.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()


def test_a_forked_child_leaves_its_parent_s_group_alone() -> None:
    assert run_ranks(close_in_a_child, 2, has_group=False) == [2.0, 2.0]


@pytest.fixture
def programs() -> Iterator[dict[str, list[subprocess.Popen[str]]]]:
    """All ways to end at once, since each process takes seconds to import torch."""
    started = {}
    for how in ("close", "forget", "raise"):
        port = str(free_port())
        started[how] = [
            subprocess.Popen(
                [sys.executable, str(ENDS), how, port, str(rank)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]
    yield started
    for processes in started.values():
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_programs_end_whatever_still_holds_the_group(programs: dict[str, list[subprocess.Popen[str]]]) -> None:
    failing = programs["raise"][1]
    output, _ = failing.communicate(timeout=180)

    assert failing.returncode == 1, output
    assert "ValueError: no such luck" in output
    assert programs["raise"][0].poll() is None
    for how in ("close", "forget"):
        for process in programs[how]:
            output, _ = process.communicate(timeout=180)
            assert (process.returncode, "total 2" in output) == (0, True), output
