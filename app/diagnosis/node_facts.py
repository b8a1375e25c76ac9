"""What state every node's reports are in: arrays by node, and one node's facts where somebody asks for them."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from app.diagnosis.rank_facts import Thresholds
    from app.model.cluster import Cluster

NODE_STATES = ("connecting", "up", "stale", "lost")
CONNECTING, UP, STALE, LOST = range(len(NODE_STATES))


class NodeFacts(NamedTuple):
    """The state of one node's reports."""

    state: str
    """connecting, up, stale or lost."""
    age_s: float | None
    """Since its last report; None before the first."""


class AllNodes:
    """The states of all nodes, in the order of the cluster.

    Attributes:
        codes: Index into `NODE_STATES`.
        age_s: Of the newest report; NaN before the first.
    """

    def __init__(self, codes: NDArray[np.int8], age_s: NDArray[np.float64]) -> None:
        self.codes = codes
        self.age_s = age_s

    @property
    def is_up(self) -> NDArray[np.bool_]:
        """Which nodes are heard."""
        is_up: NDArray[np.bool_] = self.codes == UP
        return is_up

    @property
    def is_late(self) -> NDArray[np.bool_]:
        """Which nodes are not heard any more."""
        is_late: NDArray[np.bool_] = self.codes >= STALE
        return is_late

    @property
    def is_unheard(self) -> NDArray[np.bool_]:
        """Which nodes there has been no way to so far, as far as that is known."""
        is_unheard: NDArray[np.bool_] = (self.codes == LOST) & np.isnan(self.age_s)
        return is_unheard

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> NodeFacts:
        """Return the facts of a node."""
        state = NODE_STATES[self.codes[index]]
        age_s = float(self.age_s[index])
        return NodeFacts(state, None if isnan(age_s) else age_s)

    def __iter__(self) -> Iterator[NodeFacts]:
        return (self[index] for index in range(len(self)))


def all_nodes(cluster: Cluster, thresholds: Thresholds, now_s: float) -> AllNodes:
    """Return the state of every node."""
    is_heard = np.isfinite(cluster.heard_s)
    age_s = np.where(is_heard, np.maximum(0.0, now_s - cluster.heard_s), np.nan)
    codes = np.where(is_heard, UP, CONNECTING).astype(np.int8)
    codes[age_s > thresholds.silent_s] = STALE
    codes[age_s > thresholds.lost_s] = LOST
    codes[~is_heard & cluster.is_cut_off] = LOST
    return AllNodes(codes, age_s)
