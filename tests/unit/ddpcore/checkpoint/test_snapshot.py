"""The memory a checkpoint is taken into: it grows, keeps what is there, and copies every dtype by its bits."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from ddpcore.checkpoint import snapshot
from ddpcore.checkpoint import snapshot as device_copy
from ddpcore.checkpoint.snapshot import CudaCopies, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@pytest.fixture
def memory() -> Iterator[Snapshot]:
    memory = Snapshot()
    yield memory
    memory.close()


def test_what_is_copied_can_be_read_through_the_file(memory: Snapshot) -> None:
    memory.reserve(100)
    memory.write(0, b"head")
    memory.copy(
        [(8, torch.arange(6, dtype=torch.int32).reshape(2, 3).T), (40, torch.tensor(True)), (41, torch.zeros(0))]
    )

    assert os.pread(memory.fd, 4, 0) == b"head"
    assert torch.frombuffer(bytearray(os.pread(memory.fd, 24, 8)), dtype=torch.int32).tolist() == [0, 3, 1, 4, 2, 5]
    assert os.pread(memory.fd, 1, 40) == b"\1"


def test_growing_keeps_what_is_there(memory: Snapshot) -> None:
    memory.reserve(10)
    memory.write(0, b"kept")
    memory.reserve(10_000_000)

    assert os.pread(memory.fd, 4, 0) == b"kept"
    assert os.fstat(memory.fd).st_size == memory.num_bytes >= 10_000_000


def test_preparing_touches_every_page_and_changes_nothing(memory: Snapshot) -> None:
    memory.reserve(4096)
    memory.write(0, b"kept")

    memory.prepare(50_000_000)
    memory.settle()

    assert os.fstat(memory.fd).st_blocks * 512 >= 50_000_000
    assert os.pread(memory.fd, 4, 0) == b"kept"


def test_a_save_does_not_wait_for_all_of_the_preparing(memory: Snapshot) -> None:
    memory.prepare(400_000_000)
    memory.reserve(100)

    assert os.fstat(memory.fd).st_blocks * 512 < 400_000_000


class FakeCuda:
    """Notes the calls that matter; CUDA itself is not here."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self.calls, f"side {device.index}")

    def Event(self) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self.calls)

    def current_stream(self, device: Any) -> str:
        return f"training's {device.index}"

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append("off")


class FakeStream:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: str) -> None:
        self.calls.append(f"{self.name} waits for {other}")


class FakeEvent:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.of = ""

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name
        self.calls.append(f"event on {self.of}")

    def synchronize(self) -> None:
        self.calls.append(f"wait for event on {self.of}")


class FakeSource:
    def __init__(self, name: str, device: int) -> None:
        self.name, self.device = name, torch.device("cuda", device)


class FakeTarget:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def copy_(self, source: FakeSource, *, non_blocking: bool) -> None:
        self.calls.append(f"copy {source.name}{' without waiting' if non_blocking else ''}")


def test_copies_wait_for_training_s_queued_work_and_the_host_waits_for_all_copies() -> None:
    cuda = FakeCuda()
    copies = CudaCopies(cast("Any", cuda))
    pairs: Any = [(FakeTarget(cuda.calls), FakeSource(name, device)) for name, device in (("a", 0), ("b", 1), ("c", 0))]

    for _ in range(2):
        cuda.calls.clear()
        copies.copy(pairs)

        assert cuda.calls[:7] == [
            "side 0 waits for training's 0",
            "on side 0",
            "copy a without waiting",
            "off",
            "side 1 waits for training's 1",
            "on side 1",
            "copy b without waiting",
        ]
        assert cuda.calls[8:11] == ["on side 0", "copy c without waiting", "off"]
        assert sorted(cuda.calls[11:13]) == ["event on side 0", "event on side 1"]
        assert sorted(cuda.calls[13:]) == ["wait for event on side 0", "wait for event on side 1"]


def test_memory_is_pinned_once_by_its_own_device_and_unpinned_before_it_moves(
    memory: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(snapshot, "pin", lambda *args: not calls.append(("pin", args[-1])))  # type: ignore[func-returns-value]
    monkeypatch.setattr(snapshot, "unpin", lambda *args: calls.append(("unpin", args[-1])))
    device = torch.device("cuda", 3)

    memory.prepare(1000, device)
    memory.settle()
    memory.prepare(100, device)
    memory.reserve(100_000)
    memory.prepare(200_000, device)
    memory.close()

    assert calls == [("pin", device), ("unpin", device), ("pin", device), ("unpin", device)]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    memory: Snapshot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot, "pin", lambda *_: False)

    memory.prepare(1000, torch.device("cuda", 0))
    memory.settle()

    assert "could not be pinned" in caplog.text


def test_pinning_without_cuda_says_no() -> None:
    if not torch.cuda.is_available():
        assert not device_copy.pin(0, 4096, torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_snapshot_of_a_gpu_holds_what_was_there_when_it_was_taken(memory: Snapshot) -> None:
    values: list[Tensor] = [torch.randn(1000, 1000, device="cuda") for _ in range(8)]
    num_bytes = 4_000_000
    memory.prepare(8 * num_bytes, values[0].device)
    memory.settle()
    assert memory._pinned_by == values[0].device
    for value in values:
        value.add_(1)
    wanted = [value.clone() for value in values]

    memory.copy((number * num_bytes, value) for number, value in enumerate(values))
    for value in values:
        value.zero_()

    for number, want in enumerate(wanted):
        raw = bytearray(os.pread(memory.fd, num_bytes, number * num_bytes))
        assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).reshape(1000, 1000), want.cpu())
