"""Trainers and writers killed at random moments: every run goes on from a sound checkpoint, and loses no sample.

Once in each way in every run. RANKDECK_KILLS says how often with `-m chaos`: 30 times, a thousand by hand after a
change of this code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ddpcore.checkpoint import Checkpointer
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.reading import verify
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.order import ShuffledOrder
from tests.support.ranks import is_alive
from tests.support.training_states import is_same
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks

NUM_KILLS = int(os.environ.get("RANKDECK_KILLS", "30"))
LONGEST_S = 0.12
"""From the first step to the kill: about a dozen saves."""

KINDS = ("all trainers", "one trainer", "one writer", "all writers", "a trainer and its writer", "everything")
WRITERS_ONLY = ("one writer", "all writers")

NUM_SAMPLES = 97
GLOBAL_BATCH = 10


def weights_of(step: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return {"large": torch.randn(200, 400, generator=numbers), "small": torch.randn(3, generator=numbers)}


def count(order: ShuffledOrder, epoch: int, position: int) -> torch.Tensor:
    """Return how often each sample has been trained on when the cursor is here."""
    seen = torch.from_numpy(order.indices(epoch, 0, position))
    return epoch + torch.bincount(seen, minlength=NUM_SAMPLES)


def train(directory: str, save_every: int) -> None:
    """Train and save until killed, after a look at what there is to resume from.

    Args:
        directory: Of the checkpoints.
        save_every: Steps between saves: with 1 the writers are always busy, with more they are idle for a while.
    """
    order = ShuffledOrder(NUM_SAMPLES, seed=1)
    sampler = ElasticBatchSampler(order, GLOBAL_BATCH)
    seen, step, is_first = torch.zeros(NUM_SAMPLES, dtype=torch.int64), 0, dist.get_rank() == 0
    checkpointer = Checkpointer(directory, keep_last=2, keep_every=100)
    found = checkpointer.load_latest()
    if found is not None:
        assert found.skipped == (), found.skipped
        step, seen = found.step, found.state["seen"]
        assert is_same(found.state["weights"], weights_of(step))
        sampler.load_state_dict(found.state["sampler"])
        assert torch.equal(seen, count(order, *sampler.cursor)), "samples were lost or repeated"
    say(directory, "resumed", step, is_first)
    Path(f"training-{dist.get_rank()}").touch()
    while True:
        for batch in sampler:
            own = torch.bincount(
                torch.tensor(batch[: sampler.share.num_local], dtype=torch.int64), minlength=NUM_SAMPLES
            )
            dist.all_reduce(own)
            seen += own
            sampler.finish_step()
            step += 1
            if step % save_every:
                continue
            state: dict[str, Any] = {"weights": weights_of(step), "seen": seen, "sampler": sampler.state_dict()}
            checkpointer.save(step, state, {"rank": dist.get_rank()})
            # This save has waited for the one before.
            say(directory, "acknowledged", step - save_every, is_first)
            if step % 3 == 0 or save_every > 1:
                checkpointer.wait()
                say(directory, "acknowledged", step, is_first)


def say(directory: str, what: str, step: int, is_first: bool) -> None:
    if is_first:
        part = Path(f"{directory}.{what}.part")
        part.write_text(str(step))
        part.rename(f"{directory}.{what}")


def heard(directory: Path, what: str) -> int:
    path = Path(f"{directory}.{what}")
    return int(path.read_text()) if path.exists() else 0


def writers_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def victims(kind: str, pids: list[int], dice: random.Random) -> list[int]:
    chosen = dice.choice(pids)
    match kind:
        case "all trainers":
            return dice.sample(pids, len(pids))
        case "one trainer":
            return [chosen]
        case "one writer":
            return writers_of(chosen)
        case "all writers":
            return list(itertools.chain(*map(writers_of, pids)))
        case "a trainer and its writer":
            return [*writers_of(chosen), chosen]
        case _:
            return [*itertools.chain(*map(writers_of, pids)), *pids]


def survive(ranks: WarmRanks, directory: Path) -> None:
    """See that ranks whose writers were killed go on saving, or all end with an error that says so."""
    before = heard(directory, "acknowledged")
    names = [ranks.directory / f"result-{rank}.pickle" for rank in range(len(ranks.pids))]
    until(
        lambda: heard(directory, "acknowledged") > before + 8 or all(name.exists() for name in names),
        60,
        "they go on, or end",
    )
    for name in names:
        error = pickle.loads(name.read_bytes())["error"] if name.exists() else ""
        assert error == "" or (error.startswith("CheckpointWriteError") and "writer process" in error), error


def run_and_kill(directory: Path, kind: str, dice: random.Random, *, must_save: bool) -> None:
    with WarmRanks(train, dice.choice([1, 2, 2, 3]), str(directory), dice.choice([1, 1, 4])) as ranks:
        for rank in range(len(ranks.pids)):
            ranks.wait_for_file(f"training-{rank}")
        if must_save:
            until(lambda: heard(directory, "acknowledged"), 60, "a save is acknowledged")
        time.sleep(dice.random() * LONGEST_S)  # a random moment is the point here
        writers = list(itertools.chain(*map(writers_of, ranks.pids)))
        for pid in victims(kind, ranks.pids, dice):
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself since its comrades died
                os.kill(pid, 9)
        time.sleep(dice.random() * 0.01)
        if kind in WRITERS_ONLY:
            survive(ranks, directory)
            # Those that have taken the place of killed ones.
            writers += itertools.chain(*map(writers_of, ranks.pids))
    until(lambda: not any(map(is_alive, writers)), 30, "writers end with what they were at")


@pytest.mark.timeout(120 + 10 * NUM_KILLS)
@pytest.mark.parametrize("num_kills", [len(KINDS), pytest.param(NUM_KILLS, marks=pytest.mark.chaos)])
def test_no_acknowledged_checkpoint_is_lost_whoever_is_killed_when(tmp_path: Path, num_kills: int) -> None:
    directory = tmp_path / "checkpoints"
    seed = int(os.environ.get("RANKDECK_SEED", "0"))
    dice = random.Random(seed)
    num_temporary = num_resumed = 0
    for number in range(num_kills):
        before = heard(directory, "acknowledged")
        Path(f"{directory}.resumed").unlink(missing_ok=True)
        kind = KINDS[number % len(KINDS)]
        # On a slow machine many runs might be killed before their first save, and nothing would be tried.
        run_and_kill(directory, kind, dice, must_save=number > 0 and before == 0)
        resumed, where = heard(directory, "resumed"), f"kill {number} of {kind}, seed {seed}"
        assert resumed >= before, f"step {before} was acknowledged, the next run began at {resumed}: {where}"
        num_resumed += resumed > 0
        published, refused = list_checkpoints(directory)
        assert refused == {}, where
        for one in published:
            verify(directory / one.name)
        num_temporary += len(list(directory.glob(".tmp-*")))

    run_ranks(open_and_close, 2, str(directory))

    assert num_resumed >= num_kills - 2
    assert list(directory.glob(".tmp-*")) == list(directory.glob(".del-*")) == []
    published, _ = list_checkpoints(directory)
    kept = [one.step for one in published]
    assert len([step for step in kept if step % 100]) <= 2 + 1, kept
    sys.stdout.write(
        f"{num_kills} kills, step {kept[0]} reached, {num_temporary} half-written checkpoints left and collected\n"
    )


def open_and_close(directory: str) -> None:
    Checkpointer(directory).close()
