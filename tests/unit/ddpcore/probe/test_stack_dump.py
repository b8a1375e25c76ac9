"""The probe's answer to a request for stacks: all threads of this process, whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from ddpcore.probe.requests import StackDumps
from ddpcore.probe.samples import BarrierMark, RecorderDump, RecorderEntry
from ddpcore.probe.stack import code_roots
from ddpcore.wire import BARRIER_GROUP
from ddpcore.wire_stacks import (
    MAX_FRAMES,
    MAX_PENDING,
    MAX_RECORDED,
    MAX_THREADS,
    PendingCall,
    StackDump,
    decode_stack_dump,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NOTHING = RecorderDump([], {})


@pytest.fixture
def parked() -> Iterator[Callable[[str, int], threading.Thread]]:
    """Return a maker of threads that stand still, so many calls deep, until the test is over."""
    let_go = threading.Event()
    threads: list[threading.Thread] = []

    def stand(depth: int, stands: threading.Event) -> None:
        if depth:
            stand(depth - 1, stands)
            return
        stands.set()
        let_go.wait()

    def park(name: str, depth: int) -> threading.Thread:
        stands = threading.Event()
        thread = threading.Thread(target=stand, args=(depth, stands), name=name)
        thread.start()
        threads.append(thread)
        stands.wait()
        return thread

    yield park
    let_go.set()
    for thread in threads:
        thread.join()


def dumped(
    directory: Path, recorded: RecorderDump = NOTHING, *marks: BarrierMark | None, request_id: int = 1
) -> StackDump:
    """Return what another thread of this process writes."""
    dumps = StackDumps(directory, 3, code_roots())
    dumps.want(request_id)
    writer = threading.Thread(target=dumps.write, args=(recorded, marks))
    writer.start()
    writer.join()
    assert not dumps.is_wanted
    return decode_stack_dump((directory / "rank-3.stacks.json").read_bytes())


def test_all_threads_are_there_the_main_one_first_and_the_probes_own_not(
    tmp_path: Path, parked: Callable[[str, int], threading.Thread]
) -> None:
    thread = parked("w\u00f6rker \udc80", 0)

    dump = dumped(tmp_path, request_id=9)

    assert (dump.request_id, dump.rank, dump.pid) == (9, 3, os.getpid())
    main, worker = (thread for thread in dump.threads if thread.name)  # those of the test's runner have no name
    assert (main.name, worker.name) == ("MainThread", "w\u00f6rker ?")
    assert dump.threads[0] is main
    assert (main.native_id, worker.native_id) == (threading.main_thread().native_id, thread.native_id)
    own = [frame.function for frame in main.frames if frame.is_own]
    assert own[:2] == ["dumped", "test_all_threads_are_there_the_main_one_first_and_the_probes_own_not"]
    assert not any(frame.is_own for frame in main.frames if "threading.py" in frame.file)
    assert worker.frames[0].function in {"Condition.wait", "Event.wait"}
    assert any(frame.function == "parked.<locals>.stand" and frame.is_own for frame in worker.frames)


def test_a_deep_stack_and_many_threads_are_cut_and_counted(
    tmp_path: Path, parked: Callable[[str, int], threading.Thread]
) -> None:
    num_before = len(sys._current_frames())
    parked("deep", MAX_FRAMES + 5)
    for number in range(MAX_THREADS):
        parked(f"t{number}", 0)

    dump = dumped(tmp_path)

    assert len(dump.threads) + dump.num_threads_left_out == num_before + MAX_THREADS + 1
    assert dump.num_threads_left_out >= 2
    deep = [thread for thread in dump.threads if thread.name == "deep"]
    assert [(len(thread.frames), thread.is_cut) for thread in deep] == [(MAX_FRAMES, True)]


def test_no_frame_is_kept(tmp_path: Path) -> None:
    class Tensor:
        pass

    def hold() -> int:
        big = Tensor()
        before = sys.getrefcount(big)
        dumped(tmp_path)
        return sys.getrefcount(big) - before

    assert hold() == 0


def test_the_file_is_this_users_alone_and_replaces_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.stacks.json"
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    path.with_suffix(".new").symlink_to(victim)

    dumped(tmp_path)

    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert not path.is_symlink()
    assert victim.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank-3.stacks.json", "victim"]


def entry(seq: int, op: str = "gloo:all_reduce", *, is_retired: bool = False, is_p2p: bool = False) -> RecorderEntry:
    return RecorderEntry(("gloo", 0), "0", seq, op, (), is_p2p, is_retired)


def test_pending_collectives_and_named_barriers_are_told(tmp_path: Path) -> None:
    recorded = RecorderDump(
        [entry(56, is_retired=True), entry(57), entry(1, "gloo:send", is_p2p=True), entry(58, "x")], {}
    )
    over = BarrierMark("load", 1, 0.0, is_over=True)
    here = BarrierMark("epoch", 2, 0.0, is_over=False)

    dump = dumped(tmp_path, recorded, here, over, None)

    assert dump.pending == [
        PendingCall("0", 57, "all_reduce"),
        PendingCall("0", 58, "x"),
        PendingCall(BARRIER_GROUP, 2, "barrier", "epoch"),
    ]
    flood = dumped(tmp_path, RecorderDump([entry(seq) for seq in range(1, 99)], {}), here)
    assert len(flood.pending) == MAX_PENDING
    assert flood.pending[-1].label == "epoch"


def test_the_newest_calls_of_all_recorders_and_the_versions_are_told(tmp_path: Path) -> None:
    now_us = int(time.time() * 1e6)  # noqa: TID251 - the recorder's clock
    an_hour_us = 3_600_000_000
    gloo = [RecorderEntry(("gloo", 0), "0", seq, "gloo:all_reduce", ((4, 2),), False, True, now_us) for seq in (8, 9)]
    old = RecorderEntry(("nccl", 0), "1", 0, "nccl:broadcast", (), False, False, now_us - an_hour_us)
    nccl = [msgspec.structs.replace(old, seq=seq) for seq in range(64)]

    dump = dumped(tmp_path, RecorderDump([*gloo, *nccl], {}))

    assert len(dump.recorded) == MAX_RECORDED
    assert [call.seq for call in dump.recorded[-2:]] == [8, 9], "however many the other recorder has"
    newest, oldest = dump.recorded[-1], dump.recorded[0]
    assert (newest.group, newest.op, newest.sizes, newest.is_over) == ("0", "all_reduce", [[4, 2]], True)
    assert (oldest.op, oldest.is_over) == ("broadcast", False)
    assert newest.age_s is not None
    assert newest.age_s < 30.0
    assert oldest.age_s == pytest.approx(newest.age_s + 3600.0, abs=0.1)
    assert dump.versions["python"] == sys.version.split()[0]
    assert dump.versions["torch"] == torch.__version__
    assert "cuda" not in dump.versions or torch.version.cuda


def test_a_call_without_a_time_has_no_age(tmp_path: Path) -> None:
    assert [call.age_s for call in dumped(tmp_path, RecorderDump([entry(5)], {})).recorded] == [None]


def test_one_file_answers_all_that_was_asked_for(tmp_path: Path) -> None:
    dumps = StackDumps(tmp_path, 3, code_roots())
    assert not dumps.is_wanted
    for request_id in (5, 7, 6):
        dumps.want(request_id)

    dumps.write(NOTHING, ())

    assert decode_stack_dump((tmp_path / "rank-3.stacks.json").read_bytes()).request_id == 7


def test_a_directory_that_cannot_be_written_is_an_error_once(tmp_path: Path) -> None:
    dumps = StackDumps(tmp_path / "gone", 3, code_roots())
    dumps.want(1)

    with pytest.raises(FileNotFoundError):
        dumps.write(NOTHING, ())

    assert not dumps.is_wanted
    dumps.write(NOTHING, ())


def test_without_a_directory_nothing_is_written() -> None:
    dumps = StackDumps(None, 3, code_roots())
    dumps.want(1)
    dumps.write(NOTHING, ())

    assert not dumps.is_wanted
