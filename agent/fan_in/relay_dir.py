"""A relay's own directory: ours alone, of one relay at a time.

relay.lock            held (flock) for the relay's life
invitation.json       what agents are to read; 0600
merged.sock           the newest reports of all nodes; 0600
nodes/NAME/control.sock   leads to the command socket of a node's agent: every verb that takes --dir takes this one
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agent.roads.unix_listener import listen_at
from agent.state_dir import check_socket_path, default_directory, make_private, take_lock
from agent.wire.fields import CONTROL_SOCKET
from agent.wire.merged import MERGED_SOCKET, NODES_DIR

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

INVITATION_FILE = "invitation.json"
LOCK_FILE = "relay.lock"
RELAY_DIR = "relay"


def default_relay_directory(environ: Mapping[str, str], hostname: str) -> Path:
    """Return where a relay of this user lives on this host: beside what an agent there has; raises as that."""
    return default_directory(environ, hostname) / RELAY_DIR


class RelayDir:
    """The directory, from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a planted link
        self._lock_fd = -1

    @property
    def invitation(self) -> Path:
        """What agents are to read."""
        return self.path / INVITATION_FILE

    def open(self) -> None:
        """Make it, lock it, and clear what a killed relay has left.

        Raises:
            StateDirError: It is not safe to use.
            AgentRunningError: Another relay serves there.
        """
        check_socket_path(self.path / NODES_DIR / "n" / CONTROL_SOCKET)
        make_private(self.path)
        in_use = f"another relay serves in {self.path}: end it or use another directory"
        self._lock_fd = take_lock(self.path / LOCK_FILE, in_use)
        self._clear()
        make_private(self.path / NODES_DIR)

    def listen_merged(self) -> socket.socket:
        """Return a listener for consoles.

        Raises:
            OSError: It cannot be bound.
        """
        return listen_at(str(self.path / MERGED_SOCKET))

    def listen_for(self, node: str) -> socket.socket:
        """Return a listener for whoever wants to speak to a node's agent.

        Raises:
            OSError: It cannot be bound: too many files are open.
            StateDirError: The path is too long, or not ours.
        """
        directory = self.path / NODES_DIR / node
        check_socket_path(directory / CONTROL_SOCKET)
        make_private(directory)
        self.forget(node)
        return listen_at(str(directory / CONTROL_SOCKET))

    def forget(self, node: str) -> None:
        """Let nobody come in for a node that is gone."""
        with contextlib.suppress(OSError):
            (self.path / NODES_DIR / node / CONTROL_SOCKET).unlink(missing_ok=True)

    def remove(self, node: str) -> None:
        """Leave nothing of a node."""
        shutil.rmtree(self.path / NODES_DIR / node, ignore_errors=True)

    def close(self) -> None:
        """Let go of it, and leave nothing of it but the directory."""
        if self._lock_fd < 0:
            return
        self._clear()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _clear(self) -> None:
        self.invitation.unlink(missing_ok=True)
        (self.path / MERGED_SOCKET).unlink(missing_ok=True)
        shutil.rmtree(self.path / NODES_DIR, ignore_errors=True)
