"""Where a node would listen for a console: the first port that is free, its own agent's, or what is in the way."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from agent.doctor.telemetry_port import NUM_TRIES, hold_first_free, hold_ports, port_of_agent
from agent.machine.addresses import outward_addresses
from agent.roads.curve import new_key
from agent.wire.commands import Prepare
from agent.wire.direct import ListenForTelemetry, Listening
from agent.wire.replies import Accepted
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def taken(stack: ExitStack, *addresses: str) -> int:
    """Have this process listen at a port of its own of each address, and return the port."""
    first = stack.enter_context(socket.create_server((addresses[0], 0)))
    port = int(first.getsockname()[1])
    for address in addresses[1:]:
        stack.enter_context(socket.create_server((address, port)))
    return port


def held(stack: ExitStack, addresses: list[str], ports: list[int]) -> list[tuple[str, int]]:
    found = hold_first_free(addresses, ports)
    assert not isinstance(found, str), found
    return [stack.enter_context(one).getsockname() for one in found]


def test_the_first_port_is_held_that_is_free_at_all_addresses(stack: ExitStack) -> None:
    here = taken(stack, HERE)
    with ExitStack() as ended:  # nobody else has these at either address
        there, free = taken(ended, HERE, THERE), taken(ended, HERE, THERE)
    stack.enter_context(socket.create_server((THERE, there)))

    assert held(stack, [HERE, THERE], [here, there, free]) == [(HERE, free), (THERE, free)]
    (_, port), (_, same) = held(stack, [HERE, THERE], [0] * NUM_TRIES)
    assert port == same
    socket.create_server((HERE, there)).close()  # held until its port was found taken at the other address


def test_of_many_ports_that_are_taken_the_holder_of_the_last_alone_is_looked_for(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [taken(stack, HERE) for _ in range(50)]
    num_looks, look = 0, psutil.net_connections

    def counted(kind: str) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(kind)

    monkeypatch.setattr(psutil, "net_connections", counted)
    words = hold_first_free([HERE], ports)

    assert isinstance(words, str)
    assert words.startswith(f"none of 50 ports is free; port {ports[-1]} of {HERE} is taken by pid {os.getpid()} ("), (
        words
    )
    assert num_looks == 1
    alone = hold_first_free([HERE], ports[:1])
    assert isinstance(alone, str)
    assert alone.startswith(f"port {ports[0]} of {HERE} is taken by pid ")


def test_what_no_other_port_mends_is_told_at_once(stack: ExitStack) -> None:
    port = taken(stack, HERE)
    nobodys = "192.0.2.77"

    assert hold_first_free([nobodys], [port, port + 1]) == (
        f"cannot listen at {nobodys}, port {port}: {os.strerror(errno.EADDRNOTAVAIL)}"
    )


def test_a_port_that_the_agent_holds_for_a_store_is_not_where_it_listens_for_consoles(
    stack: ExitStack, tmp_path: Path
) -> None:
    outward = [one for one in outward_addresses() if ":" not in one.address]
    if not outward:
        pytest.skip("this machine has no address but its own")
    address = outward[0].address
    (tmp_path / "train.py").write_text("")
    agent = stack.enter_context(RunningAgent())
    prepared = agent.ask(Prepare(make_local_spec(tmp_path, 1, master_addr=address)))
    assert isinstance(prepared, Accepted), prepared
    assert prepared.master_port

    assert port_of_agent(agent.directory, [address], (0, 0)) == 0
    listeners, where = hold_ports(address, (0, 0), agent.directory)
    assert [stack.enter_context(one).getsockname() for one in listeners] == [(address, where.port)]
    assert not where.is_agents

    let_in = agent.ask(ListenForTelemetry(new_key().public, address))
    assert isinstance(let_in, Listening), let_in
    assert port_of_agent(agent.directory, [address], (0, 0)) == let_in.port
    assert hold_ports(address, (0, 0), agent.directory)[1].is_agents
    assert port_of_agent(agent.directory, [address], (let_in.port + 1, let_in.port + 9)) == 0
