"""The way to where a job's store listens, over this machine's own network."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from agent.jobs import preflight
from agent.jobs.preflight import interface_to, local_address, refusal_by_network, resolve
from agent.wire.commands import RefusalReason, Refused

if TYPE_CHECKING:
    import pytest

LOOPBACK = (socket.AF_INET, "127.0.0.1")


async def test_a_name_is_resolved_and_one_that_nobody_knows_is_refused() -> None:
    assert await resolve("127.0.0.1") == LOOPBACK
    refused = await resolve("no.such.host.invalid")
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BAD_ADDRESS


async def test_a_store_that_listens_is_reached_and_hears_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(5)
        assert await refusal_by_network(LOOPBACK, store.getsockname()[1]) is None
        connection, _ = store.accept()
        with connection:
            assert connection.recv(1) == b""


async def test_one_that_does_not_listen_is_told_with_what_to_do() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # nobody else can listen there meanwhile
        port = mute.getsockname()[1]
        refused = await refusal_by_network(LOOPBACK, port)
    assert refused is not None
    assert refused.reason is RefusalReason.UNREACHABLE
    assert f"127.0.0.1 port {port}" in refused.message
    assert "--master-addr" in refused.message


async def test_one_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CONNECT_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # all that its queue holds
            refused = await refusal_by_network(LOOPBACK, full.getsockname()[1])
    assert refused is not None
    assert "no answer in" in refused.message


def test_the_interface_is_the_one_on_the_way() -> None:
    assert local_address(LOOPBACK) == "127.0.0.1"
    assert interface_to(LOOPBACK) == "lo"
    assert interface_to((socket.AF_INET, "127.8.9.10")) in {"lo", ""}
