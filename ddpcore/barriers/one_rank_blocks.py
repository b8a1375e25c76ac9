"""Marks blocks that one rank runs alone, so that calls which need every rank fail there instead of hanging.

    @rank_zero_only
    def log(...): ...

    with only_on_master() as is_mine:
        if is_mine: ...

In such a block ddpcore's own barriers raise at once, and so do the collectives of torch.distributed, also those inside
DDP's forward and backward: a dispatch mode sees them before they are sent. What it cannot see hangs as it always does:
`new_group`, `init_process_group`, and other ways to meet through a store.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcore.arguments import check_flag, check_text, refuse
from ddpcore.errors import BarrierUseError
from ddpcore.probe.stack import sendable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_MEETS_NOBODY = frozenset({"send", "recv_", "recv_any_source_", "wait_tensor"})

MAX_TEXT_CHARS = 300

num_open = 0
"""Blocks open in all threads: where there is none, nobody need ask which."""

_lock = threading.Lock()
_local = threading.local()
_block_of_main_thread = ""


class OneRankBlock:
    """A block that this rank runs alone, while it lasts.

    `text` stands in messages: `first 'corpus'`, `rank_zero_only save`. With `checks_ops` collectives of
    torch.distributed raise in it, which costs every operation of torch in the block 7 us
    (tests/bench/bench_barrier.py). With `is_lone` the other ranks never run it; a first-block they run later, and may
    nest another one in it.
    """

    def __init__(self, text: str, *, checks_ops: bool = True, is_lone: bool = True) -> None:
        self._text = sendable(text, MAX_TEXT_CHARS)
        self._is_lone = is_lone
        self._outer = ("", "")
        is_guarded = checks_ops and dist.is_available() and dist.is_initialized()
        self._mode: AbstractContextManager[object] = _CollectiveGuard(text) if is_guarded else nullcontext()

    def __enter__(self) -> None:
        global num_open  # noqa: PLW0603 - counts the blocks of this process
        with _lock:
            num_open += 1
        self._outer = (current_block(), current_lone_block())
        _set_blocks(self._text, self._text if self._is_lone else self._outer[1])
        self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global num_open  # noqa: PLW0603 - see __enter__
        with _lock:
            num_open -= 1
        _set_blocks(*self._outer)
        self._mode.__exit__(kind, error, trace)


class only_on_master:  # noqa: N801 - used like a function
    """Mark a block in which only rank 0 works: `with only_on_master() as is_mine: if is_mine: ...`.

    The block itself runs on every rank, since `with` cannot skip one: ask what it yields, which is True on rank 0. To
    leave out a whole function on the others take `rank_zero_only`. Any thread; no rank waits.

    Inside, on whichever rank, barriers of ddpcore and collectives of torch.distributed raise `BarrierUseError` at once.
    Sending to one rank and receiving from one are allowed, and collectives in a group of this rank alone.

    Args:
        name: What people read in errors.
        checks_ops: See `OneRankBlock`.
    """

    def __init__(self, name: str = "", *, checks_ops: bool = True) -> None:
        if name != "":
            check_text(BarrierUseError, "name", name)
        check_flag(BarrierUseError, "checks_ops", checks_ops)
        self._block = OneRankBlock(f"only_on_master {name}".strip(), checks_ops=checks_ops)

    def __enter__(self) -> bool:
        self._block.__enter__()
        return _rank() == 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Let only rank 0 run a function, marked as by `only_on_master`; on the other ranks it returns None at once.

    Raises:
        BarrierUseError: It is no function.
    """
    if not callable(function):
        raise refuse(BarrierUseError, "function", function, "a function")

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if _rank() != 0:
            return None
        with OneRankBlock(f"rank_zero_only {getattr(function, '__qualname__', '')}".strip()):
            return function(*args, **kwargs)

    return run


def current_block() -> str:
    """Return the innermost one-rank block of the calling thread, or ""."""
    block: str = getattr(_local, "block", "")
    return block


def current_lone_block() -> str:
    """Return the innermost block around the calling thread that the other ranks never run, or ""."""
    block: str = getattr(_local, "lone_block", "")
    return block


def block_of_main_thread() -> str:
    """Return the innermost one-rank block of the main thread, or ""."""
    return _block_of_main_thread


def _set_blocks(text: str, lone_text: str) -> None:
    global _block_of_main_thread  # noqa: PLW0603 - the heart's thread reads it
    _local.block, _local.lone_block = text, lone_text
    if threading.current_thread() is threading.main_thread():
        _block_of_main_thread = text


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _CollectiveGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation is about to be sent to ranks that do not run this block.

    Source: torch.distributed.tensor.debug.CommDebugMode counts collectives in the same way.
    """

    def __init__(self, text: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._text = text

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            name = func.name().partition("::")[2].partition(".")[0]
            if name not in _MEETS_NOBODY and _num_members(args) > 1:
                raise BarrierUseError(
                    f"{_reported_name(name)} inside {self._text}: the other ranks do not run this block now and would "
                    "never come; move it behind the block, or use the unwrapped module where it is DDP's"
                )
        return func(*args, **(kwargs or {}))


def _reported_name(operation: str) -> str:
    """Return an operation's name as torch.distributed's functions have it."""
    for inner, outer in (("allreduce", "all_reduce"), ("allgather", "all_gather"), ("alltoall", "all_to_all")):
        operation = operation.replace(inner, outer)
    return operation.strip("_")


def _num_members(args: Sequence[Any]) -> int:
    """Return how many ranks take part in an operation."""
    c10d: Any = dist.distributed_c10d
    for arg in args:
        try:
            if isinstance(arg, str):
                # Functional collectives name their group.
                return int(c10d._resolve_process_group(arg).size())  # noqa: SLF001 - as torch's own operations do
            return dist.ProcessGroup.unbox(arg).size()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            # Not a group: a tensor, a number, the name of a reduction.
            continue
    return dist.get_world_size()
