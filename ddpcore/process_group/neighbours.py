"""Which ranks share this rank's node, whatever order a launcher has numbered them in.

Every rank tells in the store who it is on its node. Until the others have, launchers are taken to number the ranks of
a node in a row, as all but MPI's round robin do.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.placement import Placement


class Neighbours:
    """The ranks of this node.

    Args:
        placement: This rank's.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # The host's name parts nodes whose launcher does not number them.
        self.node = f"{placement.node_rank}@{socket.gethostname()}"
        self._known = {placement.local_rank: placement.rank}

    def tell(self, store: Store) -> None:
        """Say which rank this is."""
        store.set(self._key(self._placement.local_rank), str(self._placement.rank))

    def rank_of(self, store: Store, local_rank: int) -> int:
        """Return a neighbour's rank: two round trips the first time."""
        key = self._key(local_rank)
        if local_rank not in self._known and store.check([key]):
            self._known[local_rank] = int(store.get(key))
        return self._known.get(local_rank, self._placement.rank - self._placement.local_rank + local_rank)

    def ranks(self, store: Store) -> tuple[int, ...]:
        """Return the ranks of this node, sorted."""
        return tuple(sorted(self.rank_of(store, local) for local in range(self._placement.local_world_size)))

    def _key(self, local_rank: int) -> str:
        return f"rankdeck/node/{self.node}/{local_rank}"
