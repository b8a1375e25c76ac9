from __future__ import annotations

import json
import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.transport import audit
from agent.transport.audit import AuditLog, append
from agent.transport.command_socket import Peer, peer_of
from agent.wire.commands import Accepted, GetStatus, Kill
from tests.support.filesystems import small_disk
from tests.support.obstacles import OBSTACLES, put_in_the_way

PEER = Peer(os.getpid(), os.geteuid(), "pytest")


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(log: AuditLog, *job_ids: str) -> None:
    for job_id in job_ids:
        log.add(Kill(job_id), Accepted(), PEER)


def test_lines_are_appended_for_this_user_alone_and_those_of_an_earlier_agent_stay(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    add(AuditLog(path, "here"), "a")

    log = AuditLog(path, "here")
    add(log, "b")
    log.add(GetStatus(), Accepted(), PEER)

    assert [entry["job_id"] for entry in entries(path)] == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert entries(path)[0]["uid"] == os.geteuid()


def test_a_user_of_another_uid_does_not_get_our_name(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", "here")

    log.add(Kill("a"), Accepted(), Peer(1, os.geteuid() + 1, "x"))

    assert entries(tmp_path / "audit.jsonl")[0]["user"] == ""


def test_a_full_file_becomes_the_old_one_and_no_more_than_two_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    monkeypatch.setattr(audit, "MAX_AUDIT_BYTES", 1000)
    job_ids = [f"job-{number:03}" for number in range(40)]

    add(AuditLog(path, "here"), *job_ids)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    kept = [entry["job_id"] for file in ("audit.jsonl.1", "audit.jsonl") for entry in entries(tmp_path / file)]
    assert kept == job_ids[-len(kept) :]
    assert len(kept) > 3


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_is_told_once_and_the_lost_lines_are_counted(
    obstacle: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, victim = tmp_path / "audit.jsonl", tmp_path / "victim"
    victim.write_text("whole")
    put_in_the_way(obstacle, path, victim)
    log = AuditLog(path, "here")

    add(log, "a", "b", "c")

    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"agent: what is done here is not written down: {path}: ")
    assert (log.num_lost, victim.read_text()) == (3, "whole")
    path.rmdir() if obstacle == "directory" else path.unlink()
    add(log, "d", "e")
    lost, *kept = entries(path)
    assert (lost["num_lost"], [entry["job_id"] for entry in kept]) == (3, ["d", "e"])
    assert log.num_lost == 0


def test_a_pipe_with_a_reader_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="not a file"):
            append(path, b"line\n")
        assert os.read(fd, 100) == b""
    finally:
        os.close(fd)


def test_a_line_for_which_there_is_not_room_enough_leaves_nothing_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    append(path, b"whole\n")
    program = (
        "import pathlib, resource, sys; from agent.transport.audit import append; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); path = pathlib.Path(sys.argv[1])\n"
        "try: append(path, b'too long for it\\n')\n"
        "except OSError as error: print(error.strerror)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "No space left on device\n"
    assert path.read_bytes() == b"whole\n"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 10


def test_a_full_disk_is_told_once_and_what_it_did_not_take_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        filler, path = disk / "filler", disk / "audit.jsonl"
        log = AuditLog(path, "here")
        add(log, "before")
        found = os.statvfs(disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)
        long = [f"{number:060}" for number in range(40)]

        add(log, *long)
        filler.unlink()
        add(log, "after")

        told = entries(path)
        kept, lost = told[:-2], told[-2]["num_lost"]
        assert [entry["job_id"] for entry in kept] == ["before", *long[: len(kept) - 1]]
        assert lost == len(long) - (len(kept) - 1) > 0
        assert told[-1]["job_id"] == "after"
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = peer_of(ours)

    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.process == Path("/proc/self/comm").read_text().strip()


def test_of_a_process_that_is_gone_the_name_is_empty(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
        gone = subprocess.Popen([sys.executable, "-c", program, path])
        gone.wait(60)
        with listener.accept()[0] as connection:
            peer = peer_of(connection)

    assert peer == Peer(gone.pid, os.geteuid(), "")
