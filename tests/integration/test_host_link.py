"""A host's agent, seen from here as if it were here."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.reports import WIRE_VERSION
from app.errors import (
    AgentRefusedError,
    AgentUnreachableError,
    AppError,
    HostUnreachableError,
    IncompatibleAgentError,
    UsageError,
)
from app.fleet.host_link import Access, HostLink
from app.paths import TunnelDir
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from app.ssh.login import Logins
from ddpcore.wire import Fault, FaultKind
from tests.support.hosts import PASSWORD, Network, require_hosts
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", sshd_options=getattr(request, "param", ())) as network:
        yield network


@pytest.fixture
def link(network: Network) -> Iterator[HostLink]:
    with HostLink(Access("h1", sys.executable, str(network.ssh_config))) as link:
        link.connect()
        yield link


def link_to(network: Network, answer: str) -> HostLink:
    """Return a link to a host whose Python says something else."""
    program = network["h1"].home / "python"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o700)
    link = HostLink(Access("h1", "~/python", str(network.ssh_config)))
    link.connect()
    return link


@pytest.mark.parametrize("network", [(), ("AllowStreamLocalForwarding no",)], indirect=True, ids=["sockets", "proxy"])
async def test_the_agent_of_a_host_is_seen_and_spoken_to_from_here(network: Network, link: HostLink) -> None:
    place = link.bring_up()
    session = RemoteSession(these(link))
    await session.start()

    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")

    report = await session.fleet.report("h1")
    assert (report.epoch, report.hostname) == (place.epoch, "h1")
    assert link.is_forwarded is ("StreamLocal" not in (network["h1"].directory / "sshd_config").read_text())
    assert len(session.drain_notices()) == int(not link.is_forwarded)
    with pytest.raises(UsageError):
        await session.inject(Fault(FaultKind.KILL, 0))
    link_directory = link.directory
    assert stat.S_IMODE(link_directory.stat().st_mode) == 0o700
    assert link.shut_down(kill_jobs=False).num_jobs_left == 0
    await session.close()
    assert not link_directory.exists()


@pytest.mark.parametrize("network", [(), ("AllowStreamLocalForwarding no",)], indirect=True, ids=["sockets", "proxy"])
async def test_the_agent_writes_down_by_which_process_a_console_came(network: Network, link: HostLink) -> None:
    log = Path(link.bring_up().dir) / "audit.jsonl"
    session = RemoteSession(these(link))
    await session.start()
    try:
        with pytest.raises(AgentRefusedError, match="there is no job gone on this node"):
            await session.job_control.kill("gone")
        link.shut_down(kill_jobs=False)
    finally:
        await session.close()

    killed, ended = (json.loads(line) for line in log.read_text().splitlines())
    assert (killed["command"], killed["job_id"], killed["reason"]) == ("kill", "gone", "unknown_job")
    assert killed["node"] == "h1"
    assert killed["process"].startswith("sshd" if link.is_forwarded else "python")
    assert (ended["command"], ended["outcome"]) == ("shutdown", "accepted")


async def test_a_lost_connection_ends_the_session_with_the_way_back(network: Network, link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    await session.start()
    network["h1"].drop_sessions()
    await until_async(lambda: not link.is_alive, 10, "the loss is noticed")

    with pytest.raises(HostUnreachableError, match="the connection is lost") as caught:
        session.view()

    assert "rankdeck attach --host h1" in caught.value.hint
    await session.close()


async def told(session: RemoteSession, words: str) -> str:
    """Return the sentence of the session that holds some words, once it has come."""
    heard: list[str] = []

    def is_told() -> bool:
        session.view()
        heard.extend(session.drain_notices())
        return any(words in notice for notice in heard)

    await until_async(is_told, 60, f"{words!r} is told")
    return next(notice for notice in heard if words in notice)


@pytest.mark.fault(row=18)
@pytest.mark.parametrize("network", [(), ("AllowStreamLocalForwarding no",)], indirect=True, ids=["sockets", "proxy"])
async def test_a_lost_connection_comes_back_and_reports_and_commands_with_it(network: Network, link: HostLink) -> None:
    place = link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = math.inf
    await session.start()
    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")

    for _ in range(2):
        network["h1"].drop_sessions()

        assert "reconnecting" in await told(session, "h1: the connection is lost")
        await told(session, "h1: the connection is back after")
        await until_async(lambda: (session.view().nodes()[0].age_s or 9) < 1, 60, "reports come again")
        assert (await session.fleet.report("h1")).epoch == place.epoch
    await session.close()


@pytest.mark.parametrize("network", [(), ("AllowStreamLocalForwarding no",)], indirect=True, ids=["sockets", "proxy"])
async def test_an_agent_that_was_started_again_is_heard_again_over_the_same_connection(
    network: Network, link: HostLink
) -> None:
    before = link.bring_up()
    session = RemoteSession(these(link))
    await session.start()
    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")
    session.drain_notices()

    link.shut_down(kill_jobs=False)
    await until_async(lambda: (session.view().nodes()[0].age_s or 0) > 1, 20, "no report comes")
    after = await asyncio.to_thread(link.bring_up)
    await until_async(lambda: (session.view().nodes()[0].age_s or 9) < 1, 60, "reports come again")

    assert after.epoch != before.epoch
    assert (await session.fleet.report("h1")).epoch == after.epoch
    assert session.drain_notices() == []
    assert network["h1"].num_logins() == 1
    link.shut_down(kill_jobs=False)
    await session.close()


async def test_a_host_whose_agent_begins_after_its_ssh_is_not_taken_for_one_that_forwards_nothing(
    network: Network, link: HostLink
) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = math.inf
    await session.start()
    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")
    link.shut_down(kill_jobs=False)
    network["h1"].drop_sessions()
    await until_async(lambda: not link.is_alive, 10, "the loss is noticed")
    await until_async(lambda: link.is_alive, 60, "SSH is back")
    with pytest.raises(AgentUnreachableError):
        await session.fleet.report("h1")
    await asyncio.to_thread(link.bring_up)

    await until_async(lambda: (session.view().nodes()[0].age_s or 9) < 1, 60, "reports come again")
    assert (await session.fleet.report("h1")).hostname == "h1"
    assert link.is_forwarded
    assert link._can_forward
    link.shut_down(kill_jobs=False)
    await session.close()


@pytest.mark.fault(row=10)
async def test_while_a_host_is_cut_off_its_picture_is_old_and_says_why(network: Network, link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = math.inf
    await session.start()
    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")
    network["h1"].pull_cable()

    await told(session, "does not answer")
    await until_async(lambda: session.view().nodes()[0].state == "lost", 20, "the node is lost")
    text = session.view().headline().text
    assert re.fullmatch(
        r"no connection to h1 for [\d.]+ s: "
        # At the same time the kernel gives up to look for the host on its network.
        r"(\S+ port 22 does not answer in 3 s \(is it up, .*\?\)|cannot connect to \S+ port 22: No route to host .*)",
        text,
    ), text

    network["h1"].plug_in_cable()
    await told(session, "h1: the connection is back after")
    await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come again")
    assert "no connection" not in session.view().headline().text
    await session.close()


@pytest.mark.fault(row=19)
async def test_a_host_that_shows_another_key_afterwards_is_not_gone_back_to(network: Network, link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = math.inf
    await session.start()
    network["h1"].change_host_key()
    network["h1"].drop_sessions()

    await told(session, "THE HOST KEY OF")
    network.trust_all()  # too late: whoever answers to the name now is not asked again
    with pytest.raises(AgentUnreachableError):
        await session.fleet.report("h1")
    session.view()
    assert not link.is_alive
    await session.close()


PAM = ("UsePAM yes", "KbdInteractiveAuthentication yes", "PermitRootLogin yes")


@pytest.mark.parametrize("network", [("AuthenticationMethods publickey,keyboard-interactive", *PAM)], indirect=True)
async def test_a_host_that_wants_a_person_at_each_login_is_not_gone_back_to_and_says_so(network: Network) -> None:
    local_user = LocalUser([PASSWORD])
    with HostLink(Access("h1", sys.executable, str(network.ssh_config)), Logins(local_user)) as link:
        link.connect()
        link.bring_up()
        session = RemoteSession(these(link))
        session.patience_s = math.inf
        await session.start()
        network["h1"].drop_sessions()

        said = await told(session, "wants a new answer at each login (leave, and come in again)")
        assert said.startswith("h1: ")
        await session.close()
    assert local_user.asked == ["(root@h1) Password: "]
    assert network["h1"].num_logins() == 1


async def test_without_a_screen_patience_ends_with_the_way_back(network: Network, link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = 0.1
    await session.start()
    network["h1"].stop_sshd()
    network["h1"].drop_sessions()
    await until_async(lambda: not link.is_alive, 10, "the loss is noticed")

    failures: list[AppError] = []

    def has_given_up() -> bool:
        try:
            session.view()
        except AppError as error:
            failures.append(error)
        return bool(failures)

    await until_async(has_given_up, 20, "patience ends")
    assert "refuses connections" in str(failures[0])
    assert failures[0].hint == "is sshd running there?; come back by: rankdeck attach --host h1"
    await session.close()


async def test_a_session_that_is_closed_while_it_comes_back_leaves_nothing(network: Network, link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link))
    session.patience_s = math.inf
    await session.start()
    network["h1"].drop_sessions()
    await until_async(lambda: not link.is_alive, 10, "the loss is noticed")
    await session.close()

    assert not link.directory.exists()
    await until_async(lambda: not any("paramiko" in str(thread) for thread in threading.enumerate()), 20, "SSH ends")


async def test_a_job_that_is_refused_leaves_the_session_to_be_closed(link: HostLink) -> None:
    link.bring_up()
    session = RemoteSession(these(link), RunRequest(("missing.py",), "t"))

    assert session.leaving == "no job was started"
    with pytest.raises(AgentRefusedError, match="is not a file"):
        await session.start()

    assert session.farewell() == ""
    assert session.leaving == "no job was started"
    await session.close()
    assert session.farewell() == ""


@pytest.mark.ranks
async def test_who_leaves_while_a_restart_waits_is_told_that_the_job_does_not_begin_again(
    network: Network, link: HostLink
) -> None:
    link.bring_up()
    (network["h1"].home / "stay.py").write_text("import signal\nsignal.sigwait({signal.SIGUSR2})\n")
    session = RemoteSession(these(link), RunRequest(("stay.py",), "stay", num_ranks=1, is_probed=False))
    await session.start()
    try:
        await until_async(lambda: (job := session.view().job()) is not None and job.state == "running", 60, "it runs")
        assert session.leaving == "the job goes on"
        restart = asyncio.create_task(session.job_control.restart("stay"))
        await until_async(lambda: bool(session.job_control.doing), 10, "the job is asked to end")
        session.view()

        assert session.leaving == "the job ends and is not restarted"
        restart.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restart
        words = session.farewell()
        assert words.startswith("rankdeck: the job ends and is not restarted; watch it: rankdeck attach")
        assert words.endswith("begin it again: rankdeck restart stay --host h1")
    finally:
        link.shut_down(kill_jobs=True)
        await session.close()


def test_no_agent_is_said_with_what_to_do(link: HostLink) -> None:
    with pytest.raises(AgentUnreachableError, match="nothing is known of jobs there") as caught:
        link.find()

    assert caught.value.hint == "rankdeck up h1"
    with pytest.raises(AgentUnreachableError, match="no agent answers"):
        link.shut_down(kill_jobs=False)


INSTALL = "rankdeck install h1 --python '~/python'"


@pytest.mark.parametrize(
    ("answer", "kind", "words", "hint"),
    [
        ("echo 'hello \033[2J'", IncompatibleAgentError, "answers something else", INSTALL),
        ("exit 126", AgentUnreachableError, "does not run there", "name one: --python"),
        ("echo 'python: No module named agent' >&2; exit 1", AgentUnreachableError, "has no rankdeck", INSTALL),
        ("echo 'agent: worn out \033[2J' >&2; exit 2", AgentUnreachableError, r"worn out \\x1b\[2J", ""),
        ("echo 'agent: refused' >&2; exit 4", AgentRefusedError, "refused", ""),
        (
            "echo 'Unknown option: -P' >&2; echo \"Try \\`python -h' for more information.\" >&2; exit 2",
            IncompatibleAgentError,
            r"~/python is older than 3\.11",
            "name a newer one: --python",
        ),
        ("echo \"Error: No such command 'where'.\" >&2; exit 2", IncompatibleAgentError, "is another version", INSTALL),
    ],
)
def test_whatever_a_host_answers_becomes_one_clean_line_with_what_mends_it(
    network: Network, answer: str, kind: type[AppError], words: str, hint: str
) -> None:
    with link_to(network, answer) as link, pytest.raises(kind, match=words) as caught:
        link.bring_up()

    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)


def test_what_a_login_shell_prints_first_is_no_answer(network: Network) -> None:
    place = f'{{"ready":true,"dir":"/d","python":"p","home":"/h","wire_version":{WIRE_VERSION}}}'

    with link_to(network, f"echo 'Welcome to h1!'; echo '{place}'") as link:
        assert link.bring_up().dir == "/d"


def test_an_agent_of_another_version_is_refused_before_it_is_spoken_to(network: Network) -> None:
    place = f'{{"ready":true,"dir":"/d","python":"p","home":"/h","wire_version":{WIRE_VERSION + 1}}}'

    with link_to(network, f"echo '{place}'") as link, pytest.raises(IncompatibleAgentError) as caught:
        link.bring_up()

    assert caught.value.exit_code == 5
    assert caught.value.hint.endswith(f"{INSTALL} --restart-agent")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose sockets have names that the kernel takes."""
    with tempfile.TemporaryDirectory(prefix="rdt-", dir="/tmp") as directory:
        yield Path(directory)


def test_what_a_killed_console_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    dead, living = TunnelDir(), TunnelDir()
    os.close(dead._lock_fd)  # what the kernel does for a process that is killed

    with TunnelDir() as new:
        left = set(short_path.iterdir())

    assert left == {living.path, new.path}
    living.remove()
    living.remove()
    assert list(short_path.iterdir()) == []


def test_a_directory_that_two_threads_remove_closes_its_lock_once(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    place, remove = TunnelDir(), shutil.rmtree

    def while_another_removes_it(path: Path, *, ignore_errors: bool) -> None:
        place.remove()
        remove(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", while_another_removes_it)
        place.remove()
    assert list(short_path.iterdir()) == []
