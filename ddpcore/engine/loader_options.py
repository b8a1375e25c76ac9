"""What programs may choose of torch's DataLoader: typed, and checked before any worker starts."""

from __future__ import annotations

import difflib
import signal
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from ddpcore.arguments import BELOW_ZERO, MAX_SECONDS, check_flag, check_number, check_whole, refuse
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.context import BaseContext
    from types import FrameType

    from torch.utils.data import Dataset

MAX_COUNT = 1 << 16


class LoaderOptions(TypedDict, total=False):
    """Options of torch's DataLoader. Batches, their order and their random state are the engine's.

    Attributes:
        num_workers: Processes that read samples; 0 reads in this one.
        collate_fn: Makes a batch of a list of samples; None is torch's own.
        pin_memory: By default where batches go to a CUDA device.
        timeout: Seconds to wait for a worker's batch, only with workers; 0 waits without end.
        worker_init_fn: Called in each worker with its number; None for none.
        multiprocessing_context: "fork", "spawn", "forkserver", or a context; None is Python's own.
        prefetch_factor: Batches that each worker reads ahead; only with workers.
        persistent_workers: Workers outlive the epoch; only with workers.
    """

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    prefetch_factor: int | None
    persistent_workers: bool


class TrainingLoaderOptions(LoaderOptions, total=False):
    """Options of `Engine.loader`.

    Attributes:
        prefetch: Batches that are on their way to an accelerator while a step computes.
    """

    prefetch: int


OWN = {
    "batch_size": "global_batch_size= in loader, batch_size= in evaluate",
    "shuffle": "shuffle= of loader",
    "sampler": "order= of loader",
    "batch_sampler": "order= of loader",
    "drop_last": "drop_last= of loader",
    "generator": "seed= of Engine",
    "seed": "seed= of Engine",
    "device": "device= of Engine",
    "weights": "two things: the ranks' are rank_weights=, and those of samples order=WeightedOrder(weights)",
    "pin_memory_device": "device= of Engine",
    "in_order": "always True: what counts as done, and what predict returns, goes by the order of the samples",
}
"""Options of a DataLoader that the engine sets, with the argument that replaces each."""


def check_loader_options(options: Mapping[str, object]) -> None:
    """Raise EngineUseError for options that a DataLoader does not take, or that are not the program's to choose."""
    for name, value in options.items():
        if name not in LoaderOptions.__annotations__:
            near = difflib.get_close_matches(name, LoaderOptions.__annotations__, n=1)
            hint = f"it is {OWN[name]}" if name in OWN else f"{near[0]!r} is one" if near else "leave it out"
            raise EngineUseError(f"a loader has no option {name!r} here: {hint}")
        if name in ("pin_memory", "persistent_workers"):
            check_flag(EngineUseError, name, value)
        elif name == "num_workers":
            check_whole(EngineUseError, name, value, least=0, most=MAX_COUNT)
        elif name == "timeout":
            wanted = "a number of seconds, 0 for no end"
            check_number(EngineUseError, name, value, range_=(BELOW_ZERO, MAX_SECONDS), wanted=wanted)
        elif name == "prefetch_factor" and value is not None:
            check_whole(EngineUseError, name, value, most=MAX_COUNT, wanted="a number above 0, or None")
        elif name in ("collate_fn", "worker_init_fn") and value is not None and not _is_function(value):
            raise refuse(EngineUseError, name, value, "a function, or None")


def make_loader(dataset: Dataset[Any], arguments: Mapping[str, Any], options: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a DataLoader with the engine's arguments and the program's options; raise EngineUseError if they clash."""
    check_loader_options(options)
    if options.get("timeout") and not options.get("num_workers"):
        raise refuse(EngineUseError, "timeout", options["timeout"], "num_workers too: it is they who are waited for")
    if options.get("num_workers"):
        options = {**options, "worker_init_fn": partial(_start_worker, options.get("worker_init_fn"))}
    try:
        return _Loader(dataset, **arguments, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise EngineUseError(f"torch's DataLoader refuses its options: {error}") from error


class _Loader(DataLoader[Any]):
    """A DataLoader whose workers read on while their rank takes its last steps to a stop.

    torchrun sends SIGTERM to a rank's whole process group, and Slurm with proctrack/linuxproc, SIGUSR1 too, to every
    process of a step: a worker that ended by it would end its rank by an error, before the checkpoint (torch 2.13,
    Slurm 22.05).
    """

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        for worker in getattr(iterator, "_workers", ()):
            popen = worker._popen  # noqa: SLF001 - torch and Python end workers by its `terminate`, a SIGTERM
            popen.terminate = partial(_end_worker, id(iterator), weakref.ref(popen))
        return iterator


def _start_worker(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    # Not SIG_IGN, which programs that the worker starts would inherit.
    for wish in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(wish, _take_no_action)
    if worker_init_fn is not None:
        worker_init_fn(number)


def _take_no_action(number: int, frame: FrameType | None) -> None:
    """Leave the end to the rank: a worker sees within 5 s that it has none any more."""


def _end_worker(iterator_id: int, popen: weakref.ref[Any]) -> None:
    """End a worker in place of SIGTERM, which it ignores; its rank is to take that for no failure."""
    with suppress(ValueError):
        signal_handling._remove_worker_pids(iterator_id)  # type: ignore[attr-defined] # noqa: SLF001 - as torch does
    if (process := popen()) is not None:
        process.kill()


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def whole(batches: Iterable[Any], num_batches: int) -> Iterator[Any]:
    """Yield batches; raise EngineUseError if they end before the last one.

    A data set that raises StopIteration ends a loop over a loader without a word.
    """
    number = 0
    for batch in batches:
        number += 1
        yield batch
    if number < num_batches:
        raise EngineUseError(
            f"the data set has ended after {number} of {num_batches} batches by raising StopIteration, as next() does "
            "at the end of an iterator: its length is too large, or it should raise another error"
        )
