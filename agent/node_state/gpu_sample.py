"""What the GPU sampler sends to the agent that started it: one datagram a sample, to the inbox of the ranks.

A sample begins with a byte that no MessagePack value begins with, so that it is never taken for a rank's report.

Source: MessagePack specification, "0xc1 (never used)".
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from agent.wire.machine import MAX_GPUS, MAX_HOLDERS, GpuFigures, Sentence
from ddpcore.wire import DECODE_ERRORS, Count, FilePath, Name, Rank, Word

SAMPLE_VERSION = 1
SAMPLE_MARK = b"\xc1"
MAX_SAMPLE_BYTES = 65_536
"""A larger datagram is refused before it is decoded."""
MAX_ANCESTORS = 32


class GpuProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process that NVML found on a GPU, and what /proc shows of it."""

    pid: Count
    used_bytes: Count | None = None
    mig_uuid: Name = ""
    ancestors: Annotated[list[Count], msgspec.Meta(max_length=MAX_ANCESTORS)] = []
    """Its parent, that one's parent, and so on."""
    inner_pids: Annotated[list[Count], msgspec.Meta(max_length=MAX_ANCESTORS)] = []
    """Its pids in the namespaces below ours: what a process in a container takes for its own."""
    job_id: Name = ""
    """This one and the next three are of its environment, where we may read it; this and `rank` of our jobs alone."""
    rank: Rank | None = None
    visible_devices: FilePath | None = None
    """CUDA_VISIBLE_DEVICES, None when it is not set."""
    device_order: Word | None = None
    """CUDA_DEVICE_ORDER."""
    name: Word = ""
    """Its name by the kernel."""


class SampledGpu(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU at one moment."""

    figures: GpuFigures
    processes: Annotated[list[GpuProcess], msgspec.Meta(max_length=MAX_HOLDERS)] = []
    """The largest first."""


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """All GPUs at one moment, or why there is nothing to see."""

    version: int
    pid: Count
    """Pid of the sampler."""
    unavailable: Sentence = ""
    """Why NVML cannot be used; the sampler ends after it."""
    driver_version: Word = ""
    gpus: Annotated[list[SampledGpu], msgspec.Meta(max_length=MAX_GPUS)] = []


class MalformedSampleError(ValueError):
    """A datagram with the mark of a sample is none."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GpuSample)


def encode_sample(sample: GpuSample) -> bytes:
    """Return one datagram; with fewer processes of each GPU where all are too many, the largest of them."""
    num_kept = MAX_HOLDERS
    while True:
        gpus = [SampledGpu(gpu.figures, gpu.processes[:num_kept]) for gpu in sample.gpus]
        datagram = SAMPLE_MARK + _encoder.encode(msgspec.structs.replace(sample, gpus=gpus))
        if len(datagram) <= MAX_SAMPLE_BYTES or not num_kept:
            return datagram
        num_kept //= 2


def is_sample(datagram: bytes) -> bool:
    """Return whether a datagram claims to be a sample."""
    return datagram.startswith(SAMPLE_MARK)


def decode_sample(datagram: bytes) -> GpuSample:
    """Return the sample in a datagram; raise MalformedSampleError for too many bytes, no sample, or another version."""
    if len(datagram) > MAX_SAMPLE_BYTES:
        raise MalformedSampleError(f"a sample of {len(datagram)} bytes, at most {MAX_SAMPLE_BYTES} are taken")
    try:
        sample = _decoder.decode(datagram[len(SAMPLE_MARK) :])
    except DECODE_ERRORS as error:
        raise MalformedSampleError(f"not a GPU sample: {error}") from error
    if sample.version != SAMPLE_VERSION:
        raise MalformedSampleError(f"a sampler speaks version {sample.version}, this agent {SAMPLE_VERSION}")
    return sample
