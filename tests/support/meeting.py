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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def meeting_env(how: str, directory: Path) -> tuple[str | None, dict[str, str]]:
    """Return init_method and environment: `agent` is as under torchrun, `env` its variables without its store."""
    if how == "agent":
        return None, {}
    if how == "env":
        return None, {**FREE, "MASTER_PORT": str(free_port())}
    return (f"tcp://127.0.0.1:{free_port()}" if how == "tcp" else f"file://{directory}/meet"), FREE
