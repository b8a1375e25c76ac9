"""How many files this process may have open at once."""

from __future__ import annotations

import resource

FILES_A_NODE = 10
"""Of a node's socket of telemetry and its connection, the road to its agent, and, over SSH, the connection, a
listener and what comes through it."""
SPARE_FILES = 256


def make_room_for_nodes(num_nodes: int) -> None:
    """Allow as many files as so many nodes take, as far as this user may: a process often has 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_A_NODE * num_nodes + SPARE_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
