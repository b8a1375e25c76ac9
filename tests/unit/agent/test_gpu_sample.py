"""A sampler's datagram: told from a rank's report, bounded, and refused when it is anything else."""

from __future__ import annotations

import msgspec
import pytest

from agent.gpu_sample import (
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
from agent.machine_wire import GpuFigures
from ddpcore.wire import MalformedReportError, decode_report, encode_report
from tests.support.node_reports import rank_report


def test_a_sample_is_never_taken_for_a_report_nor_a_report_for_a_sample() -> None:
    sample = encode_sample(GpuSample(SAMPLE_VERSION, 7, gpus=[SampledGpu(GpuFigures(0, "GPU-0"))]))

    assert is_sample(sample)
    assert decode_sample(sample).gpus[0].figures.uuid == "GPU-0"
    with pytest.raises(MalformedReportError):
        decode_report(sample)
    assert not is_sample(encode_report(rank_report(0)))


def test_a_sample_that_would_be_too_large_goes_without_its_processes() -> None:
    processes = [GpuProcess(pid, visible_devices="x" * 4000) for pid in range(30)]
    sample = decode_sample(encode_sample(GpuSample(SAMPLE_VERSION, 7, gpus=[SampledGpu(GpuFigures(0), processes)])))

    assert sample.gpus == [SampledGpu(GpuFigures(0))]


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
