"""What is said of nodes that have come meanwhile, and that a console has not taken in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.safe_text import LINE_LIMIT, clean, clean_name
from app.words import nodes_text

if TYPE_CHECKING:
    from app.model.newcomers import Newcomers


def newcomers_text(newcomers: Newcomers) -> str:
    """Return `2 more nodes have come to the relay: leave and come in again`; empty where none has."""
    return f"{_have_come(newcomers)} the relay: leave and come in again" if newcomers.nodes else ""


def newcomers_notice(newcomers: Newcomers, way_in: str) -> str:
    """Return the same with names, and with the command that leads back."""
    named = nodes_text([clean_name(node) for node in newcomers.nodes])
    where = f"the relay on {clean_name(newcomers.relay)} ({named})"
    return clean(f"{_have_come(newcomers)} {where}: leave and come in again to see them, by {way_in}", LINE_LIMIT)


def _have_come(newcomers: Newcomers) -> str:
    num = len(newcomers.nodes)
    return "1 more node has come to" if num == 1 else f"{num:,} more nodes have come to"
