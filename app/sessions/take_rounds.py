"""How many of a fleet's reports are folded in at a time. Pure."""

from __future__ import annotations

TAKEN_AT_ONCE = 128
"""Reports are folded in together, which is cheaper, but no more than a key can wait for: so many of eight ranks take
2 ms, and 16 at a time half as much again each (`bench_fold`)."""
ROUND_S = 0.8
"""A fleet that is too large for one take is heard in a round of several, which takes so long: of what its nodes say
meanwhile only the newest is folded in. Also with half a second between two reports of a node this is below
`app.model.cluster.GAP_S`, from which on it counts as having been away."""


class TakeRounds:
    """Counts the takes that are due, however long the turns take in which they are made."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._last_s: float | None = None
        self._num_due = 0.0
        """Nodes that are to be heard by now, and are not."""

    @property
    def is_one_take(self) -> bool:
        """Whether one take hears all nodes."""
        return self._num_nodes <= TAKEN_AT_ONCE

    def num_takes(self, now_s: float) -> int:
        """Return how many takes are to be made in this turn, one at least; call it once a turn."""
        since_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._num_due = min(self._num_due + self._num_nodes * since_s / ROUND_S, self._num_nodes)
        num_takes = max(1, int(self._num_due / TAKEN_AT_ONCE))
        self._num_due = max(0.0, self._num_due - num_takes * TAKEN_AT_ONCE)
        return num_takes
