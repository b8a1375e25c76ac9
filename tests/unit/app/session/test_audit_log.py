from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from app.errors import AppError
from app.session import audit
from app.session.audit import AuditedAction, AuditLog, default_path
from tests.support.obstacles import OBSTACLES, put_in_the_way

if TYPE_CHECKING:
    from pathlib import Path

ACT = AuditedAction("kill", ("gpu1",), "train")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where nobody has been before."""
    return tmp_path / "state" / "rankdeck" / "audit.jsonl"


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sentences(path: Path) -> list[str]:
    return [entry["sentence"] for entry in entries(path)]


def make_directory(path: Path) -> None:
    path.mkdir(parents=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def succeed() -> str:
    return "it is done"


async def fail() -> str:
    raise AppError("gpu1 does not answer", "look at it")


def test_it_is_where_state_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "rankdeck" / "audit.jsonl"

    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local/state/rankdeck/audit.jsonl"


async def test_what_is_done_and_what_fails_is_written_down_for_this_user_alone(path: Path) -> None:
    log = AuditLog(path)

    assert await log.kept(ACT, succeed()) == "it is done"
    with pytest.raises(AppError, match="does not answer"):
        await log.kept(ACT, fail())

    told = [(entry["outcome"], entry["sentence"]) for entry in entries(path)]
    assert told == [("done", "it is done"), ("failed", "gpu1 does not answer (look at it)")]
    assert entries(path)[0]["who"] == f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert log.drain_notices() == []


async def test_what_a_person_leaves_undone_is_written_down(path: Path) -> None:
    began = asyncio.Event()

    async def last() -> str:
        began.set()
        await asyncio.Event().wait()
        return "never"

    doing = asyncio.create_task(AuditLog(path).kept(ACT, last()))
    await began.wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing

    assert [(entry["outcome"], entry["sentence"]) for entry in entries(path)] == [
        ("failed", "left before it was known how it went")
    ]


def test_a_session_that_is_to_leave_nothing_writes_nothing(tmp_path: Path) -> None:
    log = AuditLog(None)

    log.add(ACT, "it is done")

    assert (log.drain_notices(), list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("obstacle", OBSTACLES)
async def test_a_log_that_cannot_be_written_is_told_once_and_hinders_nothing(path: Path, obstacle: str) -> None:
    make_directory(path.parent)
    put_in_the_way(obstacle, path, path.with_name("victim"))
    log = AuditLog(path)

    assert [await log.kept(ACT, succeed()) for _ in range(3)] == ["it is done"] * 3

    (notice,) = log.drain_notices()
    assert notice.startswith(f"what is done is not written down: {path}: ")
    assert log.drain_notices() == []
    assert not path.with_name("victim").exists()


def test_where_a_directory_cannot_be_made_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    log = AuditLog(tmp_path / "state" / "rankdeck" / "audit.jsonl")

    log.add(ACT, "it is done")

    assert log.drain_notices()[0].endswith("Not a directory")


def test_a_full_file_becomes_the_old_one_and_no_line_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_AUDIT_BYTES", 2000)
    log = AuditLog(path)

    for number in range(15):
        log.add(ACT, f"number {number}")

    assert sorted(file.name for file in path.parent.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert all(file.stat().st_size <= 2000 for file in path.parent.iterdir())
    assert [*sentences(path.with_name("audit.jsonl.1")), *sentences(path)] == [f"number {n}" for n in range(15)]


def test_consoles_that_find_it_full_at_once_rename_it_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(path)
    for number in range(10):
        log.add(ACT, f"old {number}")
    monkeypatch.setattr(audit, "MAX_AUDIT_BYTES", path.stat().st_size)

    with ThreadPoolExecutor(8) as consoles:
        list(consoles.map(lambda number: AuditLog(path).add(ACT, f"new {number}"), range(8)))

    both = [*sentences(path.with_name("audit.jsonl.1")), *sentences(path)]
    assert sorted(both) == sorted([f"old {n}" for n in range(10)] + [f"new {n}" for n in range(8)])
    assert both[:10] == [f"old {n}" for n in range(10)]


def test_after_a_line_that_a_full_disk_has_cut_the_next_one_stands_alone(path: Path) -> None:
    program = (
        "import pathlib, resource, sys; from app.session.audit import AuditedAction, AuditLog\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40)); log = AuditLog(pathlib.Path(sys.argv[1]))\n"
        "kill = AuditedAction('kill', ('gpu1',)); log.add(kill, 'cut'); log.add(kill, 'lost')\n"
        "print(*log.drain_notices())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("audit.jsonl: No space left on device")
    assert len(path.read_bytes()) == 40

    AuditLog(path).add(ACT, "whole")

    cut, whole = path.read_text().splitlines()
    assert (len(cut), json.loads(whole)["sentence"]) == (40, "whole")


def test_while_another_console_renames_a_full_file_nobody_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(path)
    log.add(ACT, "first")
    monkeypatch.setattr(audit, "MAX_AUDIT_BYTES", path.stat().st_size)

    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        log.add(ACT, "meanwhile")

    assert sentences(path) == ["first", "meanwhile"]
    assert not path.with_name("audit.jsonl.1").exists()


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_file_that_another_console_has_renamed_is_not_renamed_again(path: Path, is_begun: bool) -> None:
    AuditLog(path).add(ACT, "old")
    with path.open("rb") as full:
        path.rename(path.with_name("audit.jsonl.1"))
        if is_begun:
            AuditLog(path).add(ACT, "new")

        assert audit._make_room(path, full.fileno())

    assert sentences(path.with_name("audit.jsonl.1")) == ["old"]
    assert path.exists() is is_begun
