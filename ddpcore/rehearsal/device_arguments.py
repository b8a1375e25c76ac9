"""GPUs named in calls of torch, as the CPU that stands for them: `.to("cuda:1")`, `device=0`, `map_location`.

A `TorchFunctionMode` sees each call that torch lets be overridden, with its arguments: torch's own default device
works the same way (torch/utils/_device.py). Methods and classes that no mode sees are replaced by name.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CPU = torch.device("cpu")
_CUDA_TYPES = "torch.cuda."
"""Beginning of the names of tensor types on GPUs, as `torch.cuda.FloatTensor`."""


def on_cpu(value: object) -> object:
    """Return the CPU for a GPU, named as a device, as a string or as a type of tensors; anything else as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        if value == "cuda" or value.startswith("cuda:"):
            return "cpu"
        if value.startswith(_CUDA_TYPES):
            return f"torch.{value.removeprefix(_CUDA_TYPES)}"
    return value


def device_on_cpu(value: object) -> object:
    """Return the CPU for a GPU, which may also be named by its number; anything else as it is."""
    return CPU if isinstance(value, int) and not isinstance(value, bool) else on_cpu(value)


def location_on_cpu(map_location: Any) -> Any:
    """Return a `map_location` of `torch.load` that puts on the CPU whatever it or the file puts on a GPU."""
    if map_location is None:
        return "cpu"
    if isinstance(map_location, dict):
        # What the map does not name stays where the file had it: on the CPU too.
        return _itself
    if callable(map_location):

        def locate(storage: Any, location: str) -> Any:
            found = map_location(storage, location)
            return storage if found is None else found

        return locate
    return device_on_cpu(map_location)


class GpusAreCpu(TorchFunctionMode):
    """Lets each call see the CPU where it names a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with its arguments translated. Source: torch.overrides.TorchFunctionMode."""
        given = dict(kwargs or {})
        if func is torch.device:  # a program sees the GPU that it names; a number alone is that of a GPU
            is_number = len(args) == 1 and isinstance(args[0], int)
            return func("cuda", *args) if is_number else func(*args, **given)
        if "device" in given:
            given["device"] = device_on_cpu(given["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], device_on_cpu(args[1]), *args[2:])
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in given.items()})


def put_in_place() -> None:
    """Translate devices in this thread, in those that it starts, and where no mode sees them."""
    tensor: Any = torch.Tensor
    untyped: Any = torch.UntypedStorage
    typed: Any = torch.TypedStorage
    for cls in (tensor, untyped, typed):
        cls.cuda = cls.pin_memory = _itself
    tensor.is_pinned = lambda *_arguments, **_named: False
    tensor.record_stream = lambda *_arguments, **_named: None
    # What `Module.to` reads its arguments with.
    _translate_first(torch._C._nn, "_parse_to", device_on_cpu)  # noqa: SLF001 - torch has no other place for it
    _translate_first(torch, "set_default_device", device_on_cpu)
    _translate_first(torch, "set_default_tensor_type", on_cpu)
    _load_on_cpu()
    _threads_too()
    GpusAreCpu().__enter__()  # type: ignore[no-untyped-call]  # for as long as this process lives


def translate_constructor(cls: type, parameter: str) -> None:
    """Let a class of torch see the CPU where its first argument, or the one of this name, is a GPU."""
    original: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        if parameter in kwargs:
            kwargs[parameter] = on_cpu(kwargs[parameter])
        original(self, *map(on_cpu, args[:1]), *args[1:], **kwargs)

    cls.__init__ = constructor  # type: ignore[misc]


def _itself(first: Any, *_arguments: object, **_named: object) -> Any:
    return first


def _translate_first(owner: Any, name: str, translate: Callable[[object], object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return original(*map(translate, args[:1]), *args[1:], **kwargs)

    setattr(owner, name, translated)


def _load_on_cpu() -> None:
    original: Any = torch.load

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, location_on_cpu(map_location), *args, **kwargs)

    torch.load = torch.serialization.load = load


def _threads_too() -> None:
    """Have each thread that this process starts translate devices: torch keeps a mode for its own thread alone."""
    original: Any = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        run = self.run

        def translated() -> None:
            with GpusAreCpu():
                run()

        self.run = translated  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
