"""An agent that ends is told from one that is lost, also where a relay learns first that it takes nothing any more."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.relay.relay import LOST, Relay
from agent.relay.relay_dir import RelayDir
from agent.transport.relay_sockets import DialSocket, RelaySocket
from agent.wire.relay import RELAY_VERSION, Farewell, Hello, RelayHeartbeat, encode_relay_message
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def directory() -> Iterator[RelayDir]:
    path = Path(tempfile.mkdtemp(prefix="rdr-", dir="/tmp"))  # short: a socket's path has 108 bytes
    relay_dir = RelayDir(path)
    relay_dir.open()
    yield relay_dir
    relay_dir.close()
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize(("sends_farewell", "num_before"), [(True, 0), (True, 700), (False, 0)])
async def test_what_an_agent_says_last_is_heard_before_it_is_taken_for_lost(
    directory: RelayDir, num_before: int, *, sends_farewell: bool
) -> None:
    road, is_ready, told = RelaySocket("127.0.0.1", 0), asyncio.Event(), list[bytes]()
    relay = Relay(directory, road, "127.0.0.1", 0)
    serving = asyncio.create_task(relay.run(is_ready.set))
    await is_ready.wait()
    dial = DialSocket("127.0.0.1", road.port, road.public_key, road.node_key, told.append)
    dial.send(encode_relay_message(Hello(RELAY_VERSION, "a", "1", b"{}")))
    await until_async(lambda: told, 10, "it is let in")
    agent = relay._roster.find("a")
    assert agent is not None

    for _ in range(num_before):
        dial.send(encode_relay_message(RelayHeartbeat()))
    if sends_farewell:
        dial.send(encode_relay_message(Farewell()))
    dial.close(sends_farewell=sends_farewell)
    until(
        lambda: not relay._send(agent.peer, encode_relay_message(RelayHeartbeat())),
        10,
        "its end is seen, and nothing else heard",
    )
    await until_async(lambda: relay._roster.find("a") is None, 10, "it is gone")

    entry = relay._latest.entry("a", 0.0)
    assert (entry.has_ended, entry.why == LOST) == (sends_farewell, not sends_farewell)
    relay.end_soon()
    await serving
