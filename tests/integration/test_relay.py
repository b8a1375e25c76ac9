"""Real agents that dial a real relay, and what a console beside it finds: commands, reports, and how old they are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import psutil
import pytest
import zmq

from agent.relay.relay import MAX_STREAMS_A_NODE
from agent.relay.relay_dir import read_invitation, write_invitation
from agent.relay.serve_relay import MAX_DATA_BYTES
from agent.transport.relay_sockets import knock_with, new_key
from agent.wire.codec import CONTROL_SOCKET, MalformedMessageError
from agent.wire.commands import Accepted, Claim, GetStatus, Status, decode_reply, encode_command
from agent.wire.digest import decode_frame
from agent.wire.relay import (
    MAX_RELAY_BYTES,
    RELAY_VERSION,
    Data,
    Hello,
    NotWelcome,
    RelayHeartbeat,
    Report,
    Take,
    Welcome,
    WhoAreYou,
    decode_from_relay,
    encode_relay_message,
)
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.relays import MergedReader, RunningRelay
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.relay import FromNode, FromRelay

GONE_S = 40.0
"""Ten seconds in which a peer that says nothing is missed, and some for a machine with other work."""


@pytest.fixture
def relay() -> Iterator[RunningRelay]:
    with RunningRelay() as running:
        yield running


def agent_of(relay: RunningRelay, node: str, **how: str) -> RunningAgent:
    return RunningAgent("--relay", str(relay.invitation), node=node, environment=how)


class Impostor:
    """Somebody who has the invitation, and says whatever the test wants."""

    def __init__(self, relay: RunningRelay, *, key_is_known: bool = True) -> None:
        invitation = read_invitation(relay.invitation)
        assert invitation is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        knock_with(self.socket, invitation.key if key_is_known else new_key(), invitation.relay_key)
        self.socket.connect(f"tcp://{invitation.address}:{invitation.port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def say(self, message: FromNode) -> None:
        self.socket.send(encode_relay_message(message))

    def hears(self, within_s: float = 10.0) -> FromRelay | None:
        return decode_from_relay(self.socket.recv()) if self.socket.poll(int(within_s * 1000)) else None

    def hears_first(self, kind: type[FromRelay], within_s: float = 10.0) -> FromRelay:
        deadline_s = time.monotonic() + within_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if isinstance(heard := self.hears(left_s), kind):
                return heard
        raise AssertionError(f"no {kind.__name__}")


def hello(node: str = "x", instance: str = "1", **fields: int) -> Hello:
    return Hello(version=RELAY_VERSION, node=node, instance=instance, place=b"{}", **fields)


def connected_to(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(str(path))
    return connection


def test_a_console_gets_the_newest_report_of_every_node_and_speaks_to_each_agent(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as a, agent_of(relay, "b") as b, MergedReader(relay.directory) as console:
        until(lambda: set(console.newest) == {"a", "b"}, 20, "both have reported")
        until(lambda: all(age_s < 2.0 for _, age_s in list(console.newest.values())), 20, "what is heard is new")

        reports = {node: decode_frame(frame) for node, (frame, _) in console.newest.items()}
        assert {node: report.epoch for node, report in reports.items()} == {
            "a": a.ready["epoch"],
            "b": b.ready["epoch"],
        }
        for agent in (a, b):
            node = agent.ready["node"]
            with (
                connected_to(relay.directory / "nodes" / node / CONTROL_SOCKET) as road,
                road.makefile("rb") as replies,
            ):
                for _ in range(3):
                    road.sendall(encode_command(GetStatus()))
                    reply = decode_reply(replies.readline())
                    assert isinstance(reply, Status)
                    assert reply.report.epoch == agent.ready["epoch"]


def test_every_verb_by_hand_takes_the_directory_of_a_node(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as agent:
        relay.wait_for("a")

        done = run_agent_verb("status", "--dir", str(relay.directory / "nodes" / "a"))

        assert json.loads(done.stdout)["report"]["epoch"] == agent.ready["epoch"]


def test_the_roster_says_who_is_there_who_is_gone_and_how_many_are_to_come(relay: RunningRelay) -> None:
    with agent_of(relay, "a", SLURM_JOB_NUM_NODES="3") as agent:
        with agent_of(relay, "b"):
            relay.wait_for("a", "b")
        relay.wait_for("a")
        roster = relay.roster()

    assert roster["num_expected"] == 3
    a, b = roster["nodes"]
    assert (a["is_here"], a["place"]["dir"]) == (True, str(agent.directory))
    assert (b["is_here"], b["why"], b["has_ended"]) == (False, "its agent has ended", True)
    brief = json.loads(run_agent_verb("roster", "--brief", "--dir", str(relay.directory)).stdout or "{}")
    assert brief["nodes"] == []


def test_an_agent_that_goes_to_another_relay_has_not_ended(relay: RunningRelay, tmp_path: Path) -> None:
    invitation = tmp_path / "invitation.json"
    with RunningRelay() as other:
        first, second = read_invitation(relay.invitation), read_invitation(other.invitation)
        assert first is not None
        assert second is not None
        write_invitation(invitation, first)
        with RunningAgent("--relay", str(invitation), node="a"):
            relay.wait_for("a")
            write_invitation(invitation, second)
            other.wait_for("a")
            relay.wait_for()

            (left,) = relay.roster()["nodes"]
            assert (left["why"], left["has_ended"]) == ("the connection to it is lost", False)


def test_the_audit_log_of_an_agent_names_the_road_and_whom_the_relay_saw(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as agent:
        relay.wait_for("a")
        with connected_to(relay.directory / "nodes" / "a" / CONTROL_SOCKET) as road, road.makefile("rb") as replies:
            road.sendall(encode_command(Claim(7, "somebody")))
            assert isinstance(decode_reply(replies.readline()), Accepted)
        agent.ask(Claim(8, "somebody here"))
        lines = [json.loads(line) for line in (agent.directory / "audit.jsonl").read_text().splitlines()]

    over, here = lines
    assert over["road"].startswith("relay: ")
    assert str(os.getpid()) in over["road"]
    assert "road" not in here


def test_an_agent_waits_for_a_relay_that_is_not_there_yet(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="rdr-", dir="/tmp"))
    with (
        RunningAgent("--relay", str(directory / "invitation.json"), node="a"),
        RunningRelay(directory=directory) as relay,
    ):
        relay.wait_for("a")


def test_an_agent_that_can_make_no_socket_of_an_invitation_says_so_and_takes_the_next_one(
    relay: RunningRelay, tmp_path: Path
) -> None:
    invitation, good = tmp_path / "invitation.json", read_invitation(relay.invitation)
    assert good is not None
    write_invitation(invitation, msgspec.structs.replace(good, relay_key="#" * 40))
    with RunningAgent("--relay", str(invitation), node="a") as agent:
        assert agent.process.stderr is not None
        assert "it cannot be dialled: Invalid argument" in agent.process.stderr.readline()

        write_invitation(invitation, good)

        relay.wait_for("a")


def test_when_a_relay_is_killed_its_agents_find_the_next_one(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as a, agent_of(relay, "b"):
        relay.wait_for("a", "b")
        relay.kill()
        before = read_invitation(relay.invitation)
        relay.begin_again()

        assert read_invitation(relay.invitation) != before
        relay.wait_for("a", "b")
        assert a.report().epoch == a.ready["epoch"]


def test_when_a_relay_ends_in_order_nothing_is_left_to_be_used(relay: RunningRelay) -> None:
    with agent_of(relay, "a"):
        relay.wait_for("a")
        relay.end()

        assert {path.name for path in relay.directory.iterdir()} == {"relay.lock"}


def test_a_relay_that_is_owned_ends_with_its_pipe_and_by_no_signal_that_slurm_sends_to_all(tmp_path: Path) -> None:
    place = tmp_path / "r"
    argv = [sys.executable, "-P", "-m", "agent", "relay", "--listen", "127.0.0.1", "--dir", str(place)]
    with subprocess.Popen([*argv, "--until-stdin-ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
        try:
            assert relay.stdin is not None
            assert relay.stdout is not None
            assert json.loads(relay.stdout.readline())["port"]
            relay.send_signal(signal.SIGTERM)
            relay.send_signal(signal.SIGUSR1)
            assert run_agent_verb("roster", "--dir", str(place)).returncode == 0
            relay.stdin.close()
            assert relay.wait(20) == 0
        finally:
            relay.kill()
    assert {path.name for path in place.iterdir()} == {"relay.lock"}


@pytest.mark.fault(row=1)
def test_an_agent_that_is_killed_is_missed_and_its_successor_is_let_in_at_once(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as first, MergedReader(relay.directory) as console:
        until(lambda: console.here == {"a"}, 20, "it is there")
        first.process.kill()
        until(lambda: console.here == set(), GONE_S, "it is missed")
        assert console.entries["a"].why in {"the connection to it is lost", "nothing has come from it"}
        assert not (relay.directory / "nodes" / "a" / CONTROL_SOCKET).exists()
        with RunningAgent("--relay", str(relay.invitation), node="a", directory=first.directory):
            until(lambda: console.here == {"a"}, 20, "it is there again")


@pytest.mark.fault(row=2)
def test_an_agent_that_stands_still_is_missed_in_time_and_comes_back_by_itself(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as agent, MergedReader(relay.directory) as console:
        until(lambda: console.here == {"a"}, 20, "it is there")
        agent.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: console.here == set(), GONE_S, "it is missed")
        finally:
            agent.process.send_signal(signal.SIGCONT)

        until(lambda: console.here == {"a"}, 30, "it is there again")


def test_after_a_relay_stood_still_reports_are_new_or_say_how_old_they_are(relay: RunningRelay) -> None:
    with agent_of(relay, "a"), MergedReader(relay.directory) as console:
        until(lambda: "a" in console.newest, 20, "it has reported")
        relay.process.send_signal(signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        time.sleep(3.0)  # it is time that is measured
        known = console.newest["a"]
        console.forget_figures()
        relay.process.send_signal(signal.SIGCONT)

        until(lambda: console.newest["a"] is not known and console.ages_s and console.ages_s[-1] < 1.5, 20, "news")
        assert max(console.ages_s) < time.monotonic() - stopped_at_s + 2.0
        assert decode_frame(console.newest["a"][0]).report_seq > decode_frame(known[0]).report_seq


def test_reports_are_asked_for_only_while_a_console_watches(relay: RunningRelay) -> None:
    def is_asked(within_s: float) -> bool:
        with contextlib.suppress(AssertionError):
            return isinstance(node.hears_first(Take, within_s), Take)
        return False

    def is_left_alone() -> bool:
        node.say(Report(0, 0, b"for nobody"))
        return not is_asked(3.0)

    with Impostor(relay) as node:
        node.say(hello())
        node.hears_first(Welcome)
        assert not is_asked(3.0)
        for _ in range(2):
            with MergedReader(relay.directory):
                assert is_asked(10.0)
            until(is_left_alone, 40, "nobody asks any more")


def test_a_second_node_of_the_same_name_is_told_so_and_does_not_disturb_the_first(relay: RunningRelay) -> None:
    with agent_of(relay, "a") as first:
        relay.wait_for("a")
        second = RunningAgent("--relay", str(relay.invitation), node="a")
        with second:
            stderr = second.process.stderr
            assert stderr is not None
            line = until(lambda: next((text for text in stderr if "another agent" in text), ""), 20, "it is told")

            assert "serve --node" in line
            place = relay.roster()["nodes"][0]["place"]
            assert place["dir"] == str(first.directory)


def test_who_has_another_key_is_not_heard(relay: RunningRelay) -> None:
    with Impostor(relay, key_is_known=False) as stranger:
        stranger.say(hello())

        assert stranger.hears(2.0) is None
    assert relay.roster()["nodes"] == []


@pytest.mark.fault(row=30)
def test_garbage_with_the_right_key_is_dropped_and_told_and_others_are_served_on(relay: RunningRelay) -> None:
    with agent_of(relay, "a"), Impostor(relay) as node, MergedReader(relay.directory) as console:
        until(lambda: "a" in console.newest, 20, "it has reported")
        node.say(RelayHeartbeat())
        assert isinstance(node.hears(), WhoAreYou)
        node.say(hello())
        node.hears_first(Welcome)
        node.hears_first(Take)
        for garbage in (b"", b"\xc1", b"x" * 1000, encode_relay_message(Take())):
            node.socket.send(garbage)
        node.socket.send_multipart([b"1"] * 50)
        node.say(Data(99, b"of a stream that nobody has opened"))
        node.say(Report(0, 0, b"no report at all"))
        node.say(Report(0, 0, b"and nobody has asked"))
        node.say(Report(0, 0, b"for these"))
        until(lambda: console.newest.get("x", (b"",))[0] != b"", 20, "what was asked for is passed on unread")

        assert console.newest["x"][0] in {b"no report at all", b"and nobody has asked", b"for these"}
        seen = console.num_reports
        until(lambda: console.num_reports > seen + 2, 40, "the other node is heard on")
    assert "not those of an agent of this version" in relay.said()


def test_a_node_that_says_it_is_of_an_age_that_cannot_be_costs_no_console_its_connection(relay: RunningRelay) -> None:
    with agent_of(relay, "a"), Impostor(relay) as node, MergedReader(relay.directory) as console:
        node.say(hello())
        node.hears_first(Take)
        for age_ms in (2**63 - 1, 2**64 - 1):
            node.say(Report(age_ms, 0, b"of another time"))
        seen = console.num_reports

        def is_heard_on() -> bool:
            node.say(RelayHeartbeat())  # it is not to be missed meanwhile
            return console.num_reports > seen + 4

        until(is_heard_on, 40, "the other node is heard on")
        assert not console.is_over.is_set()
        assert "x" not in console.newest
        node.say(Report(2**40, 0, b"old"))
        until(lambda: "x" in console.newest, 10, "what can be is passed on")


def test_a_node_that_begins_to_talk_nonsense_of_itself_stays_what_it_was_and_is_missed_as_any(
    relay: RunningRelay,
) -> None:
    with Impostor(relay) as node:
        node.say(hello())
        node.hears_first(Welcome)
        node.say(msgspec.structs.replace(hello(), place=b"nonsense"))

        heard = node.hears_first(NotWelcome)
        assert isinstance(heard, NotWelcome)
        assert "not the place of an agent" in heard.why
        relay.wait_for("x")
    until(lambda: not relay.roster()["nodes"][0]["is_here"], GONE_S, "it is missed")
    assert not (relay.directory / "nodes" / "x" / CONTROL_SOCKET).exists()


@pytest.mark.fault(row=30)
def test_a_message_that_is_too_long_costs_its_sender_the_connection_alone(relay: RunningRelay) -> None:
    with agent_of(relay, "a"), Impostor(relay) as node:
        node.say(hello())
        node.hears_first(Welcome)
        node.socket.send(b"x" * (MAX_RELAY_BYTES + 1))

        until(lambda: [one["is_here"] for one in relay.roster()["nodes"]] == [True, False], GONE_S, "it is gone")


@pytest.mark.fault(row=30)
def test_a_message_of_many_parts_costs_its_sender_the_connection_before_it_costs_the_machine_its_memory(
    relay: RunningRelay,
) -> None:
    process = psutil.Process(relay.process.pid)
    assert process.rlimit(psutil.RLIMIT_DATA)[0] == MAX_DATA_BYTES
    process.rlimit(psutil.RLIMIT_DATA, (250 << 20, 250 << 20))
    part, num_parts, most = b"x" * 1_000_000, 400, 0
    with agent_of(relay, "a"), Impostor(relay) as node:
        relay.wait_for("a")
        node.say(hello())
        node.hears_first(Welcome)
        for _ in range(num_parts):
            node.socket.send(part, zmq.SNDMORE)
        node.socket.send(b"")

        def is_gone() -> bool:
            nonlocal most
            most = max(most, process.memory_info().rss)
            with contextlib.suppress(subprocess.CalledProcessError):  # no memory for an answer just then
                return [one["is_here"] for one in relay.roster()["nodes"]] == [True, False]
            return False

        until(is_gone, 60, "it is dropped")
    assert relay.process.poll() is None
    assert most < 300 << 20


def test_an_agent_of_another_version_is_told_what_to_do(relay: RunningRelay) -> None:
    with Impostor(relay) as node:
        node.say(Hello(version=RELAY_VERSION + 1, node="x", instance="1", place=b"{}"))
        answer = node.hears_first(NotWelcome)
        assert isinstance(answer, NotWelcome)
        assert "install the same one" in answer.why
        node.say(Hello(version=RELAY_VERSION, node="x", instance="1", place=b"not json"))
        assert isinstance(node.hears_first(NotWelcome), NotWelcome)
    assert relay.roster()["nodes"] == []


def test_a_node_says_nothing_of_any_use_with_a_name_that_leads_elsewhere(relay: RunningRelay) -> None:
    with Impostor(relay) as node:
        node.say(Hello(version=RELAY_VERSION, node="../../x", instance="1", place=b"{}"))

        assert node.hears(1.0) is None
    assert list((relay.directory / "nodes").iterdir()) == []


@pytest.mark.fault(row=31)
def test_a_slow_console_costs_the_others_nothing_and_gets_the_latest(relay: RunningRelay) -> None:
    deaf, slow = MergedReader(relay.directory, pause_s=100.0), MergedReader(relay.directory, pause_s=2.0)
    with agent_of(relay, "a"), deaf, slow, MergedReader(relay.directory) as console:
        until(lambda: console.num_reports >= 10, 60, "the quick one hears all")
        until(lambda: slow.num_reports >= 2, 20, "the slow one hears now and then")

        assert slow.num_reports <= console.num_reports / 2
        until(lambda: slow.newest["a"][1] < 3.5, 40, "it asks for one at a time")


def test_a_large_reply_comes_whole_to_one_who_reads_slowly_while_others_are_served(relay: RunningRelay) -> None:
    with agent_of(relay, "a"):
        relay.wait_for("a")
        path = relay.directory / "nodes" / "a" / CONTROL_SOCKET
        with connected_to(path) as slow, connected_to(path) as quick, quick.makefile("rb") as replies:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(30)
            num_questions = 200
            question = encode_command(GetStatus()) * num_questions
            slow.sendall(question)
            for _ in range(5):
                quick.sendall(encode_command(GetStatus()))
                assert isinstance(decode_reply(replies.readline()), Status)
            slow.shutdown(socket.SHUT_WR)
            with slow.makefile("rb") as lines:
                answers = lines.readlines()

        assert len(answers) == num_questions
        assert all(isinstance(decode_reply(line), Status) for line in answers)


def test_too_many_streams_to_one_node_are_refused_and_room_is_made_by_those_that_end(relay: RunningRelay) -> None:
    with agent_of(relay, "a"), contextlib.ExitStack() as opened:
        relay.wait_for("a")
        path = relay.directory / "nodes" / "a" / CONTROL_SOCKET
        channels = [opened.enter_context(connected_to(path)) for _ in range(MAX_STREAMS_A_NODE)]
        for road in channels:
            assert is_answered(road)

        assert not is_answered(opened.enter_context(connected_to(path)))
        assert is_answered(channels[0])
        channels[1].close()

        until(lambda: is_answered(opened.enter_context(connected_to(path))), 10, "there is room for another one")


def is_answered(road: socket.socket) -> bool:
    """Return whether an agent answers; whoever is refused finds the connection closed."""
    try:
        road.sendall(encode_command(GetStatus()))
        with road.makefile("rb") as replies:
            return isinstance(decode_reply(replies.readline()), Status)
    except (OSError, MalformedMessageError):
        return False


def test_two_relays_in_one_directory_are_refused(relay: RunningRelay) -> None:
    done = run_agent_verb("relay", "--listen", "127.0.0.1", "--dir", str(relay.directory))

    assert done.returncode == 2
    assert "another relay serves in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0"), "every network of this machine"),
        (("--listen", "nowhere0"), "no such interface"),
        ((), "Missing option '--listen'"),
    ],
)
def test_a_relay_that_cannot_be_says_why_in_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = run_agent_verb("relay", "--dir", str(tmp_path / "r"), *options)

    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_told(relay: RunningRelay, tmp_path: Path) -> None:
    done = run_agent_verb("relay", "--dir", str(tmp_path / "r"), "--listen", f"127.0.0.1:{relay.ready['port']}")

    assert done.returncode == 1
    assert "in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_invitation_that_others_can_read_is_refused_by_the_agent(relay: RunningRelay, tmp_path: Path) -> None:
    relay.invitation.chmod(0o644)

    done = run_agent_verb("serve", "--dir", str(tmp_path / "a"), "--node", "a", "--relay", str(relay.invitation))

    assert done.returncode == 2
    assert "mode 0644" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_daemon_dials_too(relay: RunningRelay) -> None:
    directory = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    done = run_agent_verb("serve", "--daemon", "--dir", str(directory), "--node", "a", "--relay", str(relay.invitation))
    try:
        assert done.returncode == 0, done.stderr
        relay.wait_for("a")
    finally:
        run_agent_verb("shutdown", "--dir", str(directory))


def test_nobody_relays_where_no_relay_is(tmp_path: Path) -> None:
    done = run_agent_verb("roster", "--dir", str(tmp_path))

    assert done.returncode == 3
    assert "answers at" in done.stderr
