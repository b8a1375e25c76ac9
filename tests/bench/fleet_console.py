"""The console on the sockets of `fleet_feeder`: a session and a screen as `rankdeck` opens them.

python -m tests.bench.fleet_console DIRECTORY NODES
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from app.presenting import show_session
from app.sessions.live import LiveSession
from app.sessions.options import SessionOptions
from app.settings.schema import ConsoleSettings
from tests.bench.fleet_feeder import node_directory, node_names

if TYPE_CHECKING:
    from pathlib import Path


class FleetSession(LiveSession):
    """Looks on."""

    title = "rankdeck"
    watched_job = ""
    leaving = "the job goes on"
    can_inject = False

    def __init__(self, directories: dict[str, Path]) -> None:
        super().__init__(directories, SessionOptions(is_read_only=True), [])

    async def start(self) -> None:
        """Open the roads to the agents."""
        await self.session.connect()

    def farewell(self) -> str:
        return ""

    async def close(self) -> None:
        await self.session.close()


def main() -> None:
    """Show the fleet until it is quit."""
    directory, num_nodes = sys.argv[1], int(sys.argv[2])
    directories = {name: node_directory(directory, index) for index, name in enumerate(node_names(num_nodes))}
    sys.exit(asyncio.run(show_session(FleetSession(directories), ConsoleSettings())))


if __name__ == "__main__":
    main()
