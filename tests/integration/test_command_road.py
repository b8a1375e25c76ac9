"""The road on which commands go down, against a real Unix socket."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from agent.wire.codec import CONTROL_SOCKET
from agent.wire.commands import Accepted, Kill, Prepare, RefusalReason, Refused, decode_command, encode_reply
from app.errors import AgentRefusedError, AgentUnreachableError
from app.fleet.commands import StreamChannel, taken
from tests.support.jobs import make_spec
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from pathlib import Path

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(directory: Path, talk: Talk) -> AsyncIterator[None]:
    async def talk_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(talk_and_close, str(directory / CONTROL_SOCKET))
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


async def echo_ports(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    port = 0
    while line := await reader.readline():
        assert decode_command(line) == Kill("demo")
        port += 1
        writer.write(encode_reply(Accepted(master_port=port)))


async def test_commands_and_replies_take_turns_on_one_stream(tmp_path: Path) -> None:
    async with listening(tmp_path, echo_ports):
        road = StreamChannel("demo-0", tmp_path)

        replies = [await road.request(Kill("demo")) for _ in range(3)]

        assert replies == [Accepted(1), Accepted(2), Accepted(3)]
        await road.close()


async def test_concurrent_commands_do_not_mix_their_replies(tmp_path: Path) -> None:
    async with listening(tmp_path, echo_ports):
        road = StreamChannel("demo-0", tmp_path)

        replies = await asyncio.gather(*(road.request(Kill("demo")) for _ in range(10)))

        assert replies == [Accepted(n) for n in range(1, 11)]
        await road.close()


async def test_a_peer_that_reads_nothing_holds_nobody_up_however_large_the_command_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.commands.REPLY_TIMEOUT_S", 0.2)
    may_end = asyncio.Event()

    async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_end.wait()
        writer.transport.abort()

    async with listening(tmp_path, read_nothing):
        road = StreamChannel("demo-0", tmp_path)
        large = Prepare(make_spec(env={f"V{number}": "x" * 4000 for number in range(250)}))
        async with asyncio.timeout(10):
            with pytest.raises(AgentUnreachableError, match="no reply in"):
                await road.request(large)
            await road.close()
        may_end.set()


async def test_an_agent_that_hangs_up_is_unreachable_and_the_next_command_dials_again(tmp_path: Path) -> None:
    calls = 0

    async def hang_up_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        if await reader.readline():
            calls += 1
            if calls > 1:
                writer.write(encode_reply(Accepted()))

    async with listening(tmp_path, hang_up_once):
        road = StreamChannel("demo-0", tmp_path)

        with pytest.raises(AgentUnreachableError, match="demo-0 does not answer: it closed the connection"):
            await road.request(Kill("demo"))

        assert await road.request(Kill("demo")) == Accepted()
        await road.close()


async def test_a_stream_that_broke_between_two_commands_costs_none_of_them(tmp_path: Path) -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            writer.write(encode_reply(Accepted()))

    async with listening(tmp_path, answer_once):
        road = StreamChannel("demo-0", tmp_path)
        assert await road.request(Kill("demo")) == Accepted()
        await until_async(lambda: road._stream is not None and road._stream[0].at_eof(), 5, "the end is heard")

        assert await road.request(Kill("demo")) == Accepted()
        await road.close()


async def test_a_reply_that_is_not_one_is_an_error_that_names_the_node(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"\x1b[2J\n")

    async with listening(tmp_path, babble):
        road = StreamChannel("demo-0", tmp_path)

        with pytest.raises(AgentUnreachableError, match="demo-0") as caught:
            await road.request(Kill("demo"))

        assert "\x1b" not in str(caught.value)
        await road.close()


async def test_an_agent_that_serves_later_has_the_next_command(tmp_path: Path) -> None:
    road = StreamChannel("demo-0", tmp_path)
    where = re.escape(str(tmp_path / CONTROL_SOCKET))
    with pytest.raises(AgentUnreachableError, match=f"the agent on demo-0 does not answer: none serves at {where}"):
        await road.request(Kill("demo"))

    async with listening(tmp_path, echo_ports):
        assert await road.request(Kill("demo")) == Accepted(1)
        await road.close()


async def test_where_an_agent_has_left_its_socket_none_serves(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / CONTROL_SOCKET))

    with pytest.raises(AgentUnreachableError, match="none serves at"):
        await StreamChannel("demo-0", tmp_path).request(Kill("demo"))


def test_a_refusal_becomes_an_error_with_exit_code_4_and_clean_words() -> None:
    with pytest.raises(AgentRefusedError, match=r"demo-0 refused: port 1 \\x1b") as caught:
        taken("demo-0", Refused(RefusalReason.PORT_TAKEN, "port 1 \x1b"))

    assert caught.value.exit_code == 4
