"""Disks that are full or cannot be written: told to every rank, and nothing that was saved before is touched."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ddpcore.checkpoint import Checkpointer
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.reading import verify
from ddpcore.engine.engine import Engine
from ddpcore.errors import CheckpointDirectoryError, CheckpointWriteError
from tests.support.checkpoint_copies import write_checkpoint
from tests.support.filesystems import read_only, small_disk
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks

ROWS = 400


def state_of(num_rows: int) -> dict[str, Any]:
    return {"large": torch.ones(num_rows, 1000)}


def fill_the_disk(directory: str) -> list[str]:
    told = []
    checkpointer = Checkpointer(directory)
    for step, num_rows in ((1, ROWS), (2, 10 * ROWS), (3, ROWS)):
        checkpointer.save(step, state_of(num_rows))
        try:
            checkpointer.wait()
        except CheckpointWriteError as error:
            told.append(str(error))
    checkpointer.save(4, state_of(10 * ROWS))
    try:
        checkpointer.close()
    except CheckpointWriteError as error:
        told.append(str(error))
    return told


def test_a_full_disk_is_told_on_every_rank_and_costs_only_the_checkpoint_in_flight(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8_000_000) as disk:
        answers = run_ranks(fill_the_disk, 2, str(disk))

        assert answers[0] == answers[1]
        second, fourth = answers[0]
        assert second.startswith("step 2 is not saved: ")
        assert "No space left on device: " in second
        assert " bytes to write, " in second
        assert second.endswith("The checkpoints before it are untouched; mend the cause and save again")
        assert fourth.startswith("step 4 is not saved: ")
        published, refused = list_checkpoints(disk)
        assert ([one.step for one in published], refused) == ([3, 1], {})
        for one in published:
            verify(disk / one.name)
        assert [path.name for path in disk.glob(".*")] == [".run.lock"], "what failed has given its room back"


def hit_a_limit_on_one_rank(directory: str) -> list[str]:
    told = []
    checkpointer = Checkpointer(directory)
    checkpointer.prepare(state_of(ROWS))
    if dist.get_rank() == 1:
        pid = checkpointer._saver._writer.pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    for step in (1, 2):
        checkpointer.save(step, state_of(ROWS if step == 1 else 10))
        try:
            checkpointer.wait()
        except CheckpointWriteError as error:
            told.append(str(error))
    checkpointer.close()
    return told


def test_a_limit_that_one_rank_s_writer_meets_is_told_on_every_rank(tmp_path: Path) -> None:
    answers = run_ranks(hit_a_limit_on_one_rank, 3, str(tmp_path))

    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 1
    assert answers[0][0].startswith("step 1 is not saved: rank 1: File too large: ")
    assert "vanished" not in answers[0][0]
    assert [one.step for one in list_checkpoints(tmp_path)[0]] == [2]


def open_it(directory: str) -> None:
    Checkpointer(directory)


def test_a_read_only_directory_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with read_only(tmp_path / "disk"):
        for name in ("disk", "disk/below"):
            for outcome in try_ranks(open_it, 2, str(tmp_path / name)):
                assert outcome.error.startswith("CheckpointDirectoryError: rank 0: checkpoints cannot be kept in ")
                assert "Read-only file system; give a directory that can be written" in outcome.error


def save_when_told(directory: str) -> list[str]:
    told = []
    checkpointer = Checkpointer(directory)
    for step in range(1, 4):
        Path(f"before-{step}-{dist.get_rank()}").touch()
        if dist.get_rank() == 0:
            until(Path(f"go-{step}").exists, 60, "the test says go")
        dist.barrier()
        try:
            checkpointer.save(step, state_of(ROWS))
            checkpointer.wait()
        except CheckpointDirectoryError as error:
            told.append(str(error))
    checkpointer.close()
    return told


def test_a_disk_that_becomes_read_only_and_comes_back_costs_what_came_between(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with WarmRanks(save_when_told, 2, str(disk)) as ranks:

        def go(step: int) -> None:
            ranks.wait_for_file(f"before-{step}-0")
            (ranks.directory / f"go-{step}").touch()

        go(1)
        ranks.wait_for_file("before-2-0")
        with read_only(disk):
            go(2)
            ranks.wait_for_file("before-3-0")
        go(3)
        told = [outcome.value for outcome in ranks.outcomes()]

    assert told[0] == told[1]
    assert len(told[0]) == 1
    assert "Read-only file system" in told[0][0]
    assert [one.step for one in list_checkpoints(disk)[0]] == [3, 1]


def test_a_disk_that_is_away_for_a_while_costs_an_engine_what_came_between(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, away = tmp_path / "disk", tmp_path / "away"
    moves = {2: (root, away), 5: (away, root)}

    def train(until: str) -> None:
        with Engine() as engine:
            batches = engine.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4)
            engine.checkpoint(root, every="1 step", model=nn.Linear(1, 1))
            for _ in engine.steps(batches, until=until):
                if engine.step in moves:
                    before, after = moves[engine.step]
                    before.rename(after)

    train("8 steps")
    assert [one.step for one in list_checkpoints(root)[0]] == [8, 7, 6]
    assert any("training goes on without a checkpoint of step 4" in record.message for record in caplog.records)

    moves[9] = (root, away)
    with pytest.raises(CheckpointDirectoryError):
        train("11 steps")


def load_with_little_memory(directory: str) -> None:
    checkpointer = Checkpointer(directory)
    if dist.get_rank() == 1:
        in_use = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 20_000_000, in_use + 20_000_000))
    checkpointer.load_latest()


def test_a_rank_without_memory_for_a_checkpoint_is_told_and_no_older_one_is_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"small": torch.zeros(3)}, 1, step=1)
    write_checkpoint(tmp_path, {"large": torch.zeros(80_000_000, dtype=torch.uint8)}, 1, step=2)

    for outcome in try_ranks(load_with_little_memory, 2, str(tmp_path)):
        assert outcome.error.startswith(
            "CheckpointInvalidError: step_00000002 is not loaded: rank 1: there is no memory for its 8000"
        )
