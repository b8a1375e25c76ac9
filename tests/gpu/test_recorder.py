"""What NCCL's flight recorder holds of a rank's calls, and what the probe reports of a GPU that stands in a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.gpu import first_open, with_batches
from ddpcore.wire import DEFAULT_GROUP
from tests.support.gpus import needs_gpu
from tests.support.ranks import RealRanks, Reports, group
from tests.support.waiting import until
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from ddpcore.probe.samples import RecorderDump

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]

TRAINS = Path(__file__).parent / "programs" / "trains.py"
SLEEP_CYCLES = 4_000_000_000
"""Two seconds or more, in which the host does all that comes next."""
SETTLE_S = 20.0
KEY = ("nccl", 0)


def ended(recorder: FlightRecorder, num_calls: int) -> RecorderDump:
    """Return what the recorder holds once the watchdog, which looks ten times a second, has seen all calls end."""
    until(lambda: recorder.counters() == {KEY: (num_calls, num_calls)}, SETTLE_S, "the end of all calls")
    return recorder.dump()


def call() -> list[RecorderDump]:
    """Return dumps after three reductions, behind a kernel with two more, after a send and its receive, and behind."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    recorder, ones = FlightRecorder(), torch.ones(1000, device=device)
    pair = [dist.P2POp(dist.isend, ones, 0), dist.P2POp(dist.irecv, torch.zeros_like(ones), 0)]
    for _ in range(3):
        dist.all_reduce(ones)
    dumps = [ended(recorder, 3)]
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    dist.all_reduce(ones)
    dist.all_reduce(ones)
    dumps.append(recorder.dump())
    ended(recorder, 5)
    works = dist.batch_isend_irecv(pair)
    until(lambda: first_open(with_batches(recorder.dump().entries)) is None, SETTLE_S, "the end of the batch")
    dumps.append(recorder.dump())
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    works += dist.batch_isend_irecv(pair)
    dumps.append(recorder.dump())
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return dumps


def test_calls_of_nccl_are_numbered_and_open_until_the_gpu_is_through() -> None:
    ((three, behind, batch, batch_behind),) = run_ranks(call, 1, has_group=False)

    assert [(entry.op, entry.seq, entry.is_retired) for entry in three.entries] == [
        ("nccl:all_reduce", number, True) for number in (1, 2, 3)
    ]
    assert {(entry.key, entry.group, entry.sizes, entry.dtypes) for entry in three.entries} == {
        (KEY, DEFAULT_GROUP, ((1000,),), ("Float",))
    }
    assert [entry.is_retired for entry in behind.entries] == [True] * 3 + [False] * 2
    assert behind.counters == {KEY: (5, 3)}
    standing = first_open(behind.entries)
    assert standing is not None
    assert (standing.seq, standing.is_p2p) == (4, False)

    numbers = [(entry.op, entry.seq, entry.p2p_seq) for entry in batch_behind.entries[5:]]
    assert numbers == [
        (op, 5, number) for number in (1, 2) for op in ("nccl:send 0->0", "nccl:recv 0<-0", "nccl:coalesced")
    ]
    # The calls of a batch are never closed themselves.
    assert [entry.is_retired for entry in batch.entries[5:]] == [False, False, True]
    standing = first_open(with_batches(batch_behind.entries))
    assert standing is not None
    assert (standing.op, standing.p2p_seq) == ("nccl:send 0->0", 2)


def test_the_probe_reports_the_call_that_the_gpu_has_not_come_to() -> None:
    def stands(reports: Reports) -> bool:
        found = group(reports[0], DEFAULT_GROUP)
        return found is not None and found.waiting_s > 1.0

    with RealRanks([TRAINS, "hang"], 1) as job:
        report = job.wait_until(stands, "the GPU stands", timeout_s=120)[0]

    found = group(report, DEFAULT_GROUP)
    assert found is not None
    assert (found.op, found.completed_seq < found.enqueued_seq) == ("all_reduce", True)
    assert report.step == 21
    (memory,) = report.gpu_memory
    assert memory.uuid.startswith("GPU-")
    assert 0 < memory.allocated_bytes <= memory.reserved_bytes
