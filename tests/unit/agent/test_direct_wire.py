"""What is asked of a node that is to listen, and what it answers: bounded, and refused where it is anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.wire.codec import MalformedMessageError
from agent.wire.commands import decode_command, encode_command
from agent.wire.direct import ListenForTelemetry, Listening, StopListening
from agent.wire.replies import decode_reply, encode_reply

ASKED = ListenForTelemetry("c" * 40, "10.0.0.0/24", 47000, 47009)
ANSWERED = Listening("s" * 40, ["10.0.0.5", "2001:db8::5"], 47001, 300.0)


def test_commands_and_the_reply_come_through_as_they_were() -> None:
    assert decode_command(encode_command(ASKED)) == ASKED
    assert decode_command(encode_command(StopListening("c" * 40))) == StopListening("c" * 40)
    assert decode_reply(encode_reply(ANSWERED)) == ANSWERED


@pytest.mark.parametrize(
    "change",
    [
        {"client_key": "short"},
        {"client_key": "c" * 41},
        {"client_key": "c" * 39 + "\n"},
        {"client_key": "~" * 40},
        {"interface": ""},
        {"interface": "*"},
        {"interface": "eth0\n"},
        {"interface": "e" * 65},
        {"first_port": 65536},
        {"last_port": -1},
        {"more": 1},
    ],
)
def test_a_question_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessageError):
        decode_command(msgspec.json.encode({**msgspec.to_builtins(ASKED), **change}))


@pytest.mark.parametrize(
    "change",
    [{"server_key": ""}, {"addresses": []}, {"addresses": ["10.0.0.5"] * 9}, {"port": 0}, {"lease_s": -1}],
)
def test_an_answer_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessageError):
        decode_reply(msgspec.json.encode({**msgspec.to_builtins(ANSWERED), **change}))
