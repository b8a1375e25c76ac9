"""What stands for `torch.cuda` and `torch.accelerator` in a rehearsal: GPUs that are there in name only.

They have no memory of their own, no streams and no clock: figures of memory are 0, a stream does at once what it is
given, an event is a moment of this process's clock. A function that has no stand-in raises
`NotImplementedError` with its name, by what torch calls before it reaches for the driver.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "CPU in a rehearsal of rankdeck"
CAPABILITY = (8, 0)
"""Compute capability that programs see: bfloat16 is supported from there on."""
_NO_RESULT = (
    "synchronize", "init", "empty_cache", "ipc_collect", "set_stream", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction", "set_sync_debug_mode",
)  # fmt: skip
_YES = (
    "is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported", "can_device_access_peer",
)  # fmt: skip
_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate",
    "device_memory_used", "get_sync_debug_mode",
)  # fmt: skip

_NO_RESULT_OF_ANY = (
    "synchronize", "empty_cache", "empty_host_cache", "set_stream", "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)  # fmt: skip
_ZERO_OF_ANY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
"""Functions of `torch.accelerator`; those before are of `torch.cuda`."""


class Stream:
    """A stream of a GPU: what is put on it is done at once."""

    cuda_stream = 0
    priority = 0

    def __init__(self, device: object = None, *_priority: object, **_options: object) -> None:
        self.device = torch.device("cuda", _index_of(device))

    def wait_stream(self, stream: object) -> None:
        """Return: the other stream's work is done."""

    def wait_event(self, event: object) -> None:
        """Return: the event's work is done."""

    def synchronize(self) -> None:
        """Return: all work is done."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no graph is made of what is put here."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event, or a new one, with the present moment."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class Event:
    """A moment of this process's clock."""

    def __init__(self, *_timing: object, **_options: object) -> None:
        self._at_s: float | None = None

    def record(self, *_stream: object) -> None:
        """Keep the present moment."""
        self._at_s = time.perf_counter()

    def wait(self, *_stream: object) -> None:
        """Return: what is before the event is done."""

    def synchronize(self) -> None:
        """Return: what is before the event is done."""

    def query(self) -> bool:
        """Return that what is before the event is done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two moments.

        Raises:
            RuntimeError: One of the two was not recorded, as torch has it.
        """
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at_s - self._at_s) * 1e3


_CGenerator = torch.Generator


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # a metaclass of C++
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _CGenerator)


class Generator(torch.Generator, metaclass=_AnyGenerator):
    """A generator of random numbers, on the CPU whatever its device; each of torch's is an instance."""

    def __new__(cls, *_device: object, **_named: object) -> Self:
        """Return one on the CPU."""
        return super().__new__(cls)


class NoGraph:
    """A graph of CUDA, which nothing stands for."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        _refuse()


class Gpus:
    """The GPUs that this process sees.

    Args:
        number: How many; at least as many as there are ranks on this node.
    """

    def __init__(self, number: int) -> None:
        self.number = max(1, number, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
        self._current = 0
        self._random = torch.Generator()
        self._stream = Stream(0)

    def put_in_place(self) -> None:
        """Replace the functions of `torch.cuda` and of `torch.accelerator`."""
        cuda: Any = torch.cuda
        for name in _NO_RESULT:
            setattr(cuda, name, _returns(None))
        for name in _ZERO:
            setattr(cuda, name, _returns(0))
        for name, stand_in in self._functions().items():
            setattr(cuda, name, stand_in)
        for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
            setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
        for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
            setattr(cuda.nvtx, name, _returns(None))
        cuda.nvtx.range = _nothing
        cuda.nccl.version = _returns((0, 0, 0))
        cuda.graphs.CUDAGraph = NoGraph
        vars(torch)["Generator"] = Generator
        accelerator: Any = torch.accelerator
        for name, stand_in in self._accelerator_functions().items():
            setattr(accelerator, name, stand_in)

    def _functions(self) -> dict[str, object]:
        return {
            **dict.fromkeys(_YES, _yes),
            "is_current_stream_capturing": _no,
            "_lazy_init": _refuse,
            "device_count": self._count,
            "current_device": self._current_index,
            "set_device": self._set_current,
            "device": self._on_device,
            "device_of": _nothing,
            "get_device_name": _returns(NAME),
            "get_device_capability": _returns(CAPABILITY),
            "get_device_properties": self._properties,
            "get_arch_list": lambda: ["sm_80"],
            "mem_get_info": _memory_info,
            "memory_stats": lambda *_args, **_kwargs: {},
            "memory_summary": _returns("No GPU memory is used in a rehearsal."),
            "memory_snapshot": lambda *_args, **_kwargs: [],
            "Stream": Stream,
            "ExternalStream": Stream,
            "Event": Event,
            "stream": _nothing,
            "StreamContext": _nothing,
            "current_stream": lambda _device=None: self._stream,
            "default_stream": lambda _device=None: self._stream,
            "CUDAGraph": NoGraph,
            "make_graphed_callables": lambda callables, *_args, **_kwargs: callables,
            "manual_seed": self._random.manual_seed,
            "manual_seed_all": self._random.manual_seed,
            "seed": self._random.seed,
            "seed_all": self._random.seed,
            "initial_seed": self._random.initial_seed,
            "get_rng_state": lambda _device="cuda": self._random.get_state(),
            "get_rng_state_all": lambda: [self._random.get_state()] * self.number,
            "set_rng_state": lambda state, _device="cuda": self._random.set_state(state),
            "set_rng_state_all": lambda states: self._random.set_state(list(states)[self._current]),
            "default_generators": (self._random,) * self.number,
        }

    def _accelerator_functions(self) -> dict[str, object]:
        return {
            **dict.fromkeys(_NO_RESULT_OF_ANY, _returns(None)),
            **dict.fromkeys(_ZERO_OF_ANY, _returns(0)),
            "is_available": _yes,
            "device_count": self._count,
            "current_accelerator": lambda *_args, **_kwargs: torch.device("cuda"),
            "current_device_index": self._current_index,
            "current_device_idx": self._current_index,
            "set_device_index": self._set_current,
            "set_device_idx": self._set_current,
            "device_index": self._on_device,
            "current_stream": lambda _device=None: self._stream,
            "get_memory_info": _memory_info,
            "memory_stats": lambda *_args, **_kwargs: {},
        }

    def _count(self) -> int:
        return self.number

    def _current_index(self) -> int:
        return self._current

    def _set_current(self, device: object) -> None:
        """Raises RuntimeError for a GPU that is not there, as torch does."""
        index = _index_of(device, self._current)
        if index >= self.number:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: {index}, and this rehearsal has {self.number} GPUs"
            )
        self._current = max(0, index)

    @contextlib.contextmanager
    def _on_device(self, device: object) -> Iterator[None]:
        before = self._current
        self._set_current(before if device is None else device)
        try:
            yield
        finally:
            self._current = before

    def _properties(self, _device: object = None) -> SimpleNamespace:
        major, minor = CAPABILITY
        total = _memory_info()[1]
        return SimpleNamespace(
            name=NAME, major=major, minor=minor, total_memory=total, multi_processor_count=os.cpu_count() or 1
        )


def _index_of(device: object, current: int = 0) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", None)
    return current if index is None else int(index)


def _memory_info(_device: object = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _yes(*_args: object, **_kwargs: object) -> bool:
    return True


def _no(*_args: object, **_kwargs: object) -> bool:
    return False


def _returns(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


@contextlib.contextmanager
def _nothing(*_args: object, **_kwargs: object) -> Iterator[None]:
    yield


def _refuse() -> None:
    raise NotImplementedError("rankdeck: this call needs a GPU: a rehearsal on the CPU has nothing that stands for it")
