"""The doctor of a session: over the connections that it holds, while it goes on."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.commands import Abort, Prepare
from agent.wire.examination import Health
from app.fleet.host_link import Access, HostLink
from app.inventory.inventory import HostEntry
from app.inventory.program import Again, Program
from app.preflight.findings import FailureKind, Step, Wanted
from app.session.hosts import HostDoctor, wanted_of
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from tests.support.examinations import of_host
from tests.support.hosts import Network, require_hosts
from tests.support.jobs import make_spec
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

HOSTS = ("h1", "h2")
JOB_PYTHON = """#!/bin/sh
echo '{"python": "3.11.9", "torch": "2.13.0", "is_imported": true, "num_gpus": 0}'
"""
"""What the jobs' interpreter says: two imports of torch at once would take a test's time, and would be alike."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network(*HOSTS) as network:
        for host in HOSTS:
            program = network[host].home / "python"
            program.write_text(JOB_PYTHON)
            program.chmod(0o700)
        yield network


def doctor_of(session: RemoteSession) -> HostDoctor:
    assert session.doctor is not None
    return session.doctor


@pytest.fixture
async def session(network: Network) -> AsyncIterator[RemoteSession]:
    links = [HostLink(Access(host, sys.executable, str(network.ssh_config))) for host in HOSTS]
    for link in links:
        link.connect()
        link.bring_up()
    session = RemoteSession(these(*links))
    session.patience_s = math.inf
    await session.start()
    try:
        yield session
    finally:
        await session.close()


async def test_hosts_are_looked_at_while_their_reports_go_on_and_one_that_is_lost_is_a_finding(
    session: RemoteSession, network: Network
) -> None:
    program = Program(("train.py",), 2, python="~/python")
    told: list[tuple[str, Step]] = []

    found = await doctor_of(session).look(lambda host, step: told.append((host, step)), program)

    assert [one.host for one in found.hosts] == list(HOSTS)
    assert all(one.failure is None for one in found.hosts)
    assert next(row.detail for row in of_host(found, "h1").rows if row.name == "torch").startswith("2.13.0")
    for host in HOSTS:
        steps = [step for named, step in told if named == host]
        assert steps == [Step.EXAMINING, Step.WAITING, Step.LISTENING, Step.REACHING, Step.DONE]

    network["h2"].stop_sshd()
    network["h2"].drop_sessions()
    await until_async(lambda: session.away == {"h2"}, 20, "the loss is noticed")
    found = await doctor_of(session).look(lambda _host, _step: None, program)
    failure = of_host(found, "h2").failure
    assert failure is not None
    assert failure.kind is FailureKind.UNREACHABLE
    assert of_host(found, "h1").failure is None
    assert found.exit_code == 3


async def test_before_a_restart_each_host_is_looked_at_for_what_the_job_is_made_of(
    session: RemoteSession, network: Network
) -> None:
    fleet = session.fleet
    for number, host in enumerate(HOSTS):
        python = str(network[host].home / "python")
        shape = {"node_rank": number, "first_rank": 2 * number, "python": python, "master_port": 29_500}
        (network[host].home / "train.py").write_text("")
        spec = make_spec(workdir=str(network[host].home), master_addr=network["h1"].address, **shape)
        await fleet.ask(host, Prepare(spec))

    found = await doctor_of(session)._wanted_again(Again("train"), wanted_of(these(*session._hosts.links)))
    assert found == [Wanted(host, 2, str(network[host].home / "python"), str(network[host].home)) for host in HOSTS]
    fewer = await doctor_of(session)._wanted_again(Again("train", 3), found)
    assert [wanted.num_ranks for wanted in fewer] == [2, 1]
    rest = await doctor_of(session)._wanted_again(Again("train", without=("h1",)), found)
    assert [wanted.host for wanted in rest] == ["h2"]
    unknown = await doctor_of(session)._wanted_again(Again("other"), found)
    assert unknown == found
    looked = await doctor_of(session).look(lambda _host, _step: None, Again("train"))
    torch = [row for one in looked.hosts for row in one.rows if row.name == "torch"]
    assert [(row.status, row.detail.split()[0]) for row in torch] == [(Health.OK, "2.13.0")] * 2
    for host in HOSTS:
        await fleet.ask(host, Abort("train"))


def test_what_is_wanted_is_of_the_job_first_and_then_of_the_inventory() -> None:
    hosts = these()._replace(entries=(HostEntry("h1", num_ranks=8, workdir="~/a"), HostEntry("h2")))
    request = RunRequest(("train.py",), "train", num_ranks=4, python="~/python")

    assert wanted_of(hosts) == [Wanted("h1", 8, "", "~/a"), Wanted("h2")]
    assert wanted_of(hosts, request) == [Wanted("h1", 4, "~/python", "~/a"), Wanted("h2", 4, "~/python")]
    assert wanted_of(hosts, Program(("a.py",), workdir="~/b"))[1] == Wanted("h2", None, "", "~/b")
    shared = msgspec.structs.replace(request, shares_gpus=True)
    assert [wanted.num_ranks for wanted in wanted_of(hosts, shared)] == [None, None]
