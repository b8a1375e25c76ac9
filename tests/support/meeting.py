"""Places where the ranks of a test meet: torchrun's store, one that rank 0 hosts, or a file."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FREE = {
    "TORCHELASTIC_USE_AGENT_STORE": "0",
    "LOCAL_RANK": "",
    "LOCAL_WORLD_SIZE": "",
    "GROUP_RANK": "",
    "GLOO_SOCKET_IFNAME": "",
}
"""Without what only torchrun sets."""


_holders: list[socket.socket] = []
"""Of the ports that were given out, until the tests are over."""


def held_port() -> socket.socket:
    """Bind a port of loopback and do not listen at it: as long as it is held, no test that asks for any port gets it.

    Who wants it by its number may listen at it, as torch's store does: both allow the reuse of its address.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def free_port() -> int:
    """Return a port of loopback at which nobody listens, and which nobody else is given."""
    _holders.append(held_port())
    port: int = _holders[-1].getsockname()[1]
    return port


def meeting_env(how: str, directory: Path) -> tuple[str | None, dict[str, str]]:
    """Return init_method and environment: `agent` is as under torchrun, `env` its variables without its store."""
    if how == "agent":
        return None, {}
    if how == "env":
        return None, {**FREE, "MASTER_PORT": str(free_port())}
    return (f"tcp://127.0.0.1:{free_port()}" if how == "tcp" else f"file://{directory}/meet"), FREE
