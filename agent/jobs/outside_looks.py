"""Looks from outside at ranks that do not report, and at the processes that ranks wait for; one look at a time.

py-spy reads beside the process and does not stop it. A process is looked at once for each reason: a rank whose last
report is old and stays the last one, or a child that a rank names. A child is looked at again now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from agent.processes import shim
from agent.processes.py_spy import PySpy, SpyError, find_py_spy
from agent.state.observations import SeenFromOutside
from ddpcore.wire import Place

if TYPE_CHECKING:
    from agent.jobs.launch import Launch
    from agent.state.node_state import NodeState, OutsideWish
    from ddpcore.wire_stacks import ThreadStack

LOOK_S = 5.0
"""At most for one look."""
AGAIN_S = 10.0
"""Between two looks at one child, and after a look that failed."""
MAX_LOOKS = 3
"""At one rank's process for one report, and at one child that cannot be seen."""
MAX_KNOWN = 4096
MAX_ANCESTORS = 16
"""Between a child that a rank waits for and the rank."""
_PARENT = 1
"""Index of the parent behind the name in /proc/PID/stat. Source: proc_pid_stat(5)."""


class _Look(msgspec.Struct):
    """Looks at one process for one reason."""

    due_s: float = 0.0
    num_failed: int = 0


class OutsideLooks:
    """Lives on the event loop's thread."""

    def __init__(self, state: NodeState, py_spy: PySpy) -> None:
        self._state = state
        self._py_spy = py_spy
        self._looks: dict[OutsideWish, _Look] = {}
        self._task: asyncio.Task[None] | None = None

    def beat(self, launch: Launch) -> None:
        """Begin a look if one is wanted at a rank of this job and none is under way."""
        if self._task is not None and not self._task.done():
            return
        now_s = time.monotonic()
        for wish in self._state.wishes_from_outside(launch.job_id, now_s):
            look = self._looks.get(wish) or _Look()
            if now_s >= look.due_s and look.num_failed < MAX_LOOKS:
                if len(self._looks) >= MAX_KNOWN:
                    self._looks.clear()
                self._looks[wish] = look
                look.due_s = now_s + AGAIN_S
                self._task = asyncio.get_running_loop().create_task(self._look_at(launch, wish, look))
                return

    def close(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _look_at(self, launch: Launch, wish: OutsideWish, look: _Look) -> None:
        if not _descends_from(wish.pid, wish.rank_pid):
            look.num_failed = MAX_LOOKS
            return
        deadline_s = time.monotonic() + LOOK_S
        try:
            spy = await asyncio.wait_for(asyncio.to_thread(find_py_spy, launch.job.spec.python), LOOK_S)
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
