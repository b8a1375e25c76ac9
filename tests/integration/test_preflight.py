"""Hosts asked for real, some of which lie: none of them keeps the others from being told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agent.wire.examination import Examination, Health
from app.errors import AgentRefusedError, AppError, ExitCode, HostKeyError, HostUnreachableError, SessionError
from app.fleet.local_link import LocalLink
from app.preflight.examining import failure_of, preflight
from app.preflight.findings import FailureKind, Step, Wanted
from tests.support.examinations import ROWS, facts, of_host, unwell

if TYPE_CHECKING:
    from pathlib import Path

    from app.fleet.agent_link import AgentLink

LISTENS = {"schema": 1, "address": "10.9.9.9", "port": 40_000, "token": "t"}
TIME = {"wall_time_s": 1.0}


class Liar:
    """A Python that says what a test wants, for each verb."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def link(self, host: str, *, exit_code: int = 0, **answers: Any) -> LocalLink:
        """Return a link to a host that answers so; of `listen` a list, line by line."""
        good = {
            "doctor": Examination(1, ROWS, facts(host)),
            "listen": [LISTENS, *[TIME] * 4],
            "reach": {"schema": 1, "reached": []},
        }
        for verb, answer in (good | answers).items():
            lines = answer if isinstance(answer, list) else [answer]
            text = "\n".join(line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines)
            (self.path / verb).write_text(text + "\n")
        python = self.path / "python"
        waits = f'if grep -q token "{self.path}/$4"; then cat > /dev/null; fi'
        python.write_text(f'#!/bin/sh\ncat "{self.path}/$4"\n{waits}\nexit {exit_code}\n')
        python.chmod(0o700)
        link = LocalLink(str(python))
        link.host = host
        return link


def pair(tmp_path: Path, **answers: Any) -> list[tuple[Wanted, AgentLink | AppError]]:
    """Return a host that answers so and one that answers well; both say that they are where nothing is."""
    first, second = Liar(tmp_path / "h1").link("h1", **answers), Liar(tmp_path / "h2").link("h2")
    return [(Wanted("h1"), first), (Wanted("h2"), second)]


def test_hosts_that_say_nothing_of_others_are_told(tmp_path: Path) -> None:
    found = preflight(pair(tmp_path))

    assert [(host, name) for host, name, _ in unwell(found)] == [("", "clock"), ("h1", "reach"), ("h2", "reach")]
    assert {detail for _, name, detail in unwell(found) if name == "reach"} == {
        "it does not reach h2 at 10.9.9.9:40000: nothing was reported of it",
        "it does not reach h1 at 10.9.9.9:40000: nothing was reported of it",
    }
    assert found.exit_code is ExitCode.JOB_FAILED


@pytest.mark.parametrize(
    "answer",
    ["\x1b[2Jhello", "[" * 5000, "{}", json.dumps({"schema": 2, "rows": [], "facts": {}}), '{"schema":1,"rows":{}}'],
)
def test_an_examination_that_is_none_is_that_hosts_trouble(tmp_path: Path, answer: str) -> None:
    found = preflight(pair(tmp_path, doctor=answer))

    failure = of_host(found, "h1").failure
    assert failure is not None
    assert (failure.kind, failure.message.startswith("not an examination: ")) == (FailureKind.RANKDECK, True)
    assert "\x1b" not in failure.message
    assert of_host(found, "h2").failure is None
    assert found.exit_code is ExitCode.UNREACHABLE


def test_what_a_login_prints_is_not_taken_for_the_answer_of_a_doctor_that_failed(tmp_path: Path) -> None:
    found = preflight(pair(tmp_path, doctor="Welcome to h1", exit_code=1))

    failure = of_host(found, "h1").failure
    assert failure is not None
    assert failure.message == "exit code 1"


def test_a_doctor_that_fails_without_a_word_has_not_answered(tmp_path: Path) -> None:
    found = preflight(pair(tmp_path, doctor="", exit_code=1))

    failure = of_host(found, "h1").failure
    assert failure is not None
    assert failure.message == "exit code 1"


@pytest.mark.parametrize("listen", ["{}", '{"schema":1,"port":99999}', [LISTENS, '{"wall_time_s":"noon"}'], "bye"])
def test_a_listener_that_lies_is_told_and_not_reached_for(tmp_path: Path, listen: Any) -> None:
    found = preflight(pair(tmp_path, listen=listen))

    assert [row.name for row in of_host(found, "h1").rows if row.status is Health.BAD] == ["ports"]
    assert not any(row.name == "reach" for row in of_host(found, "h2").rows)


def test_a_report_of_the_others_that_is_none_is_told(tmp_path: Path) -> None:
    found = preflight(pair(tmp_path, reach='{"schema":1,"reached":7}'))

    ((_, detail),) = [(name, detail) for host, name, detail in unwell(found) if (host, name) == ("h1", "reach")]
    assert detail.startswith("it could not try the others: not what was reached: ")


def test_each_host_is_told_of_on_its_way(tmp_path: Path) -> None:
    told: dict[str, list[Step]] = {"h1": [], "h2": [], "h3": []}
    lost = HostUnreachableError("h3", "it is gone")

    preflight([*pair(tmp_path, doctor="{}"), (Wanted("h3"), lost)], notify=lambda host, step: told[host].append(step))

    assert told == {
        "h1": [Step.EXAMINING, Step.FAILED],
        "h2": [Step.EXAMINING, Step.WAITING, Step.LISTENING, Step.REACHING, Step.DONE],
        "h3": [Step.FAILED],
    }


def test_a_connection_that_failed_is_a_row(tmp_path: Path) -> None:
    refused = HostUnreachableError("h1", "10.0.0.1 port 22 refuses connections", "is sshd running there?")

    found = preflight([(Wanted("h1"), refused), (Wanted("h2"), Liar(tmp_path / "h2").link("h2"))])

    assert ("h1", "reachable", "10.0.0.1 port 22 refuses connections") in unwell(found)
    assert preflight([]).hosts == ()


def test_what_kept_a_host_from_answering_is_told_by_its_kind() -> None:
    key = failure_of("h1", HostKeyError("h1", "its key has changed", "look"))
    assert (key.kind, key.message, key.hint) == (FailureKind.HOST_KEY, "its key has changed", "look")
    assert failure_of("h1", AgentRefusedError("h1", "busy", "\x1b[2J")).kind is FailureKind.RANKDECK
    assert "\x1b" not in failure_of("h1", AgentRefusedError("h1", "busy", "\x1b[2J")).message
    assert failure_of("h1", SessionError("there is no ssh on this machine")).kind is FailureKind.UNREACHABLE
