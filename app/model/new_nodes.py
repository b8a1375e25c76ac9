"""Nodes that have come after a console was opened, and that it has not taken in. Pure."""

from __future__ import annotations

from typing import NamedTuple


class NewNodes(NamedTuple):
    """Who they are, and where.

    Attributes:
        relay: The machine of the relay that they have come to, as a person calls it.
        nodes: Those that are there now.
    """

    relay: str = ""
    nodes: tuple[str, ...] = ()
