"""The engine where ranks, workers and disks do not keep step."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, get_worker_info

import ddpcore
from ddpcore.checkpoint.snapshot import Snapshot
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAMPLES = 40
GLOBAL_BATCH = 8


class Drawn(Dataset[Tensor]):
    """Each sample is its index and a number drawn in the worker."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        assert get_worker_info() is not None
        return torch.tensor([float(index), float(torch.rand(()))])


def train_with_workers(directory: str, until: str, loader_options: dict[str, Any]) -> tuple[int, list[list[float]]]:
    drawn: list[list[float]] = []
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        batches = engine.loader(Drawn(), global_batch_size=GLOBAL_BATCH, num_workers=2, **loader_options)
        engine.checkpoint(directory, every="1 epoch", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until=until):
            for inputs in batch.micro_batches():
                drawn += inputs.tolist()
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
        return engine.step, drawn


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_that_outlive_the_steps_hold_up_nothing(tmp_path: Path, *, is_persistent: bool) -> None:
    for step, drawn in run_ranks(
        train_with_workers,
        2,
        str(tmp_path),
        "2 epochs",
        {"persistent_workers": is_persistent},
        has_group=False,
        timeout_s=60,
    ):
        assert step == 10
        assert len(drawn) == NUM_SAMPLES
    assert (tmp_path / "step_00000010").is_dir()


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path) -> None:
    ((_, expected),) = run_ranks(train_with_workers, 1, str(tmp_path / "a"), "2 epochs", {}, has_group=False)
    run_ranks(train_with_workers, 1, str(tmp_path / "b"), "1 epoch", {}, has_group=False)
    ((_, resumed),) = run_ranks(train_with_workers, 1, str(tmp_path / "b"), "2 epochs", {}, has_group=False)

    assert resumed == expected[NUM_SAMPLES:]
    assert [row[1] for row in resumed] != [row[1] for row in expected[:NUM_SAMPLES]]


def squared(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return {"square": model(batch[0]).square().mean(1)}


def evaluate_with_batch_norm() -> tuple[float, float]:
    """Return what all ranks measure together, and what this one measures alone with the first rank's statistics."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(30, 4, generator=generator))
    with ddpcore.Engine(seed=0) as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in engine.steps(engine.loader(data, global_batch_size=6), until="3 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
        together = engine.evaluate(model, data, squared, batch_size=7)["square"]
        module = ddpcore.unwrap(model)
        module.eval()
        with torch.no_grad():
            alone = float(module(data.tensors[0]).square().mean())
        return together, alone


def test_an_evaluation_is_of_the_first_ranks_running_statistics() -> None:
    results = run_ranks(evaluate_with_batch_norm, 3, has_group=False)
    for together, alone in results:
        assert together == results[0][0]
        assert together == pytest.approx(alone, rel=1e-5)


def evaluate_with_own_buffers() -> tuple[float, float, int]:
    """Return the error that is measured, the running mean afterwards, and the ignored buffer's size."""
    with ddpcore.Engine() as engine:
        rank = engine.placement.rank
        inner = nn.BatchNorm1d(1)
        model = engine.wrap(inner, forward_sync_buffers=False)
        inner.register_buffer("bank", torch.zeros(3 + rank))
        cast("nn.parallel.DistributedDataParallel", model).parameters_to_ignore.add("bank")
        assert inner.running_mean is not None
        inner.running_mean.fill_(float(rank + 1))
        found = engine.evaluate(model, TensorDataset(torch.ones(4, 1)), squared, batch_size=2)
        return round(float(found["square"]), 3), float(inner.running_mean), inner.get_buffer("bank").numel()


def test_buffers_that_ranks_keep_to_themselves_are_theirs_after_an_evaluation() -> None:
    assert run_ranks(evaluate_with_own_buffers, 2, has_group=False) == [(0.0, 1.0, 3), (0.0, 2.0, 4)]


def test_an_evaluation_leaves_each_part_in_its_mode() -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        model.train()
        model[1].eval()  # type: ignore[index] # it is a Sequential still
        engine.evaluate(model, TensorDataset(torch.ones(6, 4)), squared, batch_size=4)
        assert [part.training for part in model.modules()] == [True, True, False]


def evaluate_on_some(how: str) -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = TensorDataset(torch.zeros(0 if how == "empty" and engine.placement.rank == 1 else 12, 4))
        batches = engine.loader(TensorDataset(torch.ones(24, 4)), global_batch_size=6)
        for batch in engine.steps(batches, until="4 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            if engine.step == 1 and how == "predict" and engine.is_first:
                engine.predict(model, data, lambda module, one: module(one[0]), batch_size=4)
            if engine.step == 1 and (how == "empty" or (how == "evaluate" and engine.is_first)):
                engine.evaluate(model, data, squared, batch_size=4)
        if how == "evaluate at the end" and engine.is_first:
            engine.evaluate(model, data, squared, batch_size=4)


@pytest.mark.parametrize("how", ["evaluate", "evaluate at the end", "predict"])
def test_ranks_that_do_not_come_to_an_evaluation_are_named_instead_of_a_hang(how: str) -> None:
    outcomes = try_ranks(evaluate_on_some, 3, how, has_group=False)
    assert outcomes[0].error.startswith(
        f"BarrierDeadlockError: exchange 'engine.{how.split(' ', maxsplit=1)[0]}' can never be passed: "
    )
    # One that waits for the first rank is proof enough: the other may be on its way there.
    assert re.search(r"never be passed: (each of ranks 1-2|rank [12]) waits in ", outcomes[0].error), outcomes[0]
    assert all(outcome.error for outcome in outcomes)


def test_a_data_set_that_is_empty_on_one_rank_is_one_error_on_every_rank() -> None:
    for outcome in try_ranks(evaluate_on_some, 2, "empty", has_group=False):
        assert outcome.error.startswith("EngineUseError: engine.evaluate: rank 1: the data set has 0 samples")


def evaluate_differently(what: str) -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(4, 1))
        is_other = engine.placement.rank == 1
        size = 9 if what == "size" and is_other else 10

        def measure(module: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"other" if what == "name" and is_other else "square": squared(module, batch)["square"]}

        engine.evaluate(model, TensorDataset(torch.zeros(size, 4)), measure, batch_size=4)


@pytest.mark.parametrize(("what", "words"), [("size", "data sets of different sizes"), ("name", "different measures")])
def test_ranks_that_evaluate_differently_are_an_error_on_every_rank(what: str, words: str) -> None:
    for outcome in try_ranks(evaluate_differently, 2, what, has_group=False):
        assert outcome.error.startswith(f"EngineUseError: the ranks evaluate {words}")


def train_and_fail_to_copy(directory: str) -> tuple[int, list[str]]:
    with ddpcore.Engine() as engine:
        reserve = Snapshot.reserve
        failures: list[str] = []

        def fail_once(snapshot: Snapshot, num_bytes: int) -> None:
            if engine.placement.rank == 1 and len(failures) < 2:  # to make ready for the first one, and to take it
                failures.append("failed")
                raise OSError(errno.ENOMEM, "no memory")
            reserve(snapshot, num_bytes)

        setattr(Snapshot, "reserve", fail_once)  # noqa: B010 - in a process of its own; mypy sees no methods change
        model = engine.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.ones(24, 4)), global_batch_size=4)
        engine.checkpoint(directory, every="2 steps", model=model)
        for batch in engine.steps(batches, until="6 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
        return engine.step, failures


def test_a_rank_without_memory_for_its_copy_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    assert run_ranks(train_and_fail_to_copy, 2, str(tmp_path), has_group=False, timeout_s=60) == [
        (6, []),
        (6, ["failed", "failed"]),
    ]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000004", "step_00000006"]


def train_named(directory: str, name: str) -> int:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(4, 1))
        batches = engine.loader(TensorDataset(torch.ones(24, 4)), global_batch_size=4, name=name)
        engine.checkpoint(directory, every="1 step", model=model)
        for batch in engine.steps(batches, until=f"{engine.step + 2} steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).square().mean())
        return engine.step


def test_a_renamed_loader_does_not_begin_anew_unnoticed(tmp_path: Path) -> None:
    assert run_ranks(train_named, 2, str(tmp_path), "train", has_group=False) == [2, 2]
    for outcome in try_ranks(train_named, 2, str(tmp_path), "main", has_group=False):
        assert outcome.error.startswith(
            "SamplerStateError: the checkpoint holds batches train, and here are batches main"
        )
    assert run_ranks(train_named, 2, str(tmp_path), "train", has_group=False) == [4, 4]
