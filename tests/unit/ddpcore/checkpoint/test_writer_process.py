"""A writer does its job, says how it went, ends with its trainer, and leaves no zombie behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ddpcore.checkpoint.saving import WriterProcess
from ddpcore.checkpoint.snapshot import Snapshot
from ddpcore.checkpoint.writer import CHUNK_BYTES, Channel, copy, leave_word, open_direct, publish
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60.0
"""A writer is as modest as a process can be: where others work it gets little of a core, and is waited for long."""
CONTENT = bytes(range(256)) * 100

STARVED = """
import os, time
from ddpcore.checkpoint.writer import LEVEL_S, Modesty

def level():
    return os.getpriority(os.PRIO_PROCESS, 0)

modesty = Modesty()
modesty.begin()
for _ in range(3):
    time.sleep(LEVEL_S)  # what a thread sees of cores that it does not get
    modesty.look()
print(level())
modesty.rest()
print(level())
modesty.begin()
print(level())
"""


@pytest.fixture
def memory() -> Iterator[Snapshot]:
    memory = Snapshot()
    memory.reserve(len(CONTENT))
    memory.write(0, CONTENT)
    yield memory
    memory.close()


@pytest.fixture
def writer(memory: Snapshot) -> Iterator[WriterProcess]:
    writer = WriterProcess(memory.fd)
    writer.start()
    yield writer
    writer.end()


def job(directory: Path, name: str = "rank-00001.safetensors", num_bytes: int = len(CONTENT)) -> dict[str, Any]:
    return {"directory": str(directory), "file": name, "bytes": num_bytes, "publish": None}


def publishing(directory: Path, **order: Any) -> dict[str, Any]:
    return {
        **job(directory, "rank-00000.safetensors", 100),
        "publish": {
            "root": str(directory.parent),
            "name": "step_00000001",
            "files": ["rank-00000.safetensors", "rank-00001.safetensors"],
            "body_bytes": 20,
            "marker": " 1 run.1\n",
            "delete": [],
            **order,
        },
    }


def test_a_share_is_written_with_its_size_and_checksum(writer: WriterProcess, tmp_path: Path) -> None:
    writer.submit(job(tmp_path))

    assert writer.poll(WAIT_S) == ""
    assert (tmp_path / "rank-00001.safetensors").read_bytes() == CONTENT
    report = (tmp_path / "rank-00001.safetensors.json").read_text()
    assert report == f'{{"bytes": {len(CONTENT)}, "checksum": "{zlib.crc32(CONTENT):08x}"}}'
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 4097])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
def test_a_file_is_written_whole_past_the_page_cache_or_through_it(tmp_path: Path, num_bytes: int, shift: int) -> None:
    fd = open_direct(f"{tmp_path}/file")
    with mmap.mmap(-1, num_bytes + shift) as memory, memoryview(memory)[shift:] as content:
        content[:] = os.urandom(num_bytes)

        checksum = copy(content, fd)

        os.close(fd)
        assert (tmp_path / "file").read_bytes() == content
        assert checksum == zlib.crc32(content)


def test_one_writer_does_job_after_job(writer: WriterProcess, tmp_path: Path) -> None:
    for number in range(3):
        writer.submit(job(tmp_path, f"rank-0000{number}.safetensors"))
        assert writer.is_busy or writer.poll() == ""
        assert writer.poll(WAIT_S) == ""
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_what_goes_wrong_is_told_and_the_next_job_is_well(writer: WriterProcess, tmp_path: Path) -> None:
    (tmp_path / "rank-00001.safetensors.part").mkdir()
    writer.submit(job(tmp_path))

    assert (writer.poll(WAIT_S), writer.only_follows) == (f"File exists: {tmp_path}/rank-00001.safetensors", False)
    assert (tmp_path / "rank-00001.safetensors.failed").read_text() == writer.poll()

    (tmp_path / "rank-00001.safetensors.part").rmdir()
    writer.submit(job(tmp_path, num_bytes=10**9))
    assert writer.poll(WAIT_S) == "the snapshot is shorter than its file"
    assert not list(tmp_path.glob("*.part"))

    writer.submit(job(tmp_path / "nowhere"))
    vanished = f"{tmp_path}/nowhere has vanished while it was being written"
    assert (writer.poll(WAIT_S), writer.only_follows) == (vanished, True)

    writer.submit(job(tmp_path))
    assert writer.poll(WAIT_S) == ""


def test_a_writer_that_waits_for_others_gives_up_when_told(writer: WriterProcess, tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    writer.submit(publishing(tmp_path / ".tmp"))
    until((tmp_path / ".tmp" / "rank-00000.safetensors.json").exists, WAIT_S, "its own share is written")
    assert writer.poll() is None

    writer.forget(WAIT_S)

    assert writer.poll() == ""
    assert list(tmp_path.iterdir()) == [], "what it had begun is gone"


@pytest.mark.parametrize(
    ("left", "told"),
    [("no space", "no space"), ("", "rank-00001.safetensors could not be written")],
    ids=["why", "no word, as on a full disk"],
)
def test_a_writer_that_waits_for_others_hears_that_one_has_failed(
    writer: WriterProcess, tmp_path: Path, left: str, told: str
) -> None:
    (tmp_path / ".tmp").mkdir()
    writer.submit(publishing(tmp_path / ".tmp"))
    (tmp_path / "word").write_text(left)
    (tmp_path / "word").rename(tmp_path / ".tmp" / "rank-00001.safetensors.failed")

    assert writer.poll(WAIT_S) == told
    assert writer.only_follows
    assert list(tmp_path.iterdir()) == []


def test_that_a_share_has_failed_is_left_there_also_where_the_disk_does_not_take_why(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.failed.part").symlink_to("/dev/full")

    leave_word(f"{tmp_path}/rank-00001.failed", "no space")

    assert [path.name for path in tmp_path.iterdir()] == ["rank-00001.failed"]


def test_what_cannot_be_deleted_is_told_after_the_checkpoint_is_published(
    writer: WriterProcess, tmp_path: Path
) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / "step_00000000" / "somebody's notes").mkdir(parents=True)
    writer.submit(
        publishing(tmp_path / ".tmp", files=["rank-00000.safetensors"], delete=["step_00000000", "gone_already"])
    )

    assert writer.poll(WAIT_S) == ""
    told = until(lambda: writer.poll() or writer.take_undeleted(), WAIT_S, "the writer tells")
    assert told == ["step_00000000 cannot be deleted: Is a directory"]
    assert writer.take_undeleted() == []
    assert (
        (tmp_path / "step_00000001" / "manifest.json").read_bytes().startswith(b'{"files":{"rank-00000.safetensors":')
    )


def test_a_writer_that_dies_is_told_and_reaped_and_another_takes_its_place(
    writer: WriterProcess, tmp_path: Path
) -> None:
    assert writer.pid is not None
    first = writer.pid
    os.kill(first, signal.SIGSTOP)
    writer.submit(job(tmp_path))
    os.kill(first, signal.SIGKILL)

    until(lambda: not is_alive(first), WAIT_S, "it has died")
    # Not replaced while its job is open: that would never have a result.
    writer.start()
    assert writer.poll(WAIT_S) == "its writer process was ended by Killed before it was done"
    assert not psutil.pid_exists(first), "not even a zombie"

    writer.forget(1)
    writer.start()
    assert writer.pid != first
    writer.submit(job(tmp_path))
    assert writer.poll(WAIT_S) == ""


def test_a_writer_that_hangs_is_killed_when_its_job_is_given_up(writer: WriterProcess, tmp_path: Path) -> None:
    assert writer.pid is not None
    pid = writer.pid
    os.kill(pid, signal.SIGSTOP)
    writer.submit(job(tmp_path))

    writer.forget(0.1)

    assert not psutil.pid_exists(pid)
    assert writer.poll() == ""


def test_a_writer_is_not_stopped_by_what_stops_a_service(writer: WriterProcess, tmp_path: Path) -> None:
    assert writer.pid is not None
    until(lambda: psutil.Process(writer.pid).nice() == 19, WAIT_S, "it has begun")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(writer.pid, number)

    writer.submit(job(tmp_path))
    assert writer.poll(WAIT_S) == ""


def test_a_writer_that_dies_idle_is_replaced_in_silence(writer: WriterProcess, tmp_path: Path) -> None:
    assert writer.pid is not None
    process = psutil.Process(writer.pid)
    process.kill()
    until(lambda: not is_alive(process.pid), WAIT_S, "it has died")

    assert writer.poll() == ""
    writer.start()
    writer.submit(job(tmp_path))
    assert writer.poll(WAIT_S) == ""


def test_a_writer_finishes_its_job_when_asked_to_end(memory: Snapshot, tmp_path: Path) -> None:
    writer = WriterProcess(memory.fd)
    writer.start()
    writer.submit(job(tmp_path))

    writer.end()

    assert (tmp_path / "rank-00001.safetensors.json").exists()
    assert writer.pid is None
    writer.end()


def test_a_writer_ends_while_a_forked_child_has_the_socket_too(
    writer: WriterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_kill", lambda: pytest.fail("it has to be killed"))
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        writer.submit(job(tmp_path))
        writer.end(20.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    assert (tmp_path / "rank-00001.safetensors.json").exists()


def test_a_writer_that_has_died_unnoticed_can_be_ended(writer: WriterProcess) -> None:
    process = psutil.Process(writer.pid)
    process.kill()
    until(lambda: not is_alive(process.pid), WAIT_S, "it has died")

    writer.end()

    assert writer.pid is None


def test_a_program_may_have_many_files_open(memory: Snapshot, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files = [os.dup(memory.fd) for _ in range(1024)]
    writer = WriterProcess(memory.fd)
    try:
        writer.start()
        writer.submit(job(tmp_path))

        assert writer.poll(WAIT_S) == ""
        writer.end()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files(pid: int | None) -> list[str]:
    """What a process has open, sorted, without numbers; a file that is closed meanwhile is left out."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(fd.readlink()).split(":")[0])
    return sorted(links)


def test_a_writer_has_a_session_of_its_own_and_nothing_open_but_its_own(writer: WriterProcess) -> None:
    assert writer.pid is not None
    until(lambda: psutil.Process(writer.pid).nice() == 19, WAIT_S, "it has begun")

    assert os.getsid(writer.pid) == writer.pid
    until(
        lambda: open_files(writer.pid) == ["/dev/null", "/dev/null", "/memfd", "socket"], WAIT_S, "the rest is closed"
    )
    assert psutil.Process(writer.pid).memory_info().rss < 20_000_000


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not share by session")
def test_a_writer_is_modest_also_where_the_kernel_shares_the_cores_by_session(writer: WriterProcess) -> None:
    autogroup = Path(f"/proc/{writer.pid}/autogroup")

    until(lambda: autogroup.read_text().endswith("nice 19\n"), WAIT_S, "it has begun")


PROGRAM = """
import sys, torch
from ddpcore.checkpoint import Checkpointer
Checkpointer(sys.argv[1]).save(1, {"weight": torch.zeros(3_000_000)})
"""


def test_a_program_that_just_ends_has_its_last_checkpoint_on_the_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=150, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "step_00000001" / "COMMITTED").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gets a niceness back")
def test_a_writer_that_is_starved_comes_forward_while_it_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        # Its session's niceness changes too.
        start_new_session=True,
    )

    starved, resting, again = (int(level) for level in done.stdout.split())
    assert starved < 19
    assert resting == 19
    assert again == starved


def test_a_checkpoint_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, body = tmp_path / ".tmp", b"{}"
    directory.mkdir()
    for name in ("share.json", "lock"):
        (directory / name).write_text("{}")
    memory = os.memfd_create("state")
    os.pwrite(memory, body, 0)
    was_locked: list[bool] = []
    rename = os.rename

    def renamed(source: str, target: str) -> None:
        was_locked.append((Path(source) / "lock").exists())
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    order = {"root": str(tmp_path), "name": "step", "files": ["share"], "body_bytes": len(body), "marker": "id"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        publish({"directory": str(directory), "bytes": 0, "publish": order}, memory, Channel(ours, os.getpid()), -1)
    os.close(memory)

    assert was_locked == [True]
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == ["COMMITTED", "manifest.json"]
