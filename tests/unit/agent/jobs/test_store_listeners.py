"""Who listens where ranks wait for the others in `init_process_group`, and a name of that place without an answer."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import TYPE_CHECKING

from agent.jobs import preflight
from agent.jobs.rank_watch import port_owner_at
from agent.node_state.node_state import LONG_MEETING_S, NodeState
from agent.node_state.observations import JobAdmitted, RankReported, StorePortSeen, WorkerSeen
from agent.transport.command_socket import REPLY_TIMEOUT_S
from agent.wire.commands import RefusalReason, Refused
from ddpcore.wire import Phase, StoreMeeting
from tests.support.node_reports import job_status, rank_report

if TYPE_CHECKING:
    import pytest


def test_the_process_that_listens_is_named_by_pid_and_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_owner_at("localhost", port).startswith(f"pid {os.getpid()} (")
    assert port_owner_at("localhost", port) == ""


def test_a_store_of_another_node_is_not_looked_for_here() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_owner_at("203.0.113.7", server.getsockname()[1]) == ""
        assert port_owner_at("\x00 no name", server.getsockname()[1]) == ""


def test_it_is_in_the_reports_of_ranks_that_wait_there_for_long() -> None:
    state = NodeState("n0", "e", "host", 9, 4)
    state.apply(JobAdmitted(job_status()), 0.0)
    for rank, for_s in enumerate((LONG_MEETING_S, LONG_MEETING_S / 2)):
        state.apply(WorkerSeen("job", rank, 4000 + rank), 0.0)
        meeting = StoreMeeting("127.0.0.1", 29500 + rank, rank, 4)
        report = rank_report(rank, phase=Phase.JOINING, phase_s=for_s, store_meeting=meeting)
        state.apply(RankReported(report), 1.0)

    assert state.stores_waited_at("job") == {("127.0.0.1", 29500)}
    state.apply(StorePortSeen("job", 29500, "pid 7 (redis)"), 2.0)
    report_of_node = state.report(2.0, report_seq=1, jobs=[], log_seq=0, malformed_datagrams=0)
    assert [worker.store_port_owner for worker in report_of_node.workers] == ["pid 7 (redis)", ""]


def test_a_name_server_that_does_not_answer_is_a_refusal_while_a_console_still_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preflight.RESOLVE_S + preflight.CONNECT_S < REPLY_TIMEOUT_S
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(20.0))
    monkeypatch.setattr(preflight, "RESOLVE_S", 0.05)

    async def resolve() -> object:
        try:
            return await asyncio.wait_for(preflight.resolve("gpu1"), 5.0)
        finally:
            is_over.set()

    refused = asyncio.run(resolve())
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BAD_ADDRESS
    assert "a name server does not answer" in refused.message
