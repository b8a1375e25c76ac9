"""A relay in a moment without memory: somebody has sent much, and libzmq is about to drop them for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agent.relay import relay as relay_module
from agent.relay.relay import Relay
from agent.relay.relay_dir import RelayDir
from agent.wire.relay import RELAY_VERSION, Hello

if TYPE_CHECKING:
    import pytest

    from agent.transport.relay_sockets import RelaySocket


class ScantRoad:
    """Has no memory for what is sent first."""

    def __init__(self) -> None:
        self.num_sends = 0
        self.has_sent = asyncio.Event()

    def send(self, _peer: bytes, _message: bytes) -> bool:
        self.num_sends += 1
        if self.num_sends == 1:
            raise MemoryError
        self.has_sent.set()
        return True


async def test_the_heartbeat_of_a_relay_outlives_a_moment_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for period in ("LOOK_S", "HEARTBEAT_S"):
        monkeypatch.setattr(relay_module, period, 0.0)
    road = ScantRoad()
    relay = Relay(RelayDir(Path("unused")), cast("RelaySocket", road), "here", 1)
    relay._roster.hello(b"peer", Hello(version=RELAY_VERSION, node="x", instance="1", place=b"{}"), 1e12)
    ticking = asyncio.create_task(relay._tick())
    try:
        await asyncio.wait_for(road.has_sent.wait(), 10)
    finally:
        ticking.cancel()
        (ended,) = await asyncio.gather(ticking, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
