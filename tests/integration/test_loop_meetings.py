"""Ranks that leave a loop alone, or fail in it, are named on every rank, soon and without torch's "closed by peer"."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import ddpcore
from ddpcore.errors import EngineUseError
from tests.support.meeting import FREE, free_port
from tests.support.warm_ranks import run_ranks, try_ranks

AT_STEP = 4
"""Where a rank leaves a loop or fails, if nothing else is meant."""
SOON_S = 60.0
"""Far below the group's time-out of 30 minutes; the ranks need five seconds on cores of their own."""


class OutOfLuckError(Exception):
    """What a program of a user raises."""


def misbehave(how: str) -> None:
    match how:
        case "raise":
            raise OutOfLuckError("no such sample\nand more")
        case "runtime error":
            raise RuntimeError("shape '[3]' is invalid")
        case "exit":
            sys.exit(3)
        case "exit well":
            sys.exit(0)
        case "end":
            raise StopIteration
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    how: str, ranks: list[int], until: list[str], moment: str = "before", directory: str = "", at_step: int = AT_STEP
) -> tuple[int, str]:
    """Train; the ranks named do something else in one step, before or after its collectives."""
    with ddpcore.Engine(seed=1) as engine:
        rank = engine.placement.rank
        model = engine.wrap(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)) if "norm" in how else nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.ones(192, 2)), global_batch_size=12)
        if directory:
            engine.checkpoint(directory, every="1 step", model=model)
        for batch in engine.steps(batches, until=until[rank % len(until)]):
            is_mine = rank in ranks and engine.step == at_step - 1
            if is_mine and moment == "before":
                misbehave(how)
                if "break" in how:
                    break
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            if is_mine and moment == "after":
                misbehave(how)
                if "break" in how:
                    break
        return engine.step, str(engine.stop_reason)


def train_and_time(how: str, ranks: list[int], moment: str, directory: str = "") -> float:
    began_s = time.monotonic()
    try:
        train(how, ranks, ["8 steps"], moment, directory)
    finally:
        elapsed_s = time.monotonic() - began_s
        assert elapsed_s < SOON_S
    return elapsed_s


def test_until_that_differs_is_one_error_on_every_rank() -> None:
    outcomes = try_ranks(train, 3, "", [], ["8 steps", "8 steps", "9 steps"], has_group=False)

    for outcome in outcomes:
        assert outcome.error == (
            "EngineUseError: the ranks would not train for the same steps: until is 9 steps on rank 2, "
            "8 steps on ranks 0-1"
        )


def test_until_that_only_one_rank_gives_wrongly_is_one_error_on_every_rank() -> None:
    for outcome in try_ranks(train, 2, "", [], ["8 steps", "soon"], has_group=False):
        assert outcome.error.startswith(
            "EngineUseError: the ranks would not train for the same steps: rank 1: 'soon' is no cadence"
        )


def test_the_same_until_in_other_words_is_the_same() -> None:
    assert run_ranks(train, 2, "", [], ["1 epoch", " 1 epochs"], has_group=False) == [(16, "none")] * 2


@pytest.mark.parametrize("how", ["break", pytest.param("break, with batch norm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_breaks_out_alone_is_named_on_every_rank(how: str, moment: str, rank: int) -> None:
    outcomes = try_ranks(train_and_time, 3, how, [rank], moment, has_group=False, timeout_s=40)

    left = f"left engine.steps in step 4 at {__file__.rpartition('/')[2]}:"
    assert outcomes[rank].error.startswith(f"EngineUseError: this rank {left}")
    for number, outcome in enumerate(outcomes):
        if number != rank:
            assert outcome.error.startswith(f"RankFailedError: rank {rank} has raised EngineUseError"), outcome.error
            assert left in outcome.error


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(2, "break"), (2, "break, with batch norm"), pytest.param(4, "break", marks=pytest.mark.slow)],
)
def test_a_rank_that_breaks_out_is_named_where_the_others_stand_in_broadcasts_only(num_ranks: int, how: str) -> None:
    # In its second step DDP broadcasts the order of its buckets, and before each forward what batch norm keeps. The
    # source waits too.
    outcomes = try_ranks(train, num_ranks, how, [1], ["8 steps"], "before", "", 2, has_group=False, timeout_s=20)

    assert outcomes[1].error.startswith("EngineUseError: this rank left engine.steps in step 2 at ")
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.error.startswith("RankFailedError: rank 1 has raised EngineUseError"), outcome.error


def test_ranks_that_all_break_out_in_the_same_step_may() -> None:
    # The step that they have left is not finished.
    assert run_ranks(train, 3, "break", [0, 1, 2], ["8 steps"], "after", has_group=False) == [(3, "none")] * 3


STEPS = {"second": 2, "last": 4}


def train_held(how: str) -> int:
    """Leave a loop that a variable holds, as a progress bar would: `break` alone does not end it."""
    with ddpcore.Engine() as engine:
        is_mine = engine.placement.rank == (0 if how == "second" else 1) or how == "all"
        batches = engine.loader(TensorDataset(torch.ones(16, 2)), global_batch_size=4)
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        held = engine.steps(batches, until="4 steps")
        for batch in held:
            if is_mine and engine.step + 1 == STEPS.get(how, 3):
                break
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
        if how == "again":
            for _ in engine.steps(batches, until="4 steps"):
                pass
        return engine.step


@pytest.mark.parametrize("how", ["second", "third", "last", "again"])
def test_a_rank_that_leaves_a_loop_which_it_holds_is_named_on_every_rank(how: str) -> None:
    outcomes = try_ranks(train_held, 2, how, has_group=False, timeout_s=40)

    for outcome in outcomes:
        assert f"left engine.steps in step {STEPS.get(how, 3)} at test_loop_meetings.py:" in outcome.error
    assert outcomes[0 if how == "second" else 1].error.startswith("EngineUseError: ")


def test_ranks_that_all_leave_a_loop_which_they_hold_may() -> None:
    assert run_ranks(train_held, 2, "all", has_group=False) == [2, 2]


def test_a_loop_that_another_one_has_ended_does_not_end_in_silence() -> None:
    with ddpcore.Engine() as engine:
        batches = engine.loader(TensorDataset(torch.ones(16, 2)), global_batch_size=4)
        steps = engine.steps(batches, until="4 steps")
        next(steps)
        for _ in engine.steps(batches, until="2 steps"):
            pass
        with pytest.raises(EngineUseError, match="goes on after another one has begun"):
            next(steps)


def break_in_the_last_step() -> None:
    with ddpcore.Engine() as engine:
        batches = engine.loader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
        for _ in engine.steps(batches, until="2 steps"):
            if engine.placement.rank == 1 and engine.step == 1:
                break


def test_a_rank_that_breaks_out_where_the_others_end_is_named_on_every_rank() -> None:
    for outcome in try_ranks(break_in_the_last_step, 2, has_group=False):
        assert outcome.error.startswith(
            "EngineUseError: the ranks have not ended engine.steps together: rank 0 came to"
        )
        assert "rank 1 left engine.steps in step 2 at test_loop_meetings.py:" in outcome.error


def leave_out(how: str, directory: str) -> tuple[int, list[float]]:
    """Leave a call of the engine out in one step, on the second rank alone or on all."""
    torch.manual_seed(3)
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)) if "norm" in how else nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.randn(192, 2)), global_batch_size=24)
        if "saving" in how:
            engine.checkpoint(directory, every="1 step", model=model)
        for batch in engine.steps(batches, until="8 steps"):
            at_step = 8 if "at the end" in how else AT_STEP
            is_mine = engine.step == at_step - 1 and (engine.placement.rank == 1 or "on all" in how)
            if "slow" in how:
                time.sleep(0.4)
            for number, (inputs,) in enumerate(batch.micro_batches(1 if "only backward" in how else 4)):
                if is_mine and "backward" in how and "nothing" not in how and number == ("last" in how) * 3:
                    continue
                if is_mine and "of its own" in how:
                    (0 * model(inputs).mean()).backward()
                else:
                    engine.backward(model(inputs).mean())
            if is_mine and "gradients" in how:
                optimizer.zero_grad()
            for _ in range((2 if "second" in how else int("update" not in how)) if is_mine else 1):
                engine.update(optimizer)
            if "slow" in how:
                (Path(directory) / f"{engine.placement.rank}").write_text(str(engine.step))
        return engine.step, [one for parameter in model.parameters() for one in parameter.flatten().tolist()]


@pytest.mark.parametrize("how", ["update, slow", "update, at the end", "update, saving", "gradients, slow"])
def test_a_rank_that_leaves_out_an_update_alone_is_named_on_every_rank(how: str, tmp_path: Path) -> None:
    outcomes = try_ranks(leave_out, 3, how, str(tmp_path), has_group=False)

    number = r"(\d) on rank 1, (\d) on ranks 0, 2"
    for outcome in outcomes:
        found = re.fullmatch(
            "EngineUseError: the ranks go on with different weights: the number of calls of engine.update with "
            f"gradients is {number}. Call it on every rank, in the same steps",
            outcome.error,
        )
        assert found, outcome.error
        assert int(found[1]) + 1 == int(found[2])
        assert found[2] == {"update, at the end": "8", "update, saving": "4"}.get(how, found[2])
    if "slow" in how:
        # In the middle of the loop, from what is agreed on anyway.
        assert AT_STEP <= int((tmp_path / "0").read_text()) < 7
    if "saving" in how:
        assert max(path.name for path in tmp_path.glob("step_*")) == "step_00000003"


@pytest.mark.parametrize(
    "how", ["the only backward", "the only backward, update", "the only backward, with batch norm"]
)
def test_a_rank_that_leaves_out_the_last_backward_alone_is_named_on_every_rank(how: str, tmp_path: Path) -> None:
    outcomes = try_ranks(leave_out, 3, how, str(tmp_path), has_group=False, timeout_s=40)

    own = "did not call engine.backward in the last micro-batch of step 4 (it did in 0 of 1), for which others wait"
    assert outcomes[1].error.startswith(f"EngineUseError: this rank {own}")
    for outcome in (outcomes[0], outcomes[2]):
        assert re.match("RankFailedError: rank 1 has raised EngineUseError .*: this rank ", outcome.error)
        assert own in outcome.error


def test_an_update_without_the_last_backward_says_how_many_were_called(tmp_path: Path) -> None:
    outcomes = try_ranks(leave_out, 2, "the last backward", str(tmp_path), has_group=False)

    own = "update before the last micro-batch: this rank has called backward in 3 of 4 so far"
    assert outcomes[1].error.startswith(f"EngineUseError: {own}")
    assert outcomes[0].error.startswith("RankFailedError: rank 1 has raised EngineUseError in step 4 at ")
    assert own in outcomes[0].error


@pytest.mark.parametrize("how", ["update", "the only backward", "the only backward, update"])
def test_what_all_ranks_leave_out_may_be_left_out(how: str, tmp_path: Path) -> None:
    (first, second) = run_ranks(leave_out, 2, f"{how}, on all, saving", str(tmp_path), has_group=False)

    assert first == second
    assert first[0] == 8


@pytest.mark.parametrize("how", ["nothing but a backward of its own", "nothing but a second update"])
def test_what_changes_no_weight_may_differ_between_ranks(how: str, tmp_path: Path) -> None:
    first, second = run_ranks(leave_out, 2, how, str(tmp_path), has_group=False)

    assert first == second


def wait_for_each_other() -> None:
    with ddpcore.open_process_group() as group:
        if group.placement.rank == 1:
            ddpcore.barrier("of one rank")
        torch.distributed.all_reduce(torch.ones(3))


def test_ranks_that_wait_for_one_that_gives_up_have_its_reason() -> None:
    outcomes = try_ranks(wait_for_each_other, 3, has_group=False)

    own = "barrier 'of one rank' can never be passed: each of ranks 0, 2 waits in all_reduce"
    assert outcomes[1].error.startswith(f"BarrierDeadlockError: {own}")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("RankFailedError: rank 1 has raised BarrierDeadlockError at "), outcome.error
        assert own in outcome.error


FAILURES: dict[str, tuple[str, str]] = {
    "raise": ("OutOfLuckError: no such sample", "has raised OutOfLuckError in step 4 at test_loop_meetings.py:"),
    "runtime error": ("RuntimeError: shape", "has raised RuntimeError in step 4 at test_loop_meetings.py:"),
    "exit": ("SystemExit: 3", "has raised SystemExit in step 4 at test_loop_meetings.py:"),
    "exit well": ("SystemExit: 0", "has raised SystemExit in step 4 at test_loop_meetings.py:"),
    "killed": ("", "has died without an exception, as by a signal"),
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_in_a_step_is_named_by_the_others(how: str, moment: str) -> None:
    outcomes = try_ranks(train_and_time, 3, how, [1], moment, has_group=False)

    own, others = FAILURES[how]
    assert outcomes[1].error.startswith(own)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith(f"RankFailedError: rank 1 {others}"), outcome.error
        assert "GLHF" not in outcome.error
        assert ("on rank 1:\nTraceback" in outcome.trace) == (how != "killed")


class Brittle(Dataset[torch.Tensor]):
    """A data set most of which cannot be read, on the second rank or in its workers."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 16 and os.environ["RANK"] == "1":
            misbehave(self.how)
        return torch.ones(2)


def read_samples(how: str, num_workers: int, is_evaluated: bool) -> None:
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Linear(2, 1))
        data = Brittle(how)
        if is_evaluated:
            engine.evaluate(
                model, data, lambda module, batch: {"a": module(batch)[:, 0]}, batch_size=6, num_workers=num_workers
            )
        batches = engine.loader(data, global_batch_size=12, shuffle=False, num_workers=num_workers)
        for batch in engine.steps(batches, until="8 steps"):
            for inputs in batch.micro_batches(2):
                engine.backward(model(inputs).mean())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize(
    ("how", "own"),
    [("raise", "OutOfLuckError: no such sample"), ("end", "EngineUseError: the data set has ended after ")],
)
def test_a_rank_that_cannot_read_a_sample_is_named_with_its_reason(
    how: str, own: str, num_workers: int, *, is_evaluated: bool
) -> None:
    outcomes = try_ranks(read_samples, 2, how, num_workers, is_evaluated, has_group=False, timeout_s=40)

    kind, _, message = own.partition(": ")
    assert outcomes[1].error.startswith(f"{kind}: ")
    assert re.match(f"(RankFailedError|BarrierDeadlockError): .*rank 1 has raised {kind} ", outcomes[0].error)
    assert message in outcomes[0].error


def gather_in_a_step(how: str) -> None:
    with ddpcore.Engine() as engine:
        for _ in engine.steps(engine.loader(TensorDataset(torch.ones(24, 2)), global_batch_size=6), until="6 steps"):
            if engine.placement.rank == 1 and engine.step == AT_STEP - 1:
                misbehave(how)
            engine.gather(1.0)


@pytest.mark.parametrize("how", ["raise", "exit", "killed"])
def test_ranks_that_wait_at_a_gate_for_one_that_has_failed_have_its_reason(how: str) -> None:
    outcomes = try_ranks(gather_in_a_step, 3, how, has_group=False)

    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith(
            "BarrierDeadlockError: exchange 'engine.gather' can never be passed: rank 1 has "
        )
        assert (FAILURES[how][1] in outcome.trace) == (how != "killed"), outcome.trace


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("how", ["raise", "killed"])
def test_a_rank_that_fails_is_named_also_where_checkpoints_are_being_written(
    how: str, moment: str, tmp_path: Path
) -> None:
    outcomes = try_ranks(train_and_time, 2, how, [1], moment, str(tmp_path), has_group=False)

    assert outcomes[0].error.startswith(f"RankFailedError: rank 1 {FAILURES[how][1]}"), outcomes[0].error


def reduce_in_own_loop(how: str) -> Any:
    with ddpcore.open_process_group() as group:
        for step in range(6):
            if group.placement.rank == 1 and step == AT_STEP:
                misbehave(how)
            torch.distributed.all_reduce(torch.ones(3))


@pytest.mark.parametrize("how", ["raise", "killed"])
def test_a_rank_that_fails_is_named_without_the_engine_too(how: str) -> None:
    outcomes = try_ranks(reduce_in_own_loop, 3, how, has_group=False)

    others = FAILURES[how][1].replace(" in step 4", "")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith(f"RankFailedError: rank 1 {others}"), outcome.error


@pytest.mark.parametrize("how", ["killed", "raise"])
def test_ranks_whose_store_dies_with_rank_0_say_so_in_seconds(how: str) -> None:
    # Without torchrun rank 0 hosts the store: the others' notice of what has happened lies there.
    env = {**FREE, "MASTER_PORT": str(free_port())}
    outcomes = try_ranks(train, 3, how, [0], ["8 steps"], has_group=False, env=env, timeout_s=60)

    for outcome in outcomes[1:]:
        assert re.match("(RankFailedError|StoreLostError): .*rank 0", outcome.error), outcome.error
        assert how == "killed" or "rank 0 has raised OutOfLuckError in step 4" in outcome.error


@pytest.mark.parametrize("how", ["break", "raise", "killed"])
def test_the_host_of_the_store_stays_until_the_others_know_who_has_failed(how: str) -> None:
    env = {**FREE, "MASTER_PORT": str(free_port())}
    outcomes = try_ranks(train, 3, how, [2], ["8 steps"], "before", "", 2, has_group=False, env=env, timeout_s=60)

    for outcome in outcomes[:2]:
        assert outcome.error.startswith("RankFailedError: rank 2 has "), outcome.error


def fail_everywhere() -> None:
    with ddpcore.Engine() as engine:
        for _ in engine.steps(engine.loader(TensorDataset(torch.ones(8, 2)), global_batch_size=4), until="2 steps"):
            raise OutOfLuckError(f"of rank {engine.placement.rank}")


def test_ranks_that_all_fail_keep_their_own_errors() -> None:
    errors = [outcome.error for outcome in try_ranks(fail_everywhere, 3, has_group=False)]

    assert errors == [f"OutOfLuckError: of rank {rank}" for rank in range(3)]


LEFT_AFTER = 3


def train_without_collectives(_how: str) -> int:
    """Leave a loop on one rank, in whose steps the ranks meet nowhere but in the engine's own agreement."""
    with ddpcore.Engine() as engine:
        batches = engine.loader(TensorDataset(torch.ones(40, 2)), global_batch_size=4)
        for batch in engine.steps(batches, until="10 steps"):
            if engine.placement.rank == 1 and engine.step == LEFT_AFTER:
                break
            for (inputs,) in batch.micro_batches():
                inputs.sum()
        return engine.step


def test_a_rank_that_leaves_a_loop_without_collectives_is_named_on_every_rank() -> None:
    outcomes = try_ranks(train_without_collectives, 2, "", has_group=False, timeout_s=40)

    left = f"left engine.steps in step {LEFT_AFTER + 1} at test_loop_meetings.py:"
    assert outcomes[1].error.startswith(f"EngineUseError: this rank {left}")
    assert outcomes[0].error.startswith("RankFailedError: rank 1 has raised EngineUseError")
    assert left in outcomes[0].error
