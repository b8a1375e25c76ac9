"""Starts the probe in an unmodified script, at the end of its `import torch`.

The launch plug-in (`ddpcore/launch_plugin`) calls `start_in_rank` in every process of a job that an agent has launched:
torchrun itself, the ranks, and their children. Only the first process of a rank is probed.

`watch_optimizers` observes every step of every torch optimizer, through torch's own global hook.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpcore.env import parse_probe, parse_torchrun
from ddpcore.probe import probe
from ddpcore.probe.flight_recorder import FlightRecorder, count_worlds
from ddpcore.probe.process_facts import record_exits, record_uncaught_errors
from ddpcore.probe.program_calls import count_peer_calls, note_roots, peer_calls
from ddpcore.probe.stack import code_roots
from ddpcore.wire import ENV_PROBED_PID

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpcore.env import ProbeEnv, TorchrunEnv

_PR_SET_PDEATHSIG = 1
_ORPHANED_EXIT_CODE = 128 + signal.SIGKILL


def start_in_rank() -> None:
    """Start the probe if this process is a rank that an agent watches.

    Runs inside the user's `import torch`: the caller lets nothing escape.
    """
    env = parse_probe(os.environ)
    if env is None or "RANK" not in os.environ or env.probed_pid not in (None, os.getpid()):
        return
    torchrun = parse_torchrun(os.environ)
    _die_with_launcher(env)
    start_probe(torchrun, env)


def start_probe(torchrun: TorchrunEnv, env: ProbeEnv) -> None:
    """Start the probe of this process, the first of its rank: its children stay without one."""
    os.environ[ENV_PROBED_PID] = str(os.getpid())
    roots = code_roots()
    record_uncaught_errors(roots, probe.note_uncaught)
    record_exits(roots, probe.note_uncaught)
    probe.start(torchrun, env, roots, FlightRecorder(), peer_calls)
    count_worlds()
    count_peer_calls()
    note_roots()
    watch_optimizers(probe.count_step)


def _die_with_launcher(env: ProbeEnv) -> None:
    """See to it that a killed launcher leaves no rank behind, blocked in a collective for half an hour.

    The kernel watches the thread that set the signal's parent: only the main thread's is torchrun.
    """
    if env.launcher_pid is None or threading.current_thread() is not threading.main_thread():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if _is_orphaned(env.launcher_pid, env.launcher_namespace):
        # The launcher died before the line above: nothing will tell us any more.
        os._exit(_ORPHANED_EXIT_CODE)


def _is_orphaned(launcher_pid: int, launcher_namespace: str) -> bool:
    """Return whether the launcher is no ancestor of this process any more; there may be a shell between them."""
    if pid_namespace() != launcher_namespace:
        return False
    ancestor = os.getppid()
    while ancestor > 1:
        if ancestor == launcher_pid:
            return False
        ancestor = _parent_of(ancestor)
    return True


def pid_namespace() -> str:
    """Return the name of this process's pid namespace, empty where /proc does not show it."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    """Return a process's parent, 0 when it has gone.

    Source: proc_pid_stat(5); the command before the last parenthesis may hold anything.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def watch_optimizers(note: Callable[[int], None]) -> bool:
    """Call `note` with `id(optimizer)` after each step of an optimizer of this process, on the thread that steps.

    Returns False where this torch has no such hook. With `probe.count_step` it costs 2.6 us a step beside other work,
    0.5 us once the program reports its steps. What skips the step itself skips the call: gradient accumulation, a
    GradScaler that has seen infinities. `import torch` has imported `torch.optim` when the probe starts, so nothing is
    imported here.

    Source: torch/optim/optimizer.py, 2.0 to 2.13; the name `torch.optim.optimizer` is no attribute, but a module. A
    step that torch.compile traces is not seen: there the hook is traced to nothing. Whatever else it did would be
    compiled into the user's graph, compiled again at every count, and refused under `fullgraph=True`.
    """
    register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    if register is None:
        return False

    def on_step(optimizer: object, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            note(id(optimizer))

    register(on_step)
    return True
