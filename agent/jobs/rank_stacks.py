"""Takes the stacks of ranks: by their probes, or from outside for those that do not answer.

`StackTaker` asks all probes at the same time. A probe answers by a file within some milliseconds, unless its process is
stopped, or holds the interpreter's lock in C code, or has no probe. py-spy sees such a process where it is installed
and may look; the kernel always gives something. It lives on the event loop's thread; what a rank has written is hostile
until it is decoded.

`OutsideLooks` looks from outside at ranks that do not report, and at the processes that ranks wait for; one look at a
time. py-spy reads beside the process and does not stop it. A process is looked at immediately for each reason: a rank
whose last report is old and stays the last one, or a child that a rank names. A child is looked at again now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from agent.files import read_regular
from agent.node_state.observations import SeenFromOutside
from agent.processes import shim
from agent.processes.py_spy import PySpy, SpyError
from agent.processes.worker_sampler import has_uninterruptible_thread, kernel_facts
from agent.wire.stacks import RankStacks, Stacks, StackSource, sendable_ranks
from ddpcore.wire import DumpStacks, MalformedReportError, Place
from ddpcore.wire_stacks import MAX_STACK_FILE_BYTES, decode_stack_dump, stack_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.node_state.node_state import NodeState, OutsideWish
    from agent.wire.stacks import KernelFacts
    from ddpcore.wire import ProbeRequest
    from ddpcore.wire_stacks import StackDump, ThreadStack

ANSWER_S = 1.0
"""Seconds that a probe has to answer: it takes 5 to 20 ms, 0.1 s where all cores compute."""
POLL_S = 0.01
TOTAL_S = 8.0
"""Seconds in all, below the ten that a console waits for a reply."""


class RanksHere(Protocol):
    """A job's ranks on this node, and how their probes are asked."""

    @property
    def job_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def python(self) -> str:
        """The ranks' interpreter."""

    @property
    def ranks_dir(self) -> Path:
        """Directory in which probes answer."""

    def new_request_id(self) -> int: ...

    def ask(self, rank: int, request: ProbeRequest) -> bool:
        """Send a request to a probe; return whether it listens."""


class _Order(NamedTuple):
    job: RanksHere
    request_id: int
    spy: str | None
    """Path of py-spy."""
    is_native: bool
    deadline_s: float


class StackTaker:
    """Takes stacks of any job of a node."""

    def __init__(self) -> None:
        self.py_spy = PySpy()

    @property
    def spy_pids(self) -> set[int]:
        """Child processes that are looking at ranks now."""
        return self.py_spy.pids

    async def take(self, job: RanksHere, pids: Callable[[str], Mapping[int, int]], *, is_native: bool) -> Stacks:
        """Return the stacks of a job that runs.

        `pids` returns the processes of a job's ranks now; with `is_native` the frames of C and C++ are included.
        """
        began_s = time.monotonic()
        # It looks at the job's own directories, which may be on a file system that does not answer.
        spy = None
        with contextlib.suppress(TimeoutError):
            spy = await self.py_spy.find(job.python, ANSWER_S)
        order = _Order(job, job.new_request_id(), spy, is_native, began_s + TOTAL_S)
        before = pids(job.job_id)
        looks = (self._look_at(order, rank, before.get(rank)) for rank in job.ranks)
        ranks = await asyncio.gather(*looks)
        return Stacks(job.job_id, job.attempt, time.monotonic() - began_s, sendable_ranks(ranks))

    async def _look_at(self, order: _Order, rank: int, pid: int | None) -> RankStacks:
        kernel = kernel_facts(pid) if pid else None
        if pid is None or kernel is None:
            return RankStacks(rank, StackSource.NONE, note="it has no process: it has not started yet, or has ended")
        dump, why = await _ask_probe(order, rank, kernel)
        found = RankStacks(rank, StackSource.KERNEL, pid, kernel=kernel, note=why)
        if dump:
            found = msgspec.structs.replace(
                found,
                source=StackSource.PROBE,
                threads=dump.threads,
                num_threads_left_out=dump.num_threads_left_out,
                pending=dump.pending,
                recorded=dump.recorded,
                versions=dump.versions,
            )
        if dump and not order.is_native:
            return found
        return await self._look_from_outside(order, found, kernel)

    async def _look_from_outside(self, order: _Order, found: RankStacks, kernel: KernelFacts) -> RankStacks:
        """Return what py-spy sees, else what is known, with the reason for it."""
        if order.spy is None:
            return _noted(found, "py-spy is not installed there: pip install py-spy; rankdeck inspect brings its own")
        # A process that is stopped, or cannot be, is not traced, only read.
        whats_in_the_way = _whats_in_the_way(kernel, found.pid) if order.is_native else ""
        is_native = order.is_native and not whats_in_the_way
        if whats_in_the_way:
            found = _noted(found, f"no native frames: {whats_in_the_way}")
        try:
            threads, num_left_out = await self.py_spy.dump(
                order.spy, found.pid, is_native=is_native, deadline_s=order.deadline_s
            )
        except SpyError as error:
            return _noted(found, str(error))
        if not any(thread.frames for thread in threads):
            return _noted(found, "py-spy sees no frames of it: it is ending")
        return msgspec.structs.replace(
            found, source=StackSource.PY_SPY, threads=threads, num_threads_left_out=num_left_out
        )


def _whats_in_the_way(kernel: KernelFacts, pid: int) -> str:
    """Return why a process cannot be traced, empty where it can."""
    if kernel.is_stopped:
        return "the process is stopped"
    return "a thread of it waits in the kernel (state D)" if has_uninterruptible_thread(pid) else ""


async def _ask_probe(order: _Order, rank: int, kernel: KernelFacts) -> tuple[StackDump | None, str]:
    """Return the answer of a rank's probe, or why there is none."""
    if kernel.is_stopped:
        return None, "its process is stopped, and its probe with it"
    path = order.job.ranks_dir / stack_file(rank)
    with contextlib.suppress(OSError):
        path.unlink()  # an answer to an earlier request
    if not order.job.ask(rank, DumpStacks(order.request_id)):
        return None, "no probe listens: the rank is ending, or has not imported torch"
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        try:
            dump = read_stack_file(path)
        except MalformedReportError as error:
            return None, f"its probe's answer cannot be read: {error}"[:512]
        # A later request is answered too by a file that shows the rank as it is now.
        if dump and dump.rank == rank and dump.request_id >= order.request_id:
            return dump, ""
    return None, f"its probe has not answered in {ANSWER_S:g} s: C code may hold the interpreter's lock"


def read_stack_file(path: Path) -> StackDump | None:
    """Return what a probe has written, None while there is nothing; raise MalformedReportError for anything else."""
    try:
        return decode_stack_dump(read_regular(path, MAX_STACK_FILE_BYTES + 1))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MalformedReportError(f"{path.name} cannot be read: {error.strerror}") from error


def _noted(found: RankStacks, text: str) -> RankStacks:
    return msgspec.structs.replace(found, note=f"{found.note}; {text}" if found.note else text)


LOOK_S = 5.0
"""Longest time in seconds of one look."""
AGAIN_S = 10.0
"""Seconds between two looks at one child, and after a look that failed."""
MAX_LOOKS = 3
"""Looks at one rank's process for one report, and at one child that cannot be seen."""
MAX_KNOWN = 4096
MAX_ANCESTORS = 16
"""Generations between a child that a rank waits for and the rank."""
_PARENT = 1
"""Index of the parent behind the name in /proc/PID/stat. Source: proc_pid_stat(5)."""


class _Look(msgspec.Struct):
    """Looks at one process for one reason."""

    due_s: float = 0.0
    num_failed: int = 0


class OutsideLooks:
    """Looks from outside; lives on the event loop's thread."""

    def __init__(self, state: NodeState, py_spy: PySpy) -> None:
        self._state = state
        self._py_spy = py_spy
        self._looks: dict[OutsideWish, _Look] = {}
        self._task: asyncio.Task[None] | None = None

    def tick(self, job: RanksHere) -> None:
        """Begin a look if a rank of this job needs one and none is running."""
        if self._task is not None and not self._task.done():
            return
        now_s = time.monotonic()
        for wish in self._state.wishes_from_outside(job.job_id, now_s):
            look = self._looks.get(wish) or _Look()
            if now_s >= look.due_s and look.num_failed < MAX_LOOKS:
                if len(self._looks) >= MAX_KNOWN:
                    self._looks.clear()
                self._looks[wish] = look
                look.due_s = now_s + AGAIN_S
                self._task = asyncio.get_running_loop().create_task(self._look_at(job, wish, look))
                return

    def close(self) -> None:
        """Cancel a look that is running."""
        if self._task is not None:
            self._task.cancel()

    async def _look_at(self, job: RanksHere, wish: OutsideWish, look: _Look) -> None:
        if not _descends_from(wish.pid, wish.rank_pid):
            look.num_failed = MAX_LOOKS
            return
        deadline_s = time.monotonic() + LOOK_S
        try:
            spy = await self._py_spy.find(job.python, LOOK_S)
            if spy is None:
                look.num_failed = MAX_LOOKS
                return
            threads, _ = await self._py_spy.dump(spy, wish.pid, is_native=False, deadline_s=deadline_s)
        except (SpyError, TimeoutError):
            look.num_failed += 1
            return
        if not wish.is_child:
            look.num_failed = MAX_LOOKS  # once is enough: it does not move
        seen = SeenFromOutside(wish.job_id, wish.rank, wish.pid, wish.report_seq, own_place(threads))
        with contextlib.suppress(KeyError):  # the job has gone
            self._state.apply(seen, time.monotonic())


def own_place(threads: list[ThreadStack]) -> Place | None:
    """Return the innermost line of the main thread that is the user's, else its innermost one."""
    frames = threads[0].frames if threads else []
    own = next((frame for frame in frames if frame.is_own), frames[0] if frames else None)
    return None if own is None else Place(own.file, own.line, own.function)


def _descends_from(pid: int, ancestor: int) -> bool:
    """Return whether a process is another one or descends from it: a rank may name any pid."""
    for _ in range(MAX_ANCESTORS):
        if pid == ancestor:
            return True
        fields = shim.stat_fields(pid) if pid > 1 else None
        if not fields:
            return False
        pid = int(fields[_PARENT])
    return False
