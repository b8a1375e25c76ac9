"""What is odd about the process that the probe is in, looked at now and then on the probe's thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.wire import Oddity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddpcore.probing.samples import StackLine

FIRST_PERIOD_S = 2.0
LONGEST_PERIOD_S = 32.0
"""Between looks, longer each time: what is odd is so from the beginning, and in a process with children a look takes
0.7 ms with 30 threads beside training."""

GROUPLESS_STEPS = 10
"""Steps without a process group after which a rank trains on its own."""

_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The first that is set counts. Source: torch/csrc/distributed/c10d/FlightRecorder.hpp."""
_LAUNCHER_FILES = (
    "/torch/multiprocessing/spawn.py",
    "/torch/distributed/run.py",
    "/torch/distributed/launcher/api.py",
    "/torch/distributed/elastic/agent/server/api.py",
    "/nvidia_resiliency_ext/fault_tolerance/launcher.py",
    "/accelerate/launchers.py",
)
"""Where the main thread of a process stands that has started ranks and waits for their end."""
_LAUNCHER_MODULES = frozenset(
    {b"torch.distributed.run", b"torch.distributed.launch", b"torchrun", b"ft_launcher", b"accelerate.commands.launch"}
)
_LAUNCHER_PROGRAMS = (b"/torchrun", b"/ft_launcher", b"/accelerate", b"/deepspeed")
_JOIN_FILE, _JOIN = "/multiprocessing/process.py", "join"


class Surroundings:
    """Looks at this process's variables, its main thread and its children.

    Args:
        world_size: Of the job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._due_s = float("-inf")
        self._period_s = FIRST_PERIOD_S
        self._had_process_group = False
        self._has_met = False
        """There has been a process group: a program that trains on, or ends, without one has done its meeting."""
        self._last: tuple[Oddity, ...] = ()

    def look(
        self, now_s: float, stack: Callable[[], Sequence[StackLine]], *, has_process_group: bool, num_steps: int = 0
    ) -> tuple[Oddity, ...]:
        """Return what is odd, variables and children as of the last look.

        Args:
            now_s: Monotonic time.
            stack: Returns the main thread's frames; called when a look is due.
            has_process_group: Before there is one, the program may still change the variables that torch reads then.
            num_steps: Steps of the training so far.
        """
        if has_process_group is not self._had_process_group:
            self._had_process_group = has_process_group
            self._due_s, self._period_s = now_s, FIRST_PERIOD_S
        if now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            self._period_s = min(2.0 * self._period_s, LONGEST_PERIOD_S)
            found = variables_oddities(os.environ) if has_process_group else []
            frames = stack()
            # Before there is a process group, a process that joins children waits for what is to do its work.
            is_parent = not has_process_group and not num_steps and stands_in_join(frames)
            if stands_in_launcher(frames) or is_parent or _has_launched():
                found.append(Oddity.OWN_RANKS)
            self._last = tuple(found)
        self._has_met = self._has_met or has_process_group
        is_alone = num_steps >= GROUPLESS_STEPS and not self._has_met and self._world_size > 1
        return (*self._last, Oddity.GROUPLESS) if is_alone else self._last


def variables_oddities(environ: Mapping[str, str]) -> list[Oddity]:
    """Return what is odd about the variables that torch has read."""
    found = []
    size = next((environ[name] for name in _BUFFER_SIZES if environ.get(name)), "")
    if size.strip() == "0":
        found.append(Oddity.RECORDER_OFF)
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").strip().upper() == "DETAIL":
        found.append(Oddity.DEBUG_DETAIL)
    return found


def stands_in_launcher(stack: Sequence[StackLine]) -> bool:
    """Say whether a main thread waits for ranks that it has started itself."""
    return any(file.endswith(_LAUNCHER_FILES) for file, _, _ in stack)


def stands_in_join(stack: Sequence[StackLine]) -> bool:
    """Say whether a main thread waits for the end of a process of multiprocessing."""
    return any(file.endswith(_JOIN_FILE) and function == _JOIN for file, _, function in stack)


def _has_launched() -> bool:
    """Say whether a child of this process is a torchrun. Source: proc_pid_task_children(5)."""
    if not _has_children():
        return False
    try:
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_bytes().split():
                words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
                if any(word in _LAUNCHER_MODULES or word.endswith(_LAUNCHER_PROGRAMS) for word in words[:8]):
                    return True
    except OSError:
        return False  # a thread or a child that ends just now: the next look sees the others
    return False


def _has_children() -> bool:
    """Say whether this process has children, one ended and not waited for among them; none is waited for here."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
