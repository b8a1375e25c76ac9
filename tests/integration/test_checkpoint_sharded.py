"""Checkpoints of sharded models: saved where the rows lie, loaded whole, or onto any other number of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ddpcore.checkpoint import Checkpointer, restore
from ddpcore.checkpoint.reading import verify
from ddpcore.checkpoint.restoring import cut_rows
from ddpcore.errors import StateNotStorableError
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

ROWS = 10
"""Over 4 ranks 3, 3, 3 and 1; of the bias's 3 rows the last rank has none."""


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, ROWS), nn.Tanh(), nn.Linear(ROWS, 3))


def shard(model: nn.Module, mesh_shape: tuple[int, ...], dim: int = 0) -> None:
    """Shard parameters over the last dimension of a mesh, and replicate them over the others."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [*([Replicate()] * (len(mesh_shape) - 1)), Shard(dim)]
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def new_training(mesh_shape: tuple[int, ...] | None) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = new_model()
    if mesh_shape:
        shard(model, mesh_shape)
    return model, torch.optim.AdamW(model.parameters(), 0.1, foreach=False)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def numbers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return all that training has made, from every rank alike."""
    found = {name: whole(tensor).flatten().tolist() for name, tensor in model.state_dict().items()}
    for index, kept in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": whole(value).flatten().tolist() for key, value in kept.items()}
    return found


def save(directory: str, mesh_shape: tuple[int, ...] | None) -> dict[str, list[float]]:
    model, optimizer = new_training(mesh_shape)
    for step in range(3):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.zeros_like(parameter) + float(step + number)
        optimizer.step()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return numbers_of(model, optimizer)


def load(directory: str, mesh_shape: tuple[int, ...] | None) -> tuple[dict[str, list[float]], list[str]]:
    model, optimizer = new_training(mesh_shape)
    with Checkpointer(directory) as checkpointer:
        checkpoint = checkpointer.load_latest()
    assert checkpoint is not None
    restore(checkpoint.state, {"model": model, "optimizer": optimizer})
    moments = [kept["exp_avg"] for kept in optimizer.state.values()]
    kinds = [type(tensor).__name__ for tensor in (*model.state_dict().values(), *moments)]
    return numbers_of(model, optimizer), kinds


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_what_is_sharded_comes_back_on_any_number_of_ranks(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    saved = run_ranks(save, 4, str(tmp_path), mesh_shape)
    assert saved == [saved[0]] * 4

    for world_size, other_mesh, kind in ((4, (4,), "DTensor"), (3, (3,), "DTensor"), (2, None, "Tensor")):
        for numbers, kinds in run_ranks(load, world_size, str(tmp_path), other_mesh):
            assert numbers == saved[0]
            assert set(kinds) == {kind}


def test_a_replicated_checkpoint_can_be_loaded_sharded(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, str(tmp_path), None)
    assert [numbers for numbers, _ in run_ranks(load, 3, str(tmp_path), (3,))] == [saved[0]] * 3


def train_with_fsdp(directory: str, num_more: int) -> tuple[int, dict[str, list[float]]]:
    """Go on from the newest checkpoint, if there is one, for some more steps on the same data; then save."""
    model = new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    inputs = torch.linspace(-1, 1, 12 * 6).view(12, 6)
    with Checkpointer(directory) as checkpointer:
        checkpoint = checkpointer.load_latest()
        step = 0
        if checkpoint is not None:
            restore(checkpoint.state, {"model": model, "optimizer": optimizer})
            step = checkpoint.step
        for _ in range(num_more):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return step, numbers_of(model, optimizer)


def test_a_fully_sharded_training_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    ((_, expected),) = run_ranks(train_with_fsdp, 1, str(tmp_path / "alone"), 6)

    run_ranks(train_with_fsdp, 4, str(tmp_path / "sharded"), 3)
    for step, numbers in run_ranks(train_with_fsdp, 3, str(tmp_path / "sharded"), 3):
        assert step == 6
        assert numbers.keys() == expected.keys()
        for name, values in numbers.items():
            assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def save_columns(directory: str) -> None:
    model = nn.Linear(6, ROWS, bias=False)
    shard(model, (2,), dim=1)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"model": model.state_dict()})


def test_another_way_of_sharding_is_refused_on_every_rank(tmp_path: Path) -> None:
    for outcome in try_ranks(save_columns, 2, str(tmp_path)):
        assert outcome.error.startswith(StateNotStorableError.__name__)
        assert "state['model']['weight'] is placed as" in outcome.error
        assert "full_state_dict=True" in outcome.error


def save_on_a_node(directory: str, mesh_shape: tuple[int, ...]) -> None:
    model, _ = new_training(mesh_shape)
    with Checkpointer(f"{directory}/node-{os.environ['GROUP_RANK']}") as checkpointer:
        checkpointer.save(1, {"model": model.state_dict()})


def test_nodes_without_a_common_directory_keep_a_copy_if_each_has_all_rows(tmp_path: Path) -> None:
    run_ranks(save_on_a_node, 4, str(tmp_path), (2, 2), num_nodes=2)
    for node in range(2):
        assert verify(tmp_path / f"node-{node}" / "step_00000001").step == 1

    for outcome in try_ranks(save_on_a_node, 4, str(tmp_path / "other"), (4,), num_nodes=2):
        assert outcome.error.startswith(StateNotStorableError.__name__)
        assert "0.weight has rows on ranks that do not share this directory" in outcome.error


def save_as_own(directory: str) -> None:
    model, _ = new_training((2,))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {}, {"mine": model.state_dict()})


def test_what_is_sharded_is_no_ranks_own(tmp_path: Path) -> None:
    for outcome in try_ranks(save_as_own, 2, str(tmp_path)):
        assert outcome.error.startswith(f"{StateNotStorableError.__name__}: mine.0.weight is sharded over ranks")


def rows_of_torch(sizes: list[int]) -> list[list[tuple[int, int]]]:
    """Return for each number of rows where torch begins and ends this rank's, on a mesh of 2 x 2 cut twice."""
    mesh = init_device_mesh("cpu", (2, 2))
    coordinate = tuple(mesh.get_coordinate() or ())
    found = []
    for size in sizes:
        local = distribute_tensor(torch.arange(size), mesh, [Shard(0), Shard(0)]).to_local().tolist()
        ours = cut_rows(size, (2, 2), coordinate, (True, True))
        found.append([(local[0], local[-1] + 1) if local else (0, 0), ours if ours[0] < ours[1] else (0, 0)])
    assert dist.get_world_size() == 4
    return found


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for per_size in run_ranks(rows_of_torch, 4, [0, 1, 2, 3, 5, 7, 8, 10, 13, 100]):
        for of_torch, ours in per_size:
            assert of_torch == ours
