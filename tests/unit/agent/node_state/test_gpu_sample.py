"""A sampler's datagram: told from a rank's report, bounded, and refused when it is anything else."""

from __future__ import annotations

import msgspec
import pytest

from agent.node_state.gpu_sample import (
    MAX_SAMPLE_BYTES,
    SAMPLE_MARK,
    SAMPLE_VERSION,
    GpuProcess,
    GpuSample,
    MalformedSampleError,
    SampledGpu,
    decode_sample,
    encode_sample,
    is_sample,
)
from agent.wire.machine import (
    MAX_GPUS,
    MAX_HOLDERS,
    MAX_XIDS,
    GpuFigures,
    GpuHolder,
    GpuReport,
    GpusReport,
    JobRank,
    ThrottleReason,
    Xid,
)
from agent.wire.reports import decode_node_report, encode_node_report
from ddpcore.wire import MalformedReportError, decode_report, encode_report
from tests.support.node_reports import node_report, rank_report


def test_a_sample_is_never_taken_for_a_report_nor_a_report_for_a_sample() -> None:
    sample = encode_sample(GpuSample(SAMPLE_VERSION, 7, gpus=[SampledGpu(GpuFigures(0, "GPU-0"))]))

    assert is_sample(sample)
    assert decode_sample(sample).gpus[0].figures.uuid == "GPU-0"
    with pytest.raises(MalformedReportError):
        decode_report(sample)
    assert not is_sample(encode_report(rank_report(0)))


@pytest.mark.parametrize(("num_gpus", "num_kept"), [(1, 16), (4, 4), (64, 0)])
def test_a_sample_that_would_be_too_large_goes_with_the_largest_processes(num_gpus: int, num_kept: int) -> None:
    processes = [GpuProcess(pid, visible_devices="x" * 4000) for pid in range(30)]
    gpus = [SampledGpu(GpuFigures(index), processes) for index in range(num_gpus)]

    told = decode_sample(encode_sample(GpuSample(SAMPLE_VERSION, 7, gpus=gpus)))

    assert [gpu.processes for gpu in told.gpus] == [processes[:num_kept]] * num_gpus


def test_a_node_full_of_gpus_and_processes_fits_in_a_report() -> None:
    whose = [JobRank("j" * 64, rank) for rank in range(2**31 - MAX_HOLDERS, 2**31)]
    holders = [GpuHolder(2**22, 2**40, "MIG-" + "0" * 36, rank, is_foreign=True) for rank in whose]
    figures = GpuFigures(
        index=63,
        uuid="GPU-" + "0" * 36,
        name="x" * 64,
        throttle_reasons=list(ThrottleReason),
        xids=[Xid(2**31, 2**31, 1.5)] * MAX_XIDS,
    )
    gpus = [GpuReport(figures, whose, holders)] * MAX_GPUS

    frame = encode_node_report(node_report(1, [], [], gpus=GpusReport(gpus=gpus)))

    assert decode_node_report(frame).gpus.gpus == gpus


@pytest.mark.parametrize(
    "datagram",
    [
        SAMPLE_MARK,
        SAMPLE_MARK + b"\xff" * 10,
        SAMPLE_MARK + b"\x81\xa1a" * 9000,
        SAMPLE_MARK + msgspec.msgpack.encode({"version": 1, "pid": -1}),
        SAMPLE_MARK + b"\x00" * MAX_SAMPLE_BYTES,
        encode_sample(GpuSample(SAMPLE_VERSION + 1, 7)),
    ],
    ids=["empty", "garbage", "nested", "wrong value", "too long", "another version"],
)
def test_what_is_no_sample_is_refused(datagram: bytes) -> None:
    with pytest.raises(MalformedSampleError):
        decode_sample(datagram)
