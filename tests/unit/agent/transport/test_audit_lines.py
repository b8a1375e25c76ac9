from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from agent.transport.audit import MAX_NAMES, audit_line, changes_something
from agent.transport.command_socket import Peer
from agent.wire.commands import (
    Abort,
    Accepted,
    Claim,
    CleanLeftovers,
    Command,
    Commit,
    FindLeftovers,
    GetStatus,
    InjectFault,
    Kill,
    Leftover,
    Leftovers,
    Prepare,
    PrepareAgain,
    PullHistory,
    RefusalReason,
    Refused,
    Reply,
    ShowJob,
    Shutdown,
    Stop,
)
from agent.wire.logs import PullLogs, ReadLog
from agent.wire.stacks import GetStacks
from ddpcore.wire import FaultKind
from tests.support.jobs import make_spec

AT = datetime(2026, 3, 1, 2, 3, 4, 567_890, UTC)
PEER = Peer(4711, 1000, "sshd")


def line_of(command: Command, reply: Reply | None = Accepted(), peer: Peer = PEER) -> bytes:  # noqa: B008 - frozen
    return audit_line(command, reply, peer, "me", "gpu1", AT)


def entry_of(command: Command, reply: Reply | None = Accepted()) -> dict[str, Any]:  # noqa: B008 - frozen
    entry: dict[str, Any] = json.loads(line_of(command, reply))
    return entry


def test_a_line_says_when_what_how_it_went_where_and_who() -> None:
    assert line_of(Kill("train")) == (
        b'{"time":"2026-03-01T02:03:04.567+00:00","command":"kill","job_id":"train","outcome":"accepted",'
        b'"node":"gpu1","uid":1000,"user":"me","pid":4711,"process":"sshd"}\n'
    )


def test_who_comes_through_a_relay_is_told_by_the_road() -> None:
    entry = json.loads(line_of(Kill("train"), peer=PEER._replace(process="python", channel="relay: me@login1, sshd 7")))

    assert (entry["process"], entry["road"]) == ("python", "relay: me@login1, sshd 7")


def test_a_refusal_is_told_by_its_reason_and_not_by_words_that_may_quote_a_command_line() -> None:
    refused = Refused(RefusalReason.NOT_PERMITTED, "'python train.py --token hush' is not rankdeck's")

    line = line_of(CleanLeftovers(["process:7:1"]), refused)

    entry = json.loads(line)
    assert (entry["outcome"], entry["reason"], entry["names"]) == ("refused", "not_permitted", ["process:7:1"])
    assert b"hush" not in line


def test_a_command_that_nobody_answers_any_more_is_written_down_all_the_same() -> None:
    assert entry_of(Kill("train"), None)["outcome"] == "unknown"


def test_of_a_job_its_shape_and_its_masked_program_are_told_and_nothing_of_its_environment() -> None:
    spec = make_spec(command=["train.py", "--token", "hush", "--lr", "1"], env={"LOUD": "quiet"}, attempt=3)

    line = line_of(Prepare(spec))

    entry = json.loads(line)
    assert entry["program"] == "train.py --token '***' --lr 1"
    assert (entry["job_id"], entry["attempt"], entry["first_rank"], entry["local_world_size"]) == ("train", 3, 2, 2)
    assert entry["allow_faults"] is True
    assert b"hush" not in line
    assert b"quiet" not in line
    assert b"LOUD" not in line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (Claim(7, "me@desk"), {"generation": 7, "holder": "me@desk"}),
        (PrepareAgain("j", 2, 0, 1, 1), {"job_id": "j", "attempt": 2, "world_size": 1}),
        (Commit("j"), {"job_id": "j"}),
        (Abort("j"), {"job_id": "j"}),
        (Stop("j", is_agreed=False), {"job_id": "j", "is_agreed": False}),
        (InjectFault("j", FaultKind.FREEZE, 3, at_step=9), {"job_id": "j", "kind": "freeze", "rank": 3, "at_step": 9}),
        (Shutdown(kill_jobs=True), {"kill_jobs": True}),
    ],
)
def test_each_command_tells_its_few_fields(command: Command, told: dict[str, Any]) -> None:
    entry = entry_of(command)

    assert {name: entry[name] for name in told} == told
    assert entry["command"] == command.__struct_config__.tag
    assert None not in entry.values()


def test_of_what_was_cleaned_a_few_names_are_told_and_how_many_they_were() -> None:
    items = [Leftover(f"shm:{number}", "secret words", is_ours=True, age_s=1, size_bytes=1) for number in range(40)]

    entry = entry_of(CleanLeftovers(), Leftovers(items))

    assert (entry["outcome"], entry["num_cleaned"], len(entry["cleaned"])) == ("accepted", 40, MAX_NAMES)
    assert entry["cleaned"][0] == "shm:0"
    assert "secret words" not in json.dumps(entry)


def test_hostile_names_stay_one_line_of_printable_ascii_and_are_cut_short() -> None:
    line = line_of(Claim(1, "\x1b]52;c;\u202e\x9b\n" + "x" * 4000), peer=Peer(1, 0, "\x1b[2J\ufffd"))

    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert len(line) < 1000


def test_what_only_looks_is_not_written_down() -> None:
    lookers = (GetStatus(), ShowJob("j"), FindLeftovers(), PullHistory(), PullLogs(), ReadLog("j", 0), GetStacks("j"))

    assert [changes_something(command) for command in lookers] == [False] * len(lookers)
    assert changes_something(Commit("j"))
