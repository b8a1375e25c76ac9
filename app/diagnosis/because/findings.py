"""What is found about why a rank is slow: the values of verdicts."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from agent.wire.signals import Signal


class Confidence(StrEnum):
    """How sure a cause is.

    It is likely where three peers or more are compared, it accounts for half of the cost as far as that is known, and
    it began about when the rank became slow. Where either beginning is not known, a signal must measure lost time or
    speed itself. Everything else is possible.
    """

    LIKELY = "likely"
    POSSIBLE = "possible"


class Compared(msgspec.Struct, frozen=True):
    """A signal of a rank beside that of its peers."""

    signal: Signal
    value: float
    peers: float | None
    """Median of the peers: of ranks, or for a host's signal of other hosts; None without such hosts."""
    before: float | None = None
    """Value before its last lasting change."""
    since_s: float | None = None
    """Seconds since that change began."""
    is_worse: bool = False
    """Whether it stands out from the peers' in the direction that harms."""


class Because(msgspec.Struct, frozen=True):
    """A cause of slowness and its evidence."""

    signal: Signal
    ranks: tuple[int, ...]
    """Culprits that it holds for."""
    value: float
    """Value of the first of them."""
    peers: float
    before: float | None
    since_s: float | None
    """Seconds since it began; None where that is not known."""
    confidence: Confidence
    node: str
    """Node of the first of them."""
    gpu: int | None = None
    """Index of its GPU."""
    has_instance: bool = False
    """Whether it has a MIG instance of that GPU, not the whole of it."""
    support: tuple[Compared, ...] = ()
    """Other signals that agree."""
    nic: str = ""
    """Network interface of the host that carries most bytes, for the network's signals."""


class Comparison(msgspec.Struct, frozen=True):
    """How much has been compared to find a cause."""

    num_signals: int
    """Number of signals; 0 where the agents of the slow ranks take none."""
    num_peers: int
    num_hosts: int
    """Number of hosts of slow ranks and peers."""
    differing: tuple[Compared, ...] = ()
    """Signals that stand out of the first slow rank that has any, causes included."""
    cores: tuple[float, float] | None = None
    """Cores that the only slow rank keeps busy, and its peers' median; None where not known, and where it has a GPU."""
