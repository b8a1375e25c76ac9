"""torch's c10d rendezvous with rounds that are counted (entry point `torchrun.handlers`), for elastic jobs.

Runs in the launcher. Each gathering of the nodes is a round; all nodes agree on its number, which torch itself does not
expose (`TORCHELASTIC_RESTART_COUNT` differs between nodes). The names of variables are those of `ddpcore.wire`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.elastic.rendezvous import RendezvousParameters

ENV_ROUND = "RANKDECK_ROUND"
ELASTIC_BACKEND = "rankdeck-c10d"
COUNTER_KEY = "rankdeck.rounds"
ROUND_KEY = "rankdeck.round"


def create_counted_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return torch's own c10d handler, wrapped; torchrun calls this once."""
    backend, store = create_backend(params)
    return CountedRendezvous(create_handler(store, backend, params))


class CountedRendezvous(RendezvousHandler):
    """Leaves everything to torch's handler, and puts each round's number into this process's environment."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner

    def next_rendezvous(self) -> RendezvousInfo:
        """Gather nodes, and agree on the number of the round."""
        info = self._inner.next_rendezvous()
        os.environ[ENV_ROUND] = str(_agree_on_round(info.store, info.rank))
        return info

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """Return our own name, which torch compares with the one it was asked for."""
        return ELASTIC_BACKEND

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


def _agree_on_round(store: Store, node_rank: int) -> int:
    """Return how many rounds there have been; blocks until the first node has counted.

    The round's store has a prefix of its own for keys; the counter lies below it and is the job's.
    """
    if node_rank == 0:
        assert isinstance(store, PrefixStore)
        store.set(ROUND_KEY, str(store.underlying_store.add(COUNTER_KEY, 1)))
    return int(store.get(ROUND_KEY))
