"""A Checkpointer of one process: no group, no launcher; and everything about its directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import ddpcore.checkpoint
from ddpcore.checkpoint import Checkpointer
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.directory import RunLock, checkpoint_name, step_of
from ddpcore.errors import CheckpointCallError, CheckpointDirectoryError, CheckpointInvalidError, StateNotStorableError
from ddpcore.probe import probe
from tests.support.warm_ranks import template_pid

if TYPE_CHECKING:
    from pathlib import Path


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((3,), float(step)), "step": step}


def steps_in(root: Path) -> list[int]:
    return [one.step for one in list_checkpoints(root)[0]]


def test_it_saves_loads_and_leaves_nothing_but_checkpoints(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "new" / "directory") as checkpointer:
        assert checkpointer.load_latest() is None
        checkpointer.save(3, state_of(3), per_rank={"own": 1})
        checkpointer.wait()
        assert checkpointer.last_step == 3
        found = checkpointer.load_latest()
        assert found is not None
        assert (found.step, found.state["step"], found.per_rank, found.skipped) == (3, 3, {"own": 1}, ())
    assert sorted(path.name for path in (tmp_path / "new" / "directory").iterdir()) == [".run.lock", "step_00000003"]
    assert [child for child in psutil.Process().children() if child.pid != template_pid()] == []


def test_the_newest_is_the_one_saved_last_not_the_one_with_the_highest_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=10) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step))
        assert checkpointer.load(1).step == 1
        checkpointer.save(2, {**state_of(2), "again": True})

    with Checkpointer(tmp_path) as checkpointer:
        found = checkpointer.load_latest()
        assert found is not None
        assert (found.step, found.state.get("again")) == (2, True)
    assert steps_in(tmp_path) == [2, 3, 1], "the first of step 2 has been replaced"


def test_the_last_ones_and_every_so_many_th_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, state_of(step))
    assert steps_in(tmp_path) == [11, 10, 8, 4]

    with Checkpointer(tmp_path, keep_last=1, keep_every=8) as checkpointer:
        checkpointer.save(12, state_of(12))
    assert steps_in(tmp_path) == [12, 8]

    with Checkpointer(tmp_path, keep_last=None) as checkpointer:
        for step in (13, 14, 15, 16):
            checkpointer.save(step, state_of(step))
    assert steps_in(tmp_path) == [16, 15, 14, 13, 12, 8]


def fail_within(checkpointer: Checkpointer) -> None:
    with checkpointer:
        checkpointer.save(1, state_of(1))
        raise KeyError("the training's own")


def test_an_error_within_closes_without_a_meeting(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(KeyError):
        fail_within(checkpointer)

    assert steps_in(tmp_path) == [1], "the writer has finished what it had"
    with pytest.raises(CheckpointCallError, match=r"save\(step=2\) on a Checkpointer that is closed: make a new one"):
        checkpointer.save(2, state_of(2))
    checkpointer.close()


def test_a_directory_is_free_again_when_its_checkpointer_is_forgotten(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointDirectoryError, match="by another Checkpointer of this very process: close that one"):
        Checkpointer(tmp_path)
    del checkpointer

    Checkpointer(tmp_path).close()


def test_a_process_that_was_forked_off_does_not_end_its_parent_s_writer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        child = os.fork()
        if child == 0:
            checkpointer._end()
            os._exit(0)
        os.waitpid(child, 0)
        checkpointer.save(2, state_of(2))
        with pytest.raises(CheckpointDirectoryError):
            RunLock(tmp_path)
    assert steps_in(tmp_path) == [2, 1]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": -1}, {"timeout_s": 0}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCallError, match="makes no sense: give a number above 0"):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize("step", [-1, 1.0, True, None, 2**63])
def test_a_step_that_is_none_is_refused_and_the_next_save_is_well(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointCallError, match="is no step: give the number of steps done"):
            checkpointer.save(step, state_of(1))
        with pytest.raises(StateNotStorableError, match=r"per_rank\['x'\] is a builtins.bytes"):
            checkpointer.save(1, state_of(1), {"x": b""})
        checkpointer.save(1, state_of(1))
    assert steps_in(tmp_path) == [1]


def test_a_step_that_is_not_there_is_said(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointInvalidError, match="no checkpoint of step 4"):
        checkpointer.load(4)


def test_preparing_makes_the_memory_before_it_is_needed(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        memory = checkpointer._saver._snapshot
        size = memory.num_bytes
        assert size > 4_000_000
        checkpointer.save(1, state)
        assert memory.num_bytes == size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_is_saved_from_an_accelerator_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    weight = torch.randn(3000, 1000, device="cuda")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare({"weight": weight})
        for step in range(1, 4):
            wanted = weight.add_(1).clone()
            checkpointer.save(step, {"weight": weight, "half": weight.bfloat16().T})
            weight.mul_(-1)
            found = checkpointer.load(step)
            assert torch.equal(found.state["weight"], wanted.cpu())
            assert torch.equal(found.state["half"], wanted.bfloat16().T.cpu())


def test_the_console_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        phases = []
        monkeypatch.setattr(checkpointer._saver, "save", lambda *_: phases.append(probe.marks.phases))
        checkpointer.save(1, {})
    assert phases == [("checkpoint",)]


def test_names_of_checkpoints_are_steps_and_nothing_else_is() -> None:
    assert checkpoint_name(7) == "step_00000007"
    assert checkpoint_name(7, ["step_00000007", "step_00000007.2"]) == "step_00000007.3"
    assert checkpoint_name(10**12) == "step_1000000000000"
    assert step_of("step_1000000000000") == 10**12
    assert step_of("step_00000007.12") == 7
    for name in (
        "step_7",
        "step_000000007",
        "step_00000007.",
        "step_00000007.x",
        "step_00000007 ",
        ".tmp-step_00000007",
    ):
        assert step_of(name) is None


def test_the_package_s_names_are_these() -> None:
    assert ddpcore.checkpoint.Checkpoint.__name__ == "Checkpoint"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ddpcore.checkpoint.Nothing


def test_a_damaged_step_that_was_asked_for_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
        checkpointer.wait()
        (tmp_path / "step_00000002" / "manifest.json").write_text("{}")

        with pytest.raises(CheckpointInvalidError, match=r"no checkpoint of step 2 in .*Load another one: ") as refused:
            checkpointer.load(2)

        assert "start over" not in str(refused.value)
        assert checkpointer.load(1).step == 1
