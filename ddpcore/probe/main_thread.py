"""Observes what the main thread of a rank waits for: a collective, a peer, a child process, or its own exit.

`MainWaits` finds waits outside collectives by the thread's frames. It looks at frames only while the rank stands still,
and keeps none of them. It reads locals of the standard library's and torch's own frames (the process that is waited
for), never the program's: before Python 3.13 that would keep its tensors alive as long as the frame.

`MainThread` asks the kernel whether the thread works while a collective is under way, by what it sleeps in. A rank that
waits in a collective sleeps in a futex. Backward that runs beside DDP's reductions is running, a program that sleeps or
reads a file does so in another system call. A thread that waits for the interpreter's lock sleeps in a futex too, and
seems to wait for the collective.
"""

from __future__ import annotations

import dis
import os
import platform
import threading
from typing import TYPE_CHECKING, Any

from ddpcore.probe.samples import NOTHING, MainLook
from ddpcore.probe.stack import MAX_FRAMES, current_frames, no_collection, sendable
from ddpcore.wire import (
    DEFAULT_GROUP,
    MONITORED_BARRIER,
    NEW_COMMUNICATOR,
    NEW_GROUP,
    ChildWait,
    ExitWait,
    PeerCall,
    PeerWait,
    StoreMeeting,
)

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from ddpcore.probe.program_calls import PeerCalls
    from ddpcore.probe.stack import StackWalk

MAX_CALLS_KNOWN = 256
_MAX_NAME_CHARS = 256

_C10D = "/torch/distributed/distributed_c10d.py"
FIRST_CALLS = frozenset(
    {"allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"}
    | {"alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather", "reduce", "scatter"}
    | {"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"}
)
"""Methods of a group that a function of distributed_c10d calls, each a collective."""
_PEER_FUNCTIONS = {"send": "send", "recv": "recv"}
_RENDEZVOUS = "/torch/distributed/rendezvous.py"
_MAX_INT32, _MAX_PORT = 2**31, 65535
_LOADER = "/torch/utils/data/dataloader.py"
_LOADER_FUNCTIONS = frozenset({"_get_data", "_try_get_data"})
_SUBPROCESS = "/subprocess.py"
_SUBPROCESS_FUNCTIONS = frozenset({"_wait", "_communicate", "_try_wait", "wait", "communicate"})
_POPEN = (
    "/multiprocessing/popen_fork.py",
    "/multiprocessing/popen_spawn_posix.py",
    "/multiprocessing/popen_forkserver.py",
)
PROGRAMS = frozenset({"<module>", "_run_module_as_main", "_bootstrap"})
"""Functions at the root of a stack while the program runs: a script's, that of `python -m`, a thread's."""
_WAIT = frozenset({"wait"})
_WAITPID = frozenset({"waitpid", "waitid", "wait3", "wait4"})


class MainWaits:
    """Looks at the main thread of this process; `walk` reads the lines of other threads."""

    def __init__(self, thread_id: int, walk: StackWalk, peer_calls: PeerCalls) -> None:
        self._thread_id = thread_id
        self._walk = walk
        self._peer_calls = peer_calls
        self._names: dict[tuple[int, int], str] = {}
        """Name of the method that code calls at an instruction, by the code's id."""
        self._codes: list[CodeType] = []
        """Code objects, kept alive: another's code could get the id of one of them."""

    def look(self, *, is_still: bool) -> MainLook:
        """Return where the main thread stands now; unless it `is_still`, only sends and receives are looked at."""
        if not (is_still or self._peer_calls.is_used):
            return NOTHING
        with no_collection:
            return self._look(is_still=is_still)

    def _look(self, *, is_still: bool) -> MainLook:
        innermost = current_frames().get(self._thread_id)
        if innermost is None:
            return NOTHING
        peer_wait = self._peer_wait(innermost)
        if not is_still:
            return NOTHING if peer_wait is None else MainLook(peer_wait=peer_wait)
        frames = _frames_of(innermost)
        peer_wait = peer_wait or _monitored_barrier(innermost) or _new_group(frames) or self._first_call(innermost)
        mark = hash(tuple((id(frame.f_code), frame.f_lasti) for frame in frames))
        exit_wait = self._exit_wait(frames)
        child_wait = None if peer_wait or exit_wait else self._child_wait(frames)
        return MainLook(mark, peer_wait, child_wait, exit_wait, _store_meeting(frames))

    def _peer_wait(self, innermost: FrameType) -> PeerWait | None:
        if not (self._peer_calls.is_used and self._calls_one_of(_WAIT, innermost)):
            return None
        calls = self._peer_calls.open_calls(self._thread_id)
        code = innermost.f_code
        op = _PEER_FUNCTIONS.get(code.co_name) if code.co_filename.endswith(_C10D) else None
        if op is not None:
            # It waits for the call that it has made last.
            calls = [call for call in calls if call.op == op][-1:]
        return PeerWait(calls) if calls else None

    def _first_call(self, innermost: FrameType) -> PeerWait | None:
        """Return the wait in NCCL's start of a communicator of all ranks, which a group's first collective makes.

        No recorder holds that collective yet. Of a smaller group nobody is waited for in it, as in `_new_group`.
        Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `initNCCLComm`, torch 2.4 to 2.13.
        """
        code = innermost.f_code
        if not (code.co_filename.endswith(_C10D) and self._calls_one_of(FIRST_CALLS, innermost)):
            return None
        group, names = innermost.f_locals.get("group"), innermost.f_globals
        try:
            world = names["GroupMember"].WORLD
            is_of_all = group is None or group.size() == world.size()
            is_nccl = "nccl" in str(names["get_backend"](group))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return None  # the group may be destroyed just now, and torch may change its names
        return PeerWait([PeerCall(NEW_COMMUNICATOR, None)]) if is_of_all and is_nccl else None

    def _calls_one_of(self, methods: frozenset[str], frame: FrameType) -> bool:
        """Return whether a frame calls one of some methods now.

        Code that has none of their names is not disassembled: a compiled model's takes tens of milliseconds.
        """
        if methods.isdisjoint(frame.f_code.co_names):
            return False
        key = (id(frame.f_code), frame.f_lasti)
        known = self._names.get(key)
        if known is None:
            if len(self._names) >= MAX_CALLS_KNOWN:
                self._names.clear()
                self._codes.clear()
            self._codes.append(frame.f_code)
            known = self._names[key] = called_method(frame.f_code, frame.f_lasti)
        return known in methods

    def _child_wait(self, frames: list[FrameType]) -> ChildWait | None:
        for frame in frames:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith(_LOADER) and function in _LOADER_FUNCTIONS:
                return _loader_worker(frame.f_locals.get("self"))
            if file.endswith(_SUBPROCESS) and function in _SUBPROCESS_FUNCTIONS:
                return _child("subprocess", frame.f_locals.get("self"))
            if file.endswith(_POPEN) and function in {"poll", "wait"}:
                return _child("process", frame.f_locals.get("self"))
        if self._calls_one_of(_WAITPID, frames[0]):
            children = child_pids()
            return ChildWait(children[0], "process") if len(children) == 1 else None
        return None

    def _exit_wait(self, frames: list[FrameType]) -> ExitWait | None:
        """Return what the interpreter's end waits for, once the program's own code has ended."""
        outermost = frames[-1].f_code
        if len(frames) == MAX_FRAMES or outermost.co_name in PROGRAMS:
            return None
        named = {(frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name) for frame in frames}
        if ("threading.py", "_shutdown") in named:
            return self._joined_thread() or ExitWait("")
        if ("util.py", "_exit_function") in named:
            if ("queues.py", "_finalize_join") in named:
                return ExitWait("queue")
            child = self._child_wait(frames)
            return ExitWait("process", pid=child.pid if child else 0)
        return ExitWait("atexit", sendable(outermost.co_name, _MAX_NAME_CHARS), self._walk.read(self._thread_id).place)

    def _joined_thread(self) -> ExitWait | None:
        """Return the first thread that the interpreter waits for before it ends."""
        for thread in threading.enumerate():
            if thread.daemon or thread.ident in (None, self._thread_id):
                continue
            place = self._walk.read(thread.ident or 0).place
            return ExitWait("thread", sendable(thread.name, _MAX_NAME_CHARS), place)
        return None


def called_method(code: CodeType, at: int) -> str:
    """Return the name of the method that the instruction at a place calls: the last attribute looked up before it."""
    name = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > at:
            break
        if instruction.opname in {"LOAD_METHOD", "LOAD_ATTR"}:
            name = str(instruction.argval)
        elif instruction.opname == "RESUME":
            name = ""
    return name


def child_pids() -> list[int]:
    """Return the children of this process. Source: proc_pid_task_children(5)."""
    found: list[int] = []
    try:
        for task in os.scandir("/proc/self/task"):
            with open(f"{task.path}/children", "rb") as file:  # noqa: PTH123 - no path object in a process that trains
                found += map(int, file.read().split())
    except OSError:
        return found
    return found


def _monitored_barrier(innermost: FrameType) -> PeerWait | None:
    """Return the wait in a monitored_barrier, which no recorder holds.

    Source: torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
    """
    code = innermost.f_code
    if code.co_name != MONITORED_BARRIER or not code.co_filename.endswith(_C10D):
        return None
    name = getattr(innermost.f_locals.get("group"), "group_name", DEFAULT_GROUP)
    return PeerWait([PeerCall(MONITORED_BARRIER, None, sendable(str(name), _MAX_NAME_CHARS))])


def _new_group(frames: list[FrameType]) -> PeerWait | None:
    """Return the wait in the making of a group of all ranks: each waits there for the others, in no recorder.

    Of a smaller group it is not known here who its members are by the ranks of others: nobody is waited for in it.
    Source: torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
    """
    for frame in frames:
        if frame.f_code.co_name == "_new_group_with_tag" and frame.f_code.co_filename.endswith(_C10D):
            ranks, world_size = frame.f_locals.get("ranks"), frame.f_locals.get("global_world_size")
            is_of_all = isinstance(ranks, list) and len(ranks) == world_size
            return PeerWait([PeerCall(NEW_GROUP, None)]) if is_of_all else None
    return None


def _store_meeting(frames: list[FrameType]) -> StoreMeeting | None:
    """Return where the ranks meet, while this one is at torch's store.

    Source: torch/distributed/rendezvous.py, torch 2.0 to 2.13.
    """
    for frame in frames:
        if frame.f_code.co_name == "_create_c10d_store" and frame.f_code.co_filename.endswith(_RENDEZVOUS):
            known = [frame.f_locals.get(name) for name in ("hostname", "port", "rank", "world_size")]
            numbers = [one for one in known[1:] if isinstance(one, int) and abs(one) < _MAX_INT32]
            if len(numbers) == len(known) - 1 and 0 <= numbers[0] <= _MAX_PORT:
                return StoreMeeting(sendable(str(known[0]), _MAX_NAME_CHARS), *numbers)
    return None


def _loader_worker(iterator: Any) -> ChildWait | None:
    """Return the worker whose batch a loader waits for.

    Source: _MultiProcessingDataLoaderIter in torch/utils/data/dataloader.py, torch 2.0 to 2.13.
    """
    try:
        worker = iterator._task_info[iterator._rcvd_idx][0]  # noqa: SLF001 - there is nothing public
        return ChildWait(int(iterator._workers[worker].pid), "loader worker")  # noqa: SLF001
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def _child(what: str, popen: Any) -> ChildWait | None:
    pid = getattr(popen, "pid", None)
    return ChildWait(pid, what) if isinstance(pid, int) and pid > 0 else None


def _frames_of(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


FUTEX_CALLS = {"x86_64": (b"202", b"449"), "aarch64": (b"98", b"449")}
"""Numbers of futex and futex_waitv (Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl, asm-generic/unistd.h)."""

MAX_BYTES = 64


class MainThread:
    """Kernel's state of a thread of this process; half a microsecond a look."""

    def __init__(self, native_id: int | None) -> None:
        self._futex_calls = FUTEX_CALLS.get(platform.machine(), ())
        self._file: int | None = None
        if native_id is not None and self._futex_calls:
            try:
                self._file = os.open(f"/proc/self/task/{native_id}/syscall", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._file = None  # a kernel without it, or one that does not let us

    def is_at_work(self) -> bool:
        """Return whether the thread runs, or sleeps in anything but a futex; False where that is not known."""
        if self._file is None:
            return False
        try:
            call = os.pread(self._file, MAX_BYTES, 0).split(maxsplit=1)
        except OSError:
            return False
        return bool(call) and call[0] not in self._futex_calls
