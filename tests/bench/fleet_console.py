"""The console on the sockets of `fleet_feeder`: a session and a screen as `rankdeck` opens them.

python -m tests.bench.fleet_console DIRECTORY NODES [relay]
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from agent.wire.relay import Roster
from app.cli.presenting import show_session
from app.fleet.local_link import LocalLink
from app.fleet.relay_hub import RelayHub
from app.session.options import SessionOptions
from app.session.session import Session
from app.settings.schema import ConsoleSettings
from tests.bench.fleet_feeder import node_directory, node_names

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path


class WayToFeeder(LocalLink):
    """Leads to a feeder that hands reports out as a relay does, and says of itself what `agent roster` would."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._said = directory

    def ask_verb(self, *arguments: str, answered: Container[int] = ()) -> bytes:  # noqa: ARG002 - it is asked one thing
        return msgspec.json.encode(Roster("bench", self._said, 0, 0, []))


class FleetSession(Session):
    """Looks on."""

    title = "rankdeck"
    outside = None
    watched_job = ""
    leaving = "the job goes on"
    can_inject = False

    def __init__(self, directories: dict[str, Path], relay: RelayHub | None = None) -> None:
        relayed_nodes = directories if relay is not None else ()
        super().__init__(directories, SessionOptions(is_read_only=True), relayed_nodes=relayed_nodes)
        self._relay = relay
        self._nodes = list(directories)

    async def start(self) -> None:
        """Open the roads to the agents."""
        if self._relay is not None:
            for node in self._nodes:
                self._relay.follow(node, partial(self.take_frame, node))
            await asyncio.to_thread(self._relay.connect)
        await self.connect()

    def farewell(self) -> str:
        return ""

    async def close(self) -> None:
        await super().close()
        if self._relay is not None:
            self._relay.close()


def main() -> None:
    """Show the fleet until it is quit."""
    directory, num_nodes = sys.argv[1], int(sys.argv[2])
    directories = {name: node_directory(directory, index) for index, name in enumerate(node_names(num_nodes))}
    relay = RelayHub(WayToFeeder(directory)) if "relay" in sys.argv[3:] else None
    sys.exit(asyncio.run(show_session(FleetSession(directories, relay), ConsoleSettings())))


if __name__ == "__main__":
    main()
