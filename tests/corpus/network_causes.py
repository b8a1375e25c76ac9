"""Causes of slowness on the network of real ranks: what happens to the link of rank 1's host.

A gloo rank on each of two hosts stores a sample at a third host in each step. TAP devices carry what the hosts send,
and lose some of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agent.wire.signals import Signal
from tests.corpus.host_causes import HOSTS, HostTold, OnHosts, play_on_hosts
from tests.corpus.real_causes import PROGRAMS, START_S, RealCause
from tests.support.hosts import Network
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

STORE = "store"


class Links(OnHosts):
    """The links of two ranks' hosts, and the store, by rank."""

    program, ranks_a_host = "over_network.py", 1

    def __init__(self, network: Network, directory: Path) -> None:
        super().__init__(network, directory)
        store, where = network[STORE], directory / "store"
        server = store.start(sys.executable, str(PROGRAMS / "store.py"), store.address, str(where))
        self.undo.callback(server.wait)
        self.undo.callback(server.kill)
        until(where.exists, START_S, "the store listens")

    def lose(self, rank: int, lost_frac: float) -> None:
        """Let the link of a rank's host lose packets."""
        link = self.hosts[rank].link
        assert link is not None
        link.become(lost_frac=lost_frac)


def _lose_everywhere(links: Links) -> None:
    for rank in range(len(HOSTS)):
        links.lose(rank, LOST_FRAC)


LOST_FRAC = 0.08
"""Packets lost in each direction."""
LOSSES: RealCause[Links] = RealCause(
    "a link that loses packets", lambda on: on.lose(1, LOST_FRAC), frozenset({Signal.TCP_RETRANSMITS})
)
NETWORK_CAUSES: tuple[RealCause[Links], ...] = (LOSSES,)
NETWORK_OPPOSITES: tuple[RealCause[Links], ...] = (
    RealCause("its program, on a link that loses nothing", lambda on: on.ask("program")),
    RealCause("both links lose packets", _lose_everywhere, is_slow=False),
)


def play_network_cause(cause: RealCause[Links], directory: Path, patience: float = 1.0) -> HostTold:
    """Run two ranks on two hosts, do it to a link, and return what a console says of them."""
    with Network(*HOSTS, STORE, has_poor_links=True) as network:
        return play_on_hosts(cause, Links(network, directory), network, patience)
