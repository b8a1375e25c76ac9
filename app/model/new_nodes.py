"""Nodes that joined after the console was opened and are not part of it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class NewNodes(NamedTuple):
    """The new nodes, and where they are.

    Attributes:
        relay: Machine of the relay that they joined, as the user names it.
        nodes: Those that are there now.
    """

    relay: str = ""
    nodes: tuple[str, ...] = ()
