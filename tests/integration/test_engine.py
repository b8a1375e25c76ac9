"""The engine on real gloo ranks: the result is one process's, whatever the ranks, the shares and the interruptions."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import ddpcore
from ddpcore.engine.stop_agreement import StopReason
from ddpcore.samplers.order import SequentialOrder
from tests.support.warm_ranks import PATIENCE_S, Outcome, WarmRanks, run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAMPLES = 103
GLOBAL_BATCH = 12
STEPS_PER_EPOCH = 9
NUM_EPOCHS = 3
UNTIL = f"{NUM_EPOCHS} epochs"
LONG_EPOCHS = 120
LONG_UNTIL = f"{LONG_EPOCHS} epochs"
"""Ranks agree once a second: long enough for two stops."""
LONG_S = 300.0
"""For a thousand steps of ranks that meet in each, beside others that want the same cores."""


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """A regression whose samples know their index."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(num_samples, 5, dtype=torch.float64, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + torch.randn(
            num_samples, 1, dtype=torch.float64, generator=generator
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.targets[index]


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squared_errors(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    _, inputs, targets = batch
    return {"error": (model(inputs) - targets).square().squeeze(1)}


def train(
    until: str,
    directory: str | None = None,
    *,
    num_parts: int = 1,
    weights: list[int] | None = None,
    signal_at: tuple[int, int] | None = None,
    stop_patience_s: float | None = None,
    dropout: float = 0.0,
    **wrap_options: Any,
) -> dict[str, Any]:
    """Train as any rank does; tell which samples were seen in which step, the losses, and the final weights."""
    seen: list[tuple[int, list[int]]] = []
    with ddpcore.Engine(seed=3, log_every="1 epoch", stop_patience_s=stop_patience_s) as engine:
        model = engine.wrap(nn.Sequential(new_model(), nn.Dropout(dropout)) if dropout else new_model(), **wrap_options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average = engine.ema(model, decay=0.9)
        batches = engine.loader(Numbered(), global_batch_size=GLOBAL_BATCH, rank_weights=weights)
        resumed = False
        if directory is not None:
            resumed = engine.checkpoint(directory, every="4 steps", model=model, optimizer=optimizer, average=average)
        for batch in engine.steps(batches, until=until):
            if signal_at == (engine.placement.rank, engine.step):
                os.kill(os.getpid(), signal.SIGTERM)
            share: list[int] = []
            for indices, inputs, targets in batch.micro_batches(num_parts):
                # With a static graph a short share repeats samples, which then count nothing.
                share += [index for index in indices.tolist() if index not in share]
                engine.backward((model(inputs) - targets).square().mean())
            engine.update(optimizer, clip_norm=5.0)
            seen.append((engine.step, share if batch.num_samples else []))
        return {
            "seen": seen,
            "resumed": resumed,
            "step": engine.step,
            "stop": engine.stop_reason,
            "weights": torch.cat([p.detach().flatten() for p in ddpcore.unwrap(model).parameters()]),
            "average": torch.cat([p.detach().flatten() for p in average.parameters()]),
            "evaluation": engine.evaluate(model, Numbered(50), squared_errors, batch_size=4),
        }


def samples_by_step(*runs: list[dict[str, Any]]) -> list[list[int]]:
    """Return the sorted samples of each step, over all ranks, of runs that follow each other."""
    steps: dict[int, list[int]] = {}
    for ranks in runs:
        for rank in ranks:
            for step, share in rank["seen"]:
                steps.setdefault(step, []).extend(share)
    return [sorted(steps[step]) for step in sorted(steps)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, all epochs, no checkpoint: what all others are compared with."""
    result: dict[str, Any] = run_ranks(train, 1, UNTIL, has_group=False)[0]
    return result


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (4, {"num_parts": 3}),
        (3, {"weights": [1, 4, 7], "num_parts": 2}),
        (4, {"weights": [0, 1, 1, 1]}),
        (3, {"weights": [0, 1, 6], "num_parts": 3, "static_graph": True}),
    ],
)
def test_any_number_of_ranks_gives_one_processs_weights(
    alone: dict[str, Any], world_size: int, options: dict[str, Any]
) -> None:
    ranks = run_ranks(train_with, world_size, options, has_group=False)

    assert samples_by_step(ranks) == samples_by_step([alone])
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-12)
        torch.testing.assert_close(rank["average"], alone["average"], rtol=0, atol=1e-12)
        assert rank["evaluation"]["error"] == pytest.approx(alone["evaluation"]["error"], rel=1e-12)


def train_with(options: dict[str, Any]) -> dict[str, Any]:
    return train(UNTIL, **options)


def test_an_epoch_holds_every_sample_once(alone: dict[str, Any]) -> None:
    steps = samples_by_step([alone])
    assert len(steps) == NUM_EPOCHS * STEPS_PER_EPOCH
    for epoch in range(NUM_EPOCHS):
        epoch_steps = steps[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
        assert sorted(index for step in epoch_steps for index in step) == list(range(NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG_S)
def test_a_run_that_stops_twice_and_changes_its_ranks_is_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    alone = run_ranks(train, 1, LONG_UNTIL, has_group=False, timeout_s=LONG_S)[0]
    directory = str(tmp_path / "checkpoints")
    first = run_ranks(train_and_be_stopped, 4, directory, 2, 6, has_group=False, timeout_s=LONG_S)
    second = run_ranks(train_and_be_stopped, 2, directory, 0, 260, has_group=False, timeout_s=LONG_S)
    third = run_ranks(train, 3, LONG_UNTIL, directory, has_group=False, timeout_s=LONG_S)

    assert [rank["stop"] for rank in first + second] == [StopReason.SIGNAL] * 6
    assert len({rank["step"] for rank in first}) == len({rank["step"] for rank in second}) == 1
    assert 6 < first[0]["step"] < second[0]["step"] < third[0]["step"] == LONG_EPOCHS * STEPS_PER_EPOCH
    assert [rank["resumed"] for rank in first + second + third] == [False] * 4 + [True] * 5
    assert samples_by_step(first, second, third) == samples_by_step([alone])
    for rank in third:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-12)
        torch.testing.assert_close(rank["average"], alone["average"], rtol=0, atol=1e-12)


def train_and_be_stopped(directory: str, rank: int, step: int) -> dict[str, Any]:
    # However long the other ranks let this one wait for them.
    return train(LONG_UNTIL, directory, signal_at=(rank, step), stop_patience_s=PATIENCE_S)


def test_at_the_same_world_size_random_numbers_go_on_too(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoints")
    through = run_ranks(train_with_dropout, 2, "12 steps", None, has_group=False)
    run_ranks(train_with_dropout, 2, "7 steps", directory, has_group=False)
    resumed = run_ranks(train_with_dropout, 2, "12 steps", directory, has_group=False)

    assert torch.equal(resumed[0]["weights"], through[0]["weights"])


def train_with_dropout(until: str, directory: str | None) -> dict[str, Any]:
    return train(until, directory, dropout=0.5)


def test_a_finished_run_that_is_started_again_does_nothing(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoints")
    first = run_ranks(train, 2, "5 steps", directory, has_group=False)
    again = run_ranks(train, 2, "5 steps", directory, has_group=False)

    assert again[0]["seen"] == []
    assert torch.equal(again[1]["weights"], first[1]["weights"])


def log_and_evaluate(directory: str) -> list[bool]:
    due = []
    with ddpcore.Engine(log_dir=directory, log_every="4 steps") as engine:
        model = engine.wrap(new_model())
        batches = engine.loader(Numbered(16), global_batch_size=4, shuffle=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in engine.steps(batches, until="2 epochs"):
            for indices, inputs, targets in batch.micro_batches():
                loss = (model(inputs) - targets).square().mean()
                engine.backward(loss)
                engine.log(loss=loss, index=indices.double().mean())
            engine.update(optimizer)
            due.append(engine.is_due("1 epoch"))
            if engine.is_due("1 epoch"):
                # One sample and two ranks: one of them evaluates nothing.
                engine.log(**engine.evaluate(model, Numbered(1), squared_errors, batch_size=8))
    return due


def test_metrics_are_means_over_samples_steps_and_ranks(tmp_path: Path) -> None:
    due = run_ranks(log_and_evaluate, 2, str(tmp_path), has_group=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert due == [[False, False, False, True] * 2] * 2
    assert [line["step"] for line in lines] == [4, 8]
    assert [line["index"] for line in lines] == [pytest.approx(sum(range(16)) / 16)] * 2
    assert 0 < lines[0]["goodput_frac"] <= 1
    assert lines[0]["error"] == lines[1]["error"] > 0
    scalars = read_tensorboard(tmp_path)
    assert [value for _, value in scalars["loss"]] == [pytest.approx(line["loss"], rel=1e-6) for line in lines]


def read_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped] # noqa: PLC0415 - slow
        EventAccumulator,
    )

    board = EventAccumulator(str(directory))
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def stop_by_deadline() -> tuple[int, StopReason]:
    with ddpcore.Engine(deadline=0.0) as engine:
        model = engine.wrap(new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in engine.steps(engine.loader(Numbered(), global_batch_size=4), until="1000 epochs"):
            for _, inputs, _ in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
        return engine.step, engine.stop_reason


def test_a_deadline_that_is_over_stops_after_the_first_steps() -> None:
    stops = run_ranks(stop_by_deadline, 2, has_group=False)
    assert stops == [(stops[0][0], StopReason.DEADLINE)] * 2
    assert stops[0][0] <= 3


# ---- bad input: one clear error on every rank


def errors(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes]


def set_up_badly(engine: ddpcore.Engine, model: nn.Module, how: str, directory: str) -> None:
    if how == "nothing to save":
        engine.checkpoint(directory, every="1 step")
    if how == "unsavable":
        engine.checkpoint(directory, every="1 step", model=object())  # type: ignore[arg-type] # that is the point
    if how == "reserved name":
        engine.checkpoint(directory, every="1 step", engine=model)
    if how == "loader twice":
        engine.loader(Numbered(), global_batch_size=GLOBAL_BATCH)
    if how == "two orders":
        order = SequentialOrder(NUM_SAMPLES)
        engine.loader(Numbered(), global_batch_size=GLOBAL_BATCH, order=order, shuffle=False, name="other")
    if how == "checkpoint twice":
        for _ in range(2):
            engine.checkpoint(directory, every="1 step", model=model)


def use_badly(how: str, directory: str) -> None:
    with ddpcore.Engine(
        precision="fp8" if how == "precision" else "fp32",
        log_every="10 min" if how == "log_every" else "1 step",
        log_dir=f"{directory}/file/inside" if how == "log_dir" else None,
    ) as engine:
        model = engine.wrap(new_model())
        size = {"no samples": 0, "fewer samples than ranks": 1}.get(how, NUM_SAMPLES)
        batches = engine.loader(Numbered(size), global_batch_size=GLOBAL_BATCH)
        set_up_badly(engine, model, how, directory)
        if how == "backward outside":
            engine.backward(torch.ones(()))
        for batch in engine.steps(batches, until="soon" if how == "until" else "2 steps"):
            for _, inputs, _ in batch.micro_batches():
                outputs = model(inputs)
                engine.backward(outputs if how == "no mean" else outputs.mean())
            if how == "checkpoint late":
                engine.checkpoint(directory, every="1 step", model=model)
            if how == "a vector":
                engine.log(loss=torch.ones(3))
            engine.log(**{f"loss{engine.placement.rank}" if how == "metrics" else "loss": 1.0})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("precision", "EngineUseError: no precision is called 'fp8': use one of fp32, bf16, fp16"),
        ("log_every", "CadenceError: '10 min' is no cadence: write it like '100 steps' or '1 epoch'"),
        ("log_dir", "EngineUseError: rank 0: metrics cannot be written to"),
        ("until", "CadenceError: 'soon' is no cadence"),
        ("nothing to save", "EngineUseError: a checkpoint of nothing"),
        ("unsavable", "EngineUseError: model cannot be saved: it has no state_dict"),
        ("reserved name", "EngineUseError: 'engine' is the name of the engine's own part"),
        ("loader twice", "EngineUseError: there is a part called 'batches train' already"),
        ("two orders", "EngineUseError: order and shuffle=False are two orders"),
        ("checkpoint twice", "EngineUseError: checkpoint was called before"),
        ("checkpoint late", "EngineUseError: checkpoint comes too late"),
        ("backward outside", "EngineUseError: backward outside of a micro-batch"),
        (
            "no mean",
            "EngineUseError: backward wants the mean loss of a micro-batch, this one is torch.float64 of shape (6, 1)",
        ),
        ("a vector", "EngineUseError: loss was logged with shape (3,): log one number"),
        ("metrics", "MetricMismatchError: rank 0 has logged loss0 and other ranks have not"),
        ("no samples", "SamplerArgumentError: "),
        ("fewer samples than ranks", "SamplerArgumentError: "),
    ],
)
def test_wrong_use_is_one_clear_error_on_every_rank(how: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for error in errors(list(try_ranks(use_badly, 2, how, str(tmp_path), has_group=False))):
        assert error.startswith(message)


def resume_other(directory: str, what: str) -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(5, 1).double() if what == "model" else new_model())
        size = NUM_SAMPLES + 1 if what == "data" else NUM_SAMPLES
        batches = engine.loader(Numbered(size), global_batch_size=GLOBAL_BATCH)
        engine.checkpoint(directory, every="1 step", model=model)
        for _ in engine.steps(batches, until="30 steps"):
            raise AssertionError("a step of a run that cannot be resumed")


@pytest.mark.parametrize(("what", "error"), [("model", "CheckpointMismatchError"), ("data", "SamplerStateError")])
def test_a_checkpoint_of_something_else_is_refused_on_every_rank(what: str, error: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoints")
    run_ranks(train_and_save_model, 2, directory, has_group=False)
    for outcome in try_ranks(resume_other, 2, directory, what, has_group=False):
        assert outcome.error.startswith(error)


def train_and_save_model(directory: str) -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = engine.loader(Numbered(), global_batch_size=GLOBAL_BATCH)
        engine.checkpoint(directory, every="1 step", model=model)
        for batch in engine.steps(batches, until="2 steps"):
            for _, inputs, _ in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)


def fail_on_one_rank() -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(new_model())
        for batch in engine.steps(engine.loader(Numbered(), global_batch_size=GLOBAL_BATCH), until="1 epoch"):
            if engine.placement.rank == 1 and engine.step == 2:
                raise ZeroDivisionError("my own bug")
            for _, inputs, _ in batch.micro_batches():
                engine.backward(model(inputs).mean())


def test_a_rank_that_fails_leaves_at_once_with_its_own_error() -> None:
    with WarmRanks(fail_on_one_rank, 2, has_group=False) as ranks:
        assert ranks.status(1) == 0
        survivor, failed = ranks.outcomes()
    assert failed.error == "ZeroDivisionError: my own bug"
    assert survivor.error.startswith(
        "RankFailedError: rank 1 has raised ZeroDivisionError in step 3 at test_engine.py:"
    )


def train_in_bf16(precision: str) -> tuple[float, float]:
    losses = []
    with ddpcore.Engine(precision=precision) as engine:
        model = engine.wrap(nn.Linear(5, 1))
        data = TensorDataset(torch.arange(NUM_SAMPLES), Numbered().inputs.float(), Numbered().targets.float())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        for batch in engine.steps(engine.loader(data, global_batch_size=GLOBAL_BATCH), until="5 epochs"):
            for _, inputs, targets in batch.micro_batches(2):
                with engine.autocast():
                    loss = (model(inputs) - targets).square().mean()
                engine.backward(loss)
                losses.append(loss.item())
            engine.update(optimizer, clip_norm=1e3)
    return sum(losses[:5]), sum(losses[-5:])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_too(precision: str) -> None:
    first, last = run_ranks(train_in_bf16, 2, precision, has_group=False)[0]
    assert last < first / 2
