"""Checkpoints of real ranks: saved by some, loaded by others, and every mistake told to all of them at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpcore
from ddpcore.barriers.named_barriers import leave
from ddpcore.checkpoint import Checkpointer, restore
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.checkpointer import MEETING_TIMEOUT_S
from ddpcore.checkpoint.directory import LOCK
from ddpcore.checkpoint.reading import verify
from ddpcore.errors import CheckpointCallError, CheckpointDirectoryError, CheckpointWriteError
from tests.support.ranks import is_alive
from tests.support.training_states import is_same
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks


def state_of(step: int) -> dict[str, Any]:
    """Return a state that all ranks have alike: large enough to be cut, and different at each step."""
    numbers = torch.Generator().manual_seed(step)
    return {
        "model": {"large": torch.randn(401, 300, generator=numbers), "norm": torch.randn(9, generator=numbers)},
        "step": step,
        "best": (0.5 * step, None),
    }


def save_some(directory: str, *steps: int) -> None:
    with Checkpointer(directory) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), {"rank": dist.get_rank(), "rng": torch.arange(5) + dist.get_rank()})


def load_newest(directory: str) -> tuple[int, bool, Any, tuple[str, ...]]:
    with Checkpointer(directory) as checkpointer:
        found = checkpointer.load_latest()
    assert found is not None
    return found.step, is_same(found.state, state_of(found.step)), found.per_rank, found.skipped


def test_what_four_ranks_save_any_number_of_ranks_loads(tmp_path: Path) -> None:
    run_ranks(save_some, 4, str(tmp_path), 10, 20)

    for world_size in (2, 3, 1):
        assert run_ranks(load_newest, world_size, str(tmp_path)) == [(20, True, None, ())] * world_size
    again = run_ranks(load_newest, 4, str(tmp_path))
    assert [per_rank["rank"] for _, _, per_rank, _ in again] == [0, 1, 2, 3]
    assert [per_rank["rng"][0].item() for _, _, per_rank, _ in again] == [0, 1, 2, 3]


def test_each_rank_writes_about_its_share(tmp_path: Path) -> None:
    run_ranks(save_some, 3, str(tmp_path), 1)

    manifest = verify(tmp_path / "step_00000001")
    sizes = [record.bytes for record in manifest.files.values()]
    assert max(sizes) < 1.05 * sum(sizes) / 3


def train(directory: str, until_step: int) -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    average = torch.optim.swa_utils.AveragedModel(model)
    objects: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "schedule": schedule, "average": average}
    losses = []
    with Checkpointer(directory) as checkpointer:
        checkpoint = checkpointer.load_latest()
        begin = 0
        if checkpoint is not None:
            restore(checkpoint.state, objects)
            begin = checkpoint.step
            # A state that the optimizer now works on must not be the loaded one of somebody else.
            del checkpoint
        for step in range(begin, until_step):
            inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            loss = wrapped(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            losses.append(loss.item())
            checkpointer.save(step + 1, {name: part.state_dict() for name, part in objects.items()})
    return losses


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run_ranks(train, 2, str(tmp_path / "whole"), 8)

    first = run_ranks(train, 2, str(tmp_path / "parts"), 4)
    second = run_ranks(train, 2, str(tmp_path / "parts"), 8)

    assert [one + other for one, other in zip(first, second, strict=True)] == whole


def impatient_checkpointer(directory: str, timeout_s: float) -> Checkpointer:
    """Return one that all ranks have opened at their leisure, and whose calls wait this long for each other."""
    checkpointer = Checkpointer(directory)
    checkpointer._meeting._timeout_s = timeout_s
    return checkpointer


def save_on_rank_zero_alone(directory: str) -> None:
    checkpointer = impatient_checkpointer(directory, 0.5)
    if dist.get_rank() == 0:
        checkpointer.save(5, state_of(5))
    # As at the end of any program, which this one's process does not come to.
    leave()


def load_on_two_of_three(directory: str, *patience_s: float) -> None:
    checkpointer = impatient_checkpointer(directory, patience_s[dist.get_rank()])
    if dist.get_rank() != 1:
        # The time is for the one that does not come, not for how far these two are apart.
        Path(f"here-{dist.get_rank()}").touch()
        until(Path(f"here-{2 - dist.get_rank()}").exists, 60, "the other one is here")
        checkpointer.load_latest()
    leave()


def test_ranks_that_do_not_come_to_a_save_or_load_are_named(tmp_path: Path) -> None:
    alone, other = try_ranks(save_on_rank_zero_alone, 2, str(tmp_path))
    assert alone.error.startswith(
        "CheckpointCallError: rank 1 did not call save(step=5), which is every rank's work, not only rank 0's: call it "
        "on all ranks, outside of `if rank == 0`; "
    )
    assert other.error == ""


@pytest.mark.parametrize("patience_s", [(5.0, 5.0, 5.0), (7.0, 5.0, 1.0)], ids=["alike", "one-ends-before"])
def test_a_rank_that_came_in_vain_and_ended_is_not_named_by_the_others(
    tmp_path: Path, patience_s: tuple[float, ...]
) -> None:
    outcomes = try_ranks(load_on_two_of_three, 3, str(tmp_path), *patience_s)
    assert [outcome.error[:59] for outcome in outcomes] == [
        "CheckpointCallError: rank 1 did not call load_latest(), whi",
        "",
        "CheckpointCallError: rank 1 did not call load_latest(), whi",
    ]


def call_differently(directory: str, what: str) -> None:
    checkpointer = Checkpointer(directory)
    rank = dist.get_rank()
    if what == "steps":
        checkpointer.save(5 + rank, state_of(5))
    if what == "calls":
        checkpointer.save(5, state_of(5)) if rank else checkpointer.load_latest()
    if what == "objects":
        other = Checkpointer(f"{directory}/other")
        (other if rank == 2 else checkpointer).wait()
    if what == "shapes":
        checkpointer.save(5, {"model": {"weight": torch.zeros(3 + (rank == 1), 2)}})
    if what == "names":
        checkpointer.save(5, {"model": {"weight": torch.zeros(3), **({"bias": torch.zeros(1)} if rank == 2 else {})}})
    if what == "tensors":
        last = torch.zeros(300, 300)
        checkpointer.save(5, {"last": last, "best": last if rank == 1 else last.clone()})
    if what == "leaves":
        checkpointer.save(5, {"model": [torch.zeros(3), print if rank == 1 else None]})


DIFFERENT = "CheckpointCallError: the ranks have different states to save: state"
UNLIKE = "CheckpointCallError: all ranks have to call the same: "


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("steps", UNLIKE + "rank 0 called save(step=5), rank 1 called save(step=6), rank 2 called save(step=7)"),
        ("calls", UNLIKE + "rank 0 called load_latest(), ranks 1-2 called save(step=5)"),
        (
            "objects",
            UNLIKE
            + "ranks 0-1 called wait() of its Checkpointer number 1, rank 2 called wait() of its Checkpointer number 2",
        ),
        ("shapes", DIFFERENT + "['model']['weight'] is F32 [4, 2] on rank 1, F32 [3, 2] on ranks 0, 2. What differs"),
        (
            "names",
            DIFFERENT + "['model']['bias'] is F32 [1] on rank 2, absent on ranks 0-1. What differs between ranks",
        ),
        ("tensors", DIFFERENT + "['best'] is F32 [300, 300] (the same tensor as last) on rank 1, F32 [300, 3"),
        ("leaves", "state['model'][1] is a builtins.builtin_function_or_method: "),
    ],
)
def test_ranks_that_call_different_things_learn_it_at_once_on_every_rank(
    tmp_path: Path, what: str, message: str
) -> None:
    outcomes = try_ranks(call_differently, 3, str(tmp_path), what, timeout_s=MEETING_TIMEOUT_S * 0.75)

    for outcome in outcomes:
        assert message in outcome.error
    if what == "leaves":
        assert "StateNotStorableError: rank 1: " in outcomes[0].error


def read_newest_of_damaged(directory: str) -> tuple[int, tuple[str, ...]]:
    with Checkpointer(directory) as checkpointer:
        found = checkpointer.load_latest()
        assert found is not None
        checkpointer.save(found.step + 1, state_of(found.step + 1))
    return found.step, found.skipped


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_with_a_reason_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path), 1, 2, 3)
    damage(tmp_path / "step_00000003" / "rank-00001.safetensors")
    (tmp_path / "step_00000002" / "COMMITTED").unlink()

    answers = run_ranks(read_newest_of_damaged, 2, str(tmp_path))

    skipped = (
        "step_00000002: it has no COMMITTED: No such file or directory",
        "step_00000003: rank-00001.safetensors: its checksum differs: bytes have changed since it was written",
    )
    assert answers == [(1, skipped)] * 2
    # The step is saved anew beside the illegible one, and is the newest although step 3 was there before.
    assert run_ranks(load_newest, 1, str(tmp_path))[0][0] == 2


def test_where_all_are_damaged_nobody_begins_anew_in_silence(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path), 1)
    damage(tmp_path / "step_00000001" / "rank-00000.safetensors")

    for outcome in try_ranks(load_newest, 2, str(tmp_path)):
        assert outcome.error.startswith("CheckpointInvalidError: no checkpoint in ")
        assert "step_00000001: rank-00000.safetensors: its checksum differs" in outcome.error


def load_step(directory: str, step: int) -> int:
    with Checkpointer(directory) as checkpointer:
        return checkpointer.load(step).step


def test_a_step_can_be_asked_for(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path), 1, 2)

    assert run_ranks(load_step, 2, str(tmp_path), 1) == [1, 1]
    for outcome in try_ranks(load_step, 2, str(tmp_path), 7):
        assert outcome.error.startswith("CheckpointInvalidError: there is no checkpoint of step 7 in ")


def lose_a_writer(directory: str, call: str) -> tuple[str, int | None]:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    writer = checkpointer._saver._writer
    if dist.get_rank() == 1:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
    checkpointer.save(2, state_of(2))
    if dist.get_rank() == 1:
        os.kill(writer.pid, signal.SIGKILL)  # type: ignore[arg-type]
    error = ""
    try:
        checkpointer.wait() if call == "wait" else checkpointer.save(3, state_of(3))
    except CheckpointWriteError as problem:
        error = str(problem)
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    assert psutil.Process().children() == []
    return error, checkpointer.last_step


@pytest.mark.parametrize("call", ["wait", "save"])
def test_a_writer_that_is_killed_is_an_error_on_every_rank_and_the_next_save_is_well(tmp_path: Path, call: str) -> None:
    answers = run_ranks(lose_a_writer, 3, str(tmp_path), call)

    error = (
        "step 2 is not saved: rank 1: its writer process was ended by Killed before it was done. "
        "The checkpoints before it are untouched; mend the cause and save again"
    )
    assert answers == [(error, 3)] * 3
    assert [one.step for one in list_checkpoints(tmp_path)[0]] == [3, 1]
    assert list(tmp_path.glob(".tmp*")) == list(tmp_path.glob(".del*")) == []


def lose_an_idle_writer(directory: str, moment: str) -> tuple[int | None, str]:
    """Save four times, rank 1's writer being killed before the second one, or while the ranks meet for it."""
    checkpointer = Checkpointer(directory, keep_last=9)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    saver = checkpointer._saver
    first, begin = saver._writer.pid, saver._begin

    def kill_writer() -> None:
        assert saver._writer.pid is not None
        writer = psutil.Process(saver._writer.pid)
        writer.kill()
        until(lambda: not is_alive(writer.pid), 60, "the writer has died")

    def kill_and_begin(*args: Any) -> str:
        kill_writer()
        if moment == "while they meet, and is looked at":
            saver._writer.poll()
        return begin(*args)

    if dist.get_rank() == 1:
        if moment == "before":
            kill_writer()
        else:
            saver._begin = kill_and_begin  # type: ignore[assignment, method-assign]
    checkpointer.save(2, state_of(2))
    saver._begin = begin  # type: ignore[method-assign]
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    return checkpointer.last_step, "another" if first != saver._writer.pid else "the same"


@pytest.mark.parametrize("moment", ["before", "while they meet", "while they meet, and is looked at"])
def test_a_writer_that_is_killed_while_idle_is_replaced(tmp_path: Path, moment: str) -> None:
    answers = run_ranks(lose_an_idle_writer, 2, str(tmp_path), moment)

    assert [last_step for last_step, _ in answers] == [3, 3]
    assert [one.step for one in list_checkpoints(tmp_path).published] == [3, 2, 1]


def lose_the_last_writer(directory: str) -> str:
    """Save while rank 1 has lost its writer, and its machine starts no other one."""
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    writer, begin = checkpointer._saver._writer, checkpointer._saver._begin

    def start_none() -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def kill_and_begin(*args: Any) -> str:
        assert writer.pid is not None
        pid = writer.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid), 60, "the writer has died")
        writer.start = start_none  # type: ignore[method-assign]
        return begin(*args)

    if dist.get_rank() == 1:
        checkpointer._saver._begin = kill_and_begin  # type: ignore[assignment, method-assign]
    checkpointer.save(2, state_of(2))
    try:
        checkpointer.wait()
    except CheckpointWriteError as error:
        return str(error)
    return ""


def test_a_writer_that_cannot_be_replaced_is_an_error_on_every_rank(tmp_path: Path) -> None:
    answers = run_ranks(lose_the_last_writer, 2, str(tmp_path))

    assert len(set(answers)) == 1
    assert answers[0].startswith(
        "step 2 is not saved: rank 1: its share could not be copied: no process can be started to write checkpoints: "
    )


def end_instead_of_saving(directory: str, rank: int, how: str) -> None:
    with ddpcore.open_process_group(), Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        if dist.get_rank() == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("no such file")
        checkpointer.save(2, state_of(2))


@pytest.mark.parametrize("how", ["killed", "raised"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_instead_of_saving_is_said_to_have_ended_not_to_have_called_wrongly(
    tmp_path: Path, rank: int, how: str
) -> None:
    outcomes = try_ranks(end_instead_of_saving, 3, str(tmp_path), rank, how, has_group=False)

    what = "died without an exception, as by a signal" if how == "killed" else "raised KeyError at test_checkpoint_on"
    for number, outcome in enumerate(outcomes):
        if number != rank:
            assert outcome.error.startswith(f"RankFailedError: rank {rank} has {what}"), outcome.error
            assert outcome.error.endswith("; so save(step=2), which needs every rank, cannot be done")


def save_and_wait_for_death(directory: str) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    for process in psutil.Process().children():
        process.suspend()
        Path(f"writer-{dist.get_rank()}").write_text(str(process.pid))
    checkpointer.save(2, state_of(2))
    Path(f"saved-{dist.get_rank()}").touch()
    signal.pause()


def holds_its_lock(writer: psutil.Process) -> bool:
    """Return whether a writer has begun, also where it has ended since: nobody knows of one that has not."""
    try:
        if writer.status() == psutil.STATUS_ZOMBIE:
            return True
        return any(file.path.endswith(f"/{LOCK}") for file in writer.open_files())
    except psutil.NoSuchProcess:
        return True


def test_writers_outlive_killed_trainers_and_publish_what_these_had_saved(tmp_path: Path) -> None:
    with WarmRanks(save_and_wait_for_death, 2, str(tmp_path)) as ranks:
        for rank in range(2):
            ranks.wait_for_file(f"saved-{rank}")
        writers = [psutil.Process(int((ranks.directory / f"writer-{rank}").read_text())) for rank in range(2)]
        for process in writers:
            # What a writer has open: the trainer's socket, the memory, and nothing of the process group.
            links = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert len([link for link in links if link.startswith("socket:")]) == 1
            assert process.nice() == 19
        for rank in range(2):
            ranks.kill(rank)
        ranks.outcomes()
        # The first one's publishes, and waits only a second for others that do nothing.
        for process in reversed(writers):
            process.resume()
            until(lambda one=process: holds_its_lock(one), 60, "the writer is at work, or done")  # type: ignore[misc]

        # A new run waits for them, since they are at work.
        assert run_ranks(load_newest, 1, str(tmp_path))[0][:2] == (2, True)
        psutil.wait_procs(writers, 60)
        assert not any(process.is_running() for process in writers)


def test_what_dead_runs_have_left_is_collected_and_what_a_writer_holds_is_waited_for(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path), 1)
    for name in (".tmp-step_00000009-dead.1", ".del-step_00000004-ab12", ".tmp-step_00000008.2-dead.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors.part").write_bytes(b"half")
    (tmp_path / ".tmp-notes").write_text("not ours")
    (tmp_path / "step_notes").mkdir()

    assert run_ranks(load_newest, 2, str(tmp_path))[0][:2] == (1, True)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".run.lock",
        ".tmp-notes",
        "step_00000001",
        "step_notes",
    ]


def vanish(directory: str) -> str:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()
    try:
        checkpointer.save(2, state_of(2))
    except CheckpointDirectoryError as problem:
        return str(problem)
    finally:
        checkpointer.close()
    return ""


def test_a_directory_that_has_vanished_is_said_on_every_rank(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    for answer in run_ranks(vanish, 2, str(root)):
        assert f"rank 0: checkpoints cannot be kept in {root}: No such file" in answer


def open_only(directory: str) -> None:
    Checkpointer(directory).close()


def test_two_runs_on_one_directory_are_told_of_each_other(tmp_path: Path) -> None:
    with Checkpointer(tmp_path):
        for outcome in try_ranks(open_only, 2, str(tmp_path)):
            assert "CheckpointDirectoryError: " in outcome.error
            assert f"in use by another run, process {os.getpid()} on " in outcome.error

    run_ranks(open_only, 2, str(tmp_path))


def test_a_file_where_the_directory_should_be_is_said_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for name in ("file", "file/below"):
        for outcome in try_ranks(open_only, 2, str(tmp_path / name)):
            assert "CheckpointDirectoryError: " in outcome.error
            assert "it, or a part of its path, is a file; give a directory" in outcome.error


def see_another_directory(directory: str) -> None:
    Checkpointer(f"{directory}/{dist.get_rank()}")


def test_ranks_of_one_node_with_different_directories_are_told(tmp_path: Path) -> None:
    for outcome in try_ranks(see_another_directory, 2, str(tmp_path)):
        assert f"rank 1: {tmp_path}/1 is not what the first rank of this node has" in outcome.error


def test_a_training_s_process_ends_with_its_last_checkpoint_even_without_close(tmp_path: Path) -> None:
    run_ranks(save_and_return, 2, str(tmp_path))

    until((tmp_path / "step_00000001").exists, 60, "the writers have published")
    assert run_ranks(load_newest, 1, str(tmp_path))[0][:2] == (1, True)


def save_and_return(directory: str) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    if dist.get_rank() == 0:
        # Its writer publishes, and once its trainer ends it waits only a second for others that do nothing.
        until(lambda: any(Path(directory).glob("*/rank-00001*")), 60, "the other writer is at work, or done")


def close_after_the_group(directory: str) -> int | None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state_of(1))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(CheckpointCallError, match="the process group is not the one this Checkpointer was made in"):
        checkpointer.save(2, state_of(2))
    checkpointer.close()
    return checkpointer.last_step


def test_a_checkpointer_may_be_closed_after_the_group(tmp_path: Path) -> None:
    assert run_ranks(close_after_the_group, 2, str(tmp_path)) == [1, 1]

    assert run_ranks(load_newest, 1, str(tmp_path))[0][:2] == (1, True)
