"""When to tell of nodes that have come: those of one `srun` together, instead of each by itself. Pure."""

from __future__ import annotations

from app.model.newcomers import Newcomers

SETTLE_S = 2.0
"""Without another one, until those that have come are told of; the agents of one `srun` come within a second."""
MAX_WAIT_S = 10.0
"""However many still come."""
MAX_TOLD = 16_384
"""Names that are known to have been told of: a relay can only be wrong to have more, and it costs a word twice."""


class NewcomerWatch:
    """Each node is told of once, also where it goes and comes again."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._first_s = self._last_s = 0.0

    def news(self, newcomers: Newcomers, now_s: float) -> Newcomers:
        """Return those of them that are to be told of now."""
        waiting = frozenset(newcomers.nodes) - self._told
        if waiting != self._waiting:
            self._first_s = self._first_s if self._waiting else now_s
            self._waiting, self._last_s = waiting, now_s
        if not waiting or (now_s - self._last_s < SETTLE_S and now_s - self._first_s < MAX_WAIT_S):
            return Newcomers()
        self._told = waiting | (self._told if len(self._told) < MAX_TOLD else frozenset())
        self._waiting = frozenset()
        return newcomers._replace(nodes=tuple(node for node in newcomers.nodes if node in waiting))
