"""The best checkpoints stay, and training stops when they become no better: on all ranks, over attempts and kills."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.checkpoint import Checkpointer
from ddpcore.engine.stop_agreement import StopReason
from ddpcore.errors import CheckpointInvalidError, EngineUseError
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DATA = TensorDataset(torch.ones(64, 1))


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in directory.glob("step_*"))


def train(directory: str, curve: Sequence[float], until: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a weight that counts steps, measured by a curve: `val[n - 1]` in step n, NaN where nothing is measured."""
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        counter = nn.Linear(1, 1, bias=False)
        if "patience" in options:
            engine.early_stopping("val", patience=options["patience"], mode=options.get("mode", "min"))
        engine.checkpoint(
            directory,
            every=options.get("every", "100 steps"),
            keep_last=1,
            keep_best=options.get("keep_best", 2),
            metric="val",
            mode=options.get("mode", "min"),
            resume=options.get("resume", True),
            model=model,
            counter=counter,
        )
        for batch in engine.steps(engine.loader(DATA, global_batch_size=8), until=until):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            nn.init.constant_(counter.weight, engine.step + 1)
            if not math.isnan(curve[engine.step]):
                engine.log(val=curve[engine.step] + options.get("spread", 0.0) * (engine.placement.rank - 0.5))
        last = engine.step
        best = engine.load_best()
        return {"step": last, "stop": engine.stop_reason, "best": best, "counter": counter.weight.item()}


NONE = math.nan
CURVE = [9.0, NONE, 5.0, 7.0, NONE, 3.0, 4.0, 8.0, 6.0, NONE]


@pytest.mark.parametrize(
    ("world_size", "options", "left", "best"),
    [
        (1, {}, [6, 7, 10], 6),
        (2, {"spread": 0.5}, [6, 7, 10], 6),
        (2, {"mode": "max", "keep_best": 1}, [1, 10], 1),
        (2, {"every": "2 steps", "keep_best": 3}, [3, 6, 7, 10], 6),
    ],
)
def test_the_best_stay_beside_the_newest_and_are_loaded_again(
    tmp_path: Path, world_size: int, options: dict[str, Any], left: list[int], best: int
) -> None:
    ranks = run_ranks(train, world_size, str(tmp_path), CURVE, "10 steps", options, has_group=False)

    assert steps_in(tmp_path) == left
    assert ranks == [{"step": 10, "stop": StopReason.NONE, "best": best, "counter": best}] * world_size


def test_the_best_of_earlier_attempts_stay_too(tmp_path: Path) -> None:
    ranks: list[dict[str, Any]] = []
    for until in ("4 steps", "6 steps", "10 steps"):
        ranks = run_ranks(train, 2, str(tmp_path), CURVE, until, {}, has_group=False)

    assert steps_in(tmp_path) == [6, 7, 10]
    assert ranks[0]["best"] == 6
    listing = subprocess.run(
        [sys.executable, "-m", "ddpcore.checkpoint", "ls", "--json", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(listing.stdout)["checkpoints"]
    assert {row["step"]: row["metrics"] for row in rows} == {10: {}, 7: {"val": 4.0}, 6: {"val": 3.0}}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_of_a_training_before_this_one_do_not_count(tmp_path: Path, world_size: int) -> None:
    better = [value - 100.0 for value in CURVE]
    run_ranks(train, world_size, str(tmp_path), better, "10 steps", {"every": "1 step"}, has_group=False)
    assert steps_in(tmp_path) == [6, 7, 10]

    anew = {"resume": False}
    ranks = run_ranks(train, world_size, str(tmp_path), CURVE, "4 steps", anew, has_group=False)
    assert (ranks[0]["best"], steps_in(tmp_path)) == (3, [3, 4])

    # A run that goes on with the second training does not count the first one's either.
    ranks = run_ranks(train, world_size, str(tmp_path), CURVE, "9 steps", {}, has_group=False)
    assert (ranks[0]["best"], steps_in(tmp_path)) == (6, [6, 7, 9])
    assert ddpcore.load_checkpoint(tmp_path, metric="val").step == 6


def test_whoever_only_reads_gets_the_best_of_the_newest_training(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with Checkpointer(tmp_path, keep_best=1, metric="val") as checkpointer:
            for step in (int(value), 10 + int(value)):
                assert checkpointer.would_keep({"val": value + step}) is (step < 10)
                checkpointer.save(step, {"a": value}, metrics={"val": value + step})

    with Checkpointer(tmp_path, keep_best=1, metric="val") as checkpointer:
        best = checkpointer.load_best()
    assert best is not None
    assert (best.step, best.state) == (2, {"a": 2.0})
    assert ddpcore.load_checkpoint(tmp_path, metric="val").step == 2
    assert ddpcore.load_checkpoint(tmp_path, metric="val", mode="max").step == 12


def test_training_stops_when_the_metric_improves_no_more(tmp_path: Path) -> None:
    options = {"patience": 2, "spread": 1.0}
    ranks = run_ranks(train, 2, str(tmp_path), CURVE, "10 steps", options, has_group=False)
    again = run_ranks(train, 2, str(tmp_path), CURVE, "10 steps", options, has_group=False)

    # 9, 5, 7, 3: better; 4 and 8 are not.
    assert [(rank["step"], rank["stop"], rank["best"]) for rank in ranks] == [(8, StopReason.EARLY, 6)] * 2
    assert again == ranks


def test_the_count_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    (first,) = run_ranks(train, 1, str(tmp_path), CURVE, "7 steps", {"patience": 2}, has_group=False)
    (second,) = run_ranks(train, 1, str(tmp_path), CURVE, "10 steps", {"patience": 2}, has_group=False)

    assert (first["step"], first["stop"]) == (7, StopReason.NONE)
    assert (second["step"], second["stop"]) == (8, StopReason.EARLY)


def log_on_one_rank() -> None:
    with ddpcore.Engine(timeout_s=15.0) as engine:
        engine.early_stopping("val", patience=1)
        for _ in engine.steps(engine.loader(DATA, global_batch_size=8), until="3 steps"):
            if engine.is_first:
                engine.log(val=1.0)


def test_a_rank_that_does_not_log_the_metric_is_named() -> None:
    outcome = try_ranks(log_on_one_rank, 2, has_group=False)[0]
    assert "exchange 'engine.log(val=...)'" in outcome.error
    assert "rank 1" in outcome.error


def train_epoch_by_epoch(directory: str, *, is_between: bool) -> tuple[int, int]:
    """Train two epochs in a loop each, with a metric behind each loop, or in its last step."""
    with ddpcore.Engine() as engine:
        counter = nn.Linear(1, 1, bias=False)
        engine.checkpoint(directory, every="1 epoch", keep_best=1, metric="val", counter=counter)
        batches = engine.loader(DATA, global_batch_size=16)
        engine.log(val=0.0)
        for epoch in range(2):
            for _ in engine.steps(batches, until=f"{epoch + 1} epochs"):
                nn.init.constant_(counter.weight, engine.step + 1)
                if not is_between and engine.is_due("1 epoch"):
                    engine.log(val=float(epoch + 1))
            if is_between:
                engine.log(val=float(epoch + 1))
        return engine.load_best(), int(counter.weight.item())


def test_what_is_measured_between_two_loops_is_not_taken_for_the_next_steps(tmp_path: Path) -> None:
    assert train_epoch_by_epoch(str(tmp_path / "within"), is_between=False) == (4, 4)
    with pytest.raises(EngineUseError, match=r"val was logged after the last finished step: log it in the step"):
        train_epoch_by_epoch(str(tmp_path / "between"), is_between=True)


def log_what_diverges(directory: str) -> tuple[StopReason, int]:
    """Log two metrics, in another order on each rank: one of no finite mean, one too large to be kept."""
    with ddpcore.Engine() as engine:
        rank = engine.placement.rank
        engine.early_stopping("odd", patience=3)
        engine.checkpoint(
            directory, every="100 steps", keep_best=1, metric="huge", mode="max", counter=nn.Linear(1, 1, bias=False)
        )
        for _ in engine.steps(engine.loader(DATA, global_batch_size=8), until="5 steps"):
            values = {"odd": math.inf if rank else -math.inf, "huge": 1e302 if engine.step else 2.0}
            engine.log(**dict(sorted(values.items(), reverse=bool(rank))))
        return engine.stop_reason, engine.load_best()


def test_metrics_of_a_training_that_diverges_end_it_as_nan_would(tmp_path: Path) -> None:
    # Neither is better than anything; what was finite in the first step stays the best.
    outcome = (StopReason.EARLY, 1)
    assert run_ranks(log_what_diverges, 2, str(tmp_path), has_group=False) == [outcome] * 2


def test_what_is_called_without_sense_is_said(tmp_path: Path) -> None:
    with ddpcore.Engine() as engine:
        with pytest.raises(EngineUseError, match="load_best without checkpoints"):
            engine.load_best()
        with pytest.raises(Exception, match="keep_best and metric go together"):
            engine.checkpoint(tmp_path, every="1 step", keep_best=2, model=nn.Linear(1, 1))
        engine.checkpoint(tmp_path, every="1 step", keep_best=2, metric="val", model=nn.Linear(1, 1))
        with pytest.raises(EngineUseError, match="no checkpoint with the metric yet"):
            engine.load_best()
        engine.early_stopping("val", patience=1)
        with pytest.raises(EngineUseError, match="there is a part called 'early stopping val' already"):
            engine.early_stopping("val", patience=2)


def test_a_damaged_best_one_is_passed_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1, keep_best=2, metric="val") as checkpointer:
        for step, value in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            checkpointer.save(step, {"a": torch.full((8,), float(step))}, metrics={"val": value})
        checkpointer.wait()
        file = tmp_path / "step_00000002" / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        best = checkpointer.load_best()
        assert best is not None
        assert (best.step, best.state["a"][0]) == (3, 3.0)
        assert "step 2" in best.skipped[0] or "step_00000002" in best.skipped[0]
        for name in ("step_00000003", "step_00000004"):
            (tmp_path / name / "rank-00000.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointInvalidError, match="no checkpoint with val is sound"):
            checkpointer.load_best()


# ---- kill -9 at any moment


def save_until_killed(directory: str) -> None:
    checkpointer = Checkpointer(directory, keep_last=2, keep_best=3, metric="val")
    loaded = checkpointer.load_latest()
    step = loaded.step if loaded else 0
    while True:
        step += 1
        checkpointer.save(step, {"a": torch.full((1000,), float(step))}, metrics={"val": value_of(step)})


def value_of(step: int) -> float:
    """A metric that looks like noise, lowest of all where nobody expects it."""
    return float(step * 7919 % 1009)


def wait_for_step(directory: Path, step: int) -> None:
    deadline_s = time.monotonic() + 60.0
    while max(steps_in(directory), default=0) < step:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def expected_steps(newest: int) -> set[int]:
    best = sorted(range(1, newest + 1), key=lambda step: (value_of(step), step))[:3]
    return {*best, newest, newest - 1} - {0}


@pytest.mark.parametrize("num_rounds", [4, pytest.param(100, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])])
def test_no_kill_ever_costs_one_of_the_best(tmp_path: Path, num_rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    newest = 0
    for number in range(num_rounds):
        with WarmRanks(save_until_killed, 1 + number % 2, str(tmp_path)) as ranks:
            wait_for_step(tmp_path, newest + 1 + int(torch.randint(3, (), generator=generator)))
            time.sleep(0.02 * float(torch.rand((), generator=generator)))  # when the kill comes is what is tried here
            for rank in range(len(ranks.pids)):
                ranks.kill(rank)
        # The writer may finish what it has; opening waits for it.
        with Checkpointer(tmp_path, keep_last=2, keep_best=3, metric="val") as checkpointer:
            latest = checkpointer.load_latest()
            present = set(steps_in(tmp_path))
            newest_now = latest.step if latest is not None else 0
            assert newest_now >= newest
            newest = newest_now
            assert expected_steps(newest) <= present
            for step in expected_steps(newest):
                assert checkpointer.load(step).state["a"][0] == step
            if best := checkpointer.load_best():
                assert value_of(best.step) == min(value_of(step) for step in range(1, newest + 1))
    assert newest >= num_rounds
