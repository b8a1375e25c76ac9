"""Nodes without a common file system: each keeps a whole copy, and who lacks the newest gets it from who has it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpcore.checkpoint import Checkpointer
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.reading import verify
from tests.support.training_states import is_same
from tests.support.warm_ranks import run_ranks, try_ranks


def state_of(step: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(step)
    return {"model": {"large": torch.randn(301, 300, generator=numbers), "empty": torch.zeros(0, 3)}, "step": step}


def own_directory(directory: str) -> str:
    return f"{directory}/node-{os.environ['GROUP_RANK']}"


def save_some(directory: str, *steps: int) -> None:
    with Checkpointer(own_directory(directory)) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), {"rank": dist.get_rank()})


def load_newest(directory: str) -> tuple[int, bool, Any, tuple[str, ...]]:
    with Checkpointer(own_directory(directory)) as checkpointer:
        found = checkpointer.load_latest()
        assert found is not None
        checkpointer.save(found.step + 1, found.state)
        # Whatever is in flight elsewhere, the training's group is as it was.
        dist.barrier()
    return found.step, is_same(found.state, state_of(found.state["step"])), found.per_rank, found.skipped


def steps_in(path: Path) -> list[int]:
    return [one.step for one in list_checkpoints(path)[0]]


def test_each_node_writes_a_whole_copy_of_its_own(tmp_path: Path) -> None:
    run_ranks(save_some, 4, str(tmp_path), 1, 2, num_nodes=2)

    for node, ranks in enumerate([(0, 1), (2, 3)]):
        assert steps_in(tmp_path / f"node-{node}") == [2, 1]
        assert verify(tmp_path / f"node-{node}" / "step_00000002").ranks == ranks
    answers = run_ranks(load_newest, 4, str(tmp_path), num_nodes=2)
    assert answers == [(2, True, {"rank": rank}, ()) for rank in range(4)]


def test_a_node_that_has_lost_its_disk_gets_the_newest_from_one_that_has_it(tmp_path: Path) -> None:
    run_ranks(save_some, 4, str(tmp_path), 1, 2, num_nodes=2)
    shutil.rmtree(tmp_path / "node-0")

    assert run_ranks(load_newest, 4, str(tmp_path), num_nodes=2) == [(2, True, None, ())] * 4

    # From the next save on it has a whole copy again.
    assert steps_in(tmp_path / "node-0") == [3]
    assert steps_in(tmp_path / "node-1") == [3, 2, 1]


def test_the_newest_step_that_is_sound_on_any_node_is_everybody_s(tmp_path: Path) -> None:
    run_ranks(save_some, 4, str(tmp_path), 1, 2, 3, num_nodes=2)
    shutil.rmtree(tmp_path / "node-1" / "step_00000003")
    # Step 3 is damaged on the one node and gone on the other; step 2 is damaged on the one.
    for node, step in ((0, 3), (1, 2)):
        path = min((tmp_path / f"node-{node}" / f"step_{step:08d}").glob("rank-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    answers = run_ranks(load_newest, 4, str(tmp_path), num_nodes=2)

    assert [answer[:3] for answer in answers] == [(2, True, None)] * 4
    assert answers[0][3] == answers[3][3]
    assert answers[0][3][0].startswith("step_00000003: ranks 0-1: rank-00000.safetensors: its checksum differs")
    assert answers[0][3][0].endswith("ranks 2-3: this node has no copy of it")


def test_a_node_more_or_less_is_no_hindrance(tmp_path: Path) -> None:
    run_ranks(save_some, 4, str(tmp_path), 1, num_nodes=2)

    assert run_ranks(load_newest, 3, str(tmp_path), num_nodes=3) == [(1, True, None, ())] * 3
    assert run_ranks(load_newest, 1, str(tmp_path))[0][:2] == (2, True)


def save_into_a_shared_directory(directory: str) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state_of(1))


def test_nodes_that_share_a_directory_write_one_copy_together(tmp_path: Path) -> None:
    run_ranks(save_into_a_shared_directory, 4, str(tmp_path), num_nodes=2)

    assert verify(tmp_path / "step_00000001").ranks == (0, 1, 2, 3)


def fail_on_one_node(directory: str) -> None:
    if os.environ["GROUP_RANK"] == "1":
        Path(own_directory(directory)).write_text("a file")
    dist.barrier()
    Checkpointer(own_directory(directory))


def test_a_directory_that_one_node_cannot_use_is_told_on_all(tmp_path: Path) -> None:
    for outcome in try_ranks(fail_on_one_node, 4, str(tmp_path), num_nodes=2):
        assert "CheckpointDirectoryError: rank 2: checkpoints cannot be kept in " in outcome.error
