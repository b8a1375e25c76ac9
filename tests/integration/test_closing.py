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
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDS = Path(__file__).parents[1] / "support" / "programs" / "ends.py"


def log_to_stdout() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)


def gloo_threads() -> int:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def wait_for(name: str) -> None:
    deadline_s = time.monotonic() + 20
    while not Path(name).exists():
        assert time.monotonic() < deadline_s, name
        time.sleep(0.005)


def fail_on_rank_one() -> None:
    with open_process_group(join_timeout_s=30):
        if dist.get_rank() == 1:
            raise ValueError("no such luck")


def test_an_exception_is_not_hidden_and_waits_for_nobody() -> None:
    began_s = time.monotonic()
    other, failed = try_ranks(fail_on_rank_one, 2, has_group=False, timeout_s=30)

    assert failed.error == "ValueError: no such luck"
    assert other.error == ""
    assert "rank 0 closes its process group alone: barrier 'close of the process group' can never be" in other.log
    assert "rank 1 has ended" in other.log
    assert time.monotonic() - began_s < 15


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
        _, failed = ranks.outcomes(30)

    assert failed.value < 5
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
    assert max(run_ranks(close_while_a_collective_is_pending, 2, has_group=False, timeout_s=30)) < 5


def close_twice_and_after_the_program() -> str:
    group = open_process_group(join_timeout_s=30)
    group.close()
    group.close()
    with open_process_group(join_timeout_s=30):
        dist.barrier()
        dist.destroy_process_group()
    assert gloo_threads() == 0
    return "closed"


def test_closing_twice_or_after_the_program_has_destroyed_the_group_is_well() -> None:
    assert run_ranks(close_twice_and_after_the_program, 2, has_group=False, timeout_s=30) == ["closed"] * 2


def close_without_the_other() -> float:
    group = open_process_group(join_timeout_s=30)
    if dist.get_rank() == 1:
        Path("open").touch()
        time.sleep(60)
    wait_for("killed")
    began_s = time.monotonic()
    group.close(timeout_s=3)
    return time.monotonic() - began_s


def test_a_close_goes_on_without_a_rank_that_is_gone_and_names_it() -> None:
    with WarmRanks(close_without_the_other, 2, has_group=False) as ranks:
        ranks.wait_for_file("open")
        ranks.kill(1)
        (ranks.directory / "killed").touch()
        ranks.status(0, 30)
        outcome = ranks.outcomes(30)[0]

    assert outcome.value < 10
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
    assert run_ranks(close_in_a_child, 2, has_group=False, timeout_s=30) == [2.0, 2.0]


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


def test_programs_end_whatever_still_holds_the_group(programs: dict[str, list[subprocess.Popen[str]]]) -> None:
    failing = programs["raise"][1]
    output, _ = failing.communicate(timeout=90)

    assert failing.returncode == 1, output
    assert "ValueError: no such luck" in output
    assert programs["raise"][0].poll() is None
    for how in ("close", "forget"):
        for process in programs[how]:
            output, _ = process.communicate(timeout=90)
            assert (process.returncode, "total 2" in output) == (0, True), output
