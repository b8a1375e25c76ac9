"""Who waits for whom on a real device's streams, said to a module that only writes it down."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpcore.prefetch import AcceleratorCopyStream, _side_stream, copy_stream_of, with_index

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cuda", 1)


class RecordingModule:
    """Stands in for `torch.cuda`, whose streams need a GPU."""

    def __init__(self) -> None:
        self.said: list[str] = []
        said = self.said

        class Stream:
            def __init__(self, device: torch.device, name: str = "side") -> None:
                assert device == DEVICE
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                said.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                said.append(f"{self.name} waits for an event of {event.on}")

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking
                self.on = "nothing"

            def record(self, stream: Stream) -> None:
                self.on = stream.name

            def synchronize(self) -> None:
                said.append(f"the host waits for an event of {self.on}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream(device, "compute")

    def current_device(self) -> int:
        return 1

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.said.append(f"on {stream.name}")
        yield


class RecordingTensor:
    """A tensor on the CPU, of a torch that has a GPU."""

    device = torch.device("cpu")

    def __init__(self, said: list[str], *, is_pinned: bool) -> None:
        self._said, self._is_pinned = said, is_pinned

    def is_pinned(self) -> bool:
        return self._is_pinned

    def pin_memory(self) -> RecordingTensor:
        return RecordingTensor(self._said, is_pinned=True)

    def to(self, device: torch.device, *, non_blocking: bool) -> RecordingTensor:
        assert self._is_pinned
        self._said.append(f"copied to {device}, {non_blocking=}")
        return self

    def record_stream(self, stream: Any) -> None:
        self._said.append(f"used by {stream.name}")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingModule]:
    module = RecordingModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    _side_stream.cache_clear()
    yield module
    _side_stream.cache_clear()


def test_the_side_stream_waits_copies_and_is_waited_for(module: RecordingModule) -> None:
    stream: Any = AcceleratorCopyStream(DEVICE)
    plain = RecordingTensor(module.said, is_pinned=False)
    pinned = RecordingTensor(module.said, is_pinned=True)

    stream.wait_for_compute()
    with stream.copying():
        arrived = [stream.copy(stream.pin(tensor)) for tensor in (plain, pinned)]
    mark = stream.mark()
    stream.compute_waits(mark)
    stream.compute_uses(arrived[0])
    stream.finish(mark)

    assert stream.pin(pinned) is pinned
    assert module.said == [
        "side waits for compute",
        "on side",
        "copied to cuda:1, non_blocking=True",
        "copied to cuda:1, non_blocking=True",
        "compute waits for an event of side",
        "used by compute",
        "the host waits for an event of side",
    ]


def test_a_device_without_a_number_is_the_current_one_and_has_one_side_stream(module: RecordingModule) -> None:
    assert with_index(torch.device("cuda")) == DEVICE
    assert copy_stream_of(torch.device("cuda")) is copy_stream_of(DEVICE)


def test_a_device_whose_module_has_no_streams_has_no_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _device: object())

    assert copy_stream_of(torch.device("mps")) is None
    assert with_index(torch.device("mps")) == torch.device("mps")
