"""`rankdeck replay` on what is a recording, and on what is none."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from app.cli.evidence import replay
from app.errors import AppError, ExitCode
from app.recording.bundle import Evidence, encode_bundle
from app.recording.evidence import default_directory
from app.recording.records import encode_recording
from tests.support.recordings import frozen_recording

if TYPE_CHECKING:
    from pathlib import Path


def test_it_prints_what_was_said_by_the_clock_and_how_it_stood(tmp_path: Path) -> None:
    recording = frozen_recording()
    path = tmp_path / "it"
    path.write_bytes(encode_recording(recording.opening, recording.records))

    printed = CliRunner().invoke(replay, [str(path), "--json"])

    assert printed.exit_code == ExitCode.VERDICT_STANDS
    assert json.loads(printed.stdout)["verdicts"][0]["culprits"] == [2]
    (verdict,) = [line for line in printed.stderr.splitlines() if "is frozen" in line]
    assert verdict.startswith("03:12:3")


def test_of_a_job_it_plays_the_latest_evidence_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    recording = frozen_recording()
    directory = default_directory()
    directory.mkdir(parents=True)
    content = encode_bundle(Evidence(recording.opening, recording.records, {}, [], {}))
    for number, name in enumerate(
        ("demo-20261128-100000.zip", "demo-20261128-110000.zip", "demo-b-20261128-120000.zip")
    ):
        (directory / name).write_bytes(content if "11" in name else b"not this one")
        os.utime(directory / name, (1e9 + number, 1e9 + number))

    printed = CliRunner().invoke(replay, ["demo", "--json"])

    assert printed.exit_code == ExitCode.VERDICT_STANDS
    assert printed.stderr.startswith(f"rankdeck: replaying {directory / 'demo-20261128-110000.zip'}\n")


def test_one_that_was_cut_says_so(tmp_path: Path) -> None:
    recording = frozen_recording()
    content = encode_bundle(Evidence(recording.opening, recording.records, {}, [], {}))
    path = tmp_path / "it.zip"
    path.write_bytes(content[: len(content) // 2])

    printed = CliRunner().invoke(replay, [str(path), "--headless"])

    assert "rank 2 on demo-1: " in printed.stdout
    assert "the recording was cut short" in printed.stderr


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", "cannot be read: No such file or directory"),
        ("too long", "cannot be read: File name too long"),
        ("text", "cannot be replayed: it is not a recording"),
        ("empty", "cannot be replayed: it is not a recording"),
        ("pipe", "is not a file: copy what is to be replayed into one"),
        ("zip", "cannot be replayed: it is a zip that cannot be read: "),
    ],
)
def test_what_is_none_is_one_line_with_exit_code_2(kind: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / ("it" * (300 if kind == "too long" else 1))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind not in {"nothing", "too long"}:
        path.write_bytes({"text": b"hello", "empty": b"", "zip": b"PK\x03\x04 and no more of it than that"}[kind])

    failed = CliRunner().invoke(replay, [str(path), "--json"])

    assert isinstance(failed.exception, AppError)
    assert failed.exception.exit_code == ExitCode.USAGE
    assert words in str(failed.exception)
    assert "\n" not in str(failed.exception)
