"""Hosts without an inventory, for sessions of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.inventory.inventory import HostEntry
from app.session.hosts import Hosts

if TYPE_CHECKING:
    from app.fleet.agent_link import AgentLink


def these(*links: AgentLink) -> Hosts:
    """Return hosts that are named one by one, and of which an inventory says nothing."""
    entries = tuple(HostEntry(link.host) for link in links)
    return Hosts(links, entries, " ".join(f"--host {link.host}" for link in links), {})
