"""Finds the process that listens where ranks of this node wait for the others in `init_process_group`.

All processes of the machine are looked through for it, so it is done once for each port that ranks wait at for long,
and on another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING

from agent.jobs.preflight import holder_of
from agent.machine.addresses import interface_of
from agent.state.observations import StoreListenerSeen

if TYPE_CHECKING:
    from agent.jobs.launch import Launch
    from agent.state.node_state import NodeState

LOOK_S = 10.0
"""At most for one look."""
MAX_KNOWN = 256


class StoreListeners:
    """Lives on the event loop's thread."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._looked_at: set[tuple[str, str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    def beat(self, launch: Launch) -> None:
        """Begin a look if a rank of this job waits where nobody has looked, and none is under way."""
        if self._task is not None and not self._task.done():
            return
        for address, port in self._state.stores_waited_at(launch.job_id):
            key = (launch.job_dir.name + launch.job_id, address, port)
            if key not in self._looked_at:
                if len(self._looked_at) >= MAX_KNOWN:
                    self._looked_at.clear()
                self._looked_at.add(key)
                self._task = asyncio.get_running_loop().create_task(self._look(launch.job_id, address, port))
                return

    def close(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self, job_id: str, address: str, port: int) -> None:
        with contextlib.suppress(TimeoutError, KeyError):  # too many processes; the job has gone
            found = await asyncio.wait_for(asyncio.to_thread(listener_at, address, port), LOOK_S)
            if found:
                self._state.apply(StoreListenerSeen(job_id, port, found), time.monotonic())


def listener_at(address: str, port: int) -> str:
    """Return the process that listens at an address of this node; empty where it is another node's, or nobody does."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    is_here = any(interface_of(str(one[4][0])) or str(one[4][0]).startswith("127.") for one in found)
    return holder_of(port, if_free="") if is_here else ""
