from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from app.session.audit import MAX_HOSTS, MAX_SENTENCE_CHARS, AuditedAction, audit_line

AT = datetime(2026, 3, 1, 2, 3, 4, 567_890, UTC)


def entry_of(audited: AuditedAction, sentence: str = "", *, is_done: bool = True) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(audit_line(audited, sentence, is_done=is_done, who="me@desk", at=AT))
    return entry


def test_a_line_says_when_who_what_where_and_how_it_went() -> None:
    audited = AuditedAction("kill", ("gpu1", "gpu2"), "train")

    assert audit_line(audited, "job train was killed", is_done=True, who="me@desk", at=AT) == (
        b'{"time":"2026-03-01T02:03:04.567+00:00","who":"me@desk","action":"kill","hosts":["gpu1","gpu2"],'
        b'"num_hosts":2,"job_id":"train","outcome":"done","sentence":"job train was killed"}\n'
    )
    assert entry_of(audited, is_done=False)["outcome"] == "failed"


def test_what_is_about_an_agent_names_no_job() -> None:
    assert not {"job_id", "program"} & set(entry_of(AuditedAction("up", ("gpu1",))))


def test_secrets_of_a_program_and_in_a_sentence_are_masked() -> None:
    audited = AuditedAction("start", ("gpu1",), "train", ("train.py", "--token", "hush", "--name", "a b"))

    entry = entry_of(audited, "gpu1: cannot read https://me:hush@example.org/x")

    assert entry["program"] == "train.py --token '***' --name 'a b'"
    assert "hush" not in json.dumps(entry)


def test_text_of_nodes_stays_one_short_line_of_printable_ascii() -> None:
    line = audit_line(
        AuditedAction("up", ("\x1b[2J\u202e",)), "\x9b\n" + "x" * 10_000, is_done=True, who="\x07@desk", at=AT
    )

    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert len(line) < MAX_SENTENCE_CHARS + 300


def test_of_very_many_hosts_some_are_named_and_all_counted() -> None:
    entry = entry_of(AuditedAction("stop", tuple(f"gpu{number}" for number in range(1000)), "train"))

    assert (len(entry["hosts"]), entry["num_hosts"]) == (MAX_HOSTS, 1000)
