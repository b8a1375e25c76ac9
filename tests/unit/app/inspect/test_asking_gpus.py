"""The program that asks a host's driver and NCCL, beside stand-ins for both."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import zlib
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.inspect import gpus_on_host
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD_S = 600.0
ANSWER = (Path(__file__).parent / "recorded" / "ras_rank_stopped.txt").read_text()
ASKED_PID = 870
"""A rank of the recorded answer."""


class Ras:
    """Listens as NCCL's RAS does; `answers` are given one after the other, None is a rank that is stopped."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.questions: list[bytes] = []
        self._mute: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for talk in self._mute:
            talk.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                talk, _ = self._listener.accept()
                text = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if text is None:
                    self._mute.append(talk)
                    continue
                with talk:
                    self.questions.append(talk.recv(1 << 12))
                    talk.sendall(text.encode())


@pytest.fixture
def ras(request: pytest.FixtureRequest) -> Iterator[Ras]:
    server = Ras(*request.param)
    yield server
    server.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has mapped a libnccl, with the variables of the test."""
    library = tmp_path / "lib" / "libnccl.so.2"
    library.parent.mkdir()
    library.write_bytes(b"\0NCCL version info\0NCCL version 2.30.7+cuda13.0\0".ljust(mmap.PAGESIZE, b"\0"))
    program = f"import mmap; f = open({str(library)!r}); m = mmap.mmap(f.fileno(), 0, access=1); print(); input()"
    process = subprocess.Popen([sys.executable, "-u", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.communicate(b"\n")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_on_host, "RAS_PERIOD_S", 0.0)
    monkeypatch.setattr(gpus_on_host, "RAS_ANSWER_S", 0.2)


@pytest.mark.parametrize("ras", [[ANSWER]], indirect=True)
def test_nccl_is_asked_twice_in_its_protocol(
    ras: Ras, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_on_host, "ras_address", lambda _pid: ras.address)
    monkeypatch.setattr(gpus_on_host, "own_pid", lambda _pid: ASKED_PID)

    told = gpus_on_host.ask_ras(rank.pid, OLD_S)

    assert told == {"version": "2.30.7", "answers": [ANSWER, ANSWER], "trouble": ""}
    assert ras.questions == [b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"] * 2


@pytest.mark.parametrize("ras", [[None, "SERVER PROTOCOL 2\n{}", ANSWER]], indirect=True)
def test_a_stopped_rank_and_one_of_another_job_are_asked_past(ras: Ras) -> None:
    assert gpus_on_host.answer(ras.address, ASKED_PID) == ANSWER


@pytest.mark.parametrize("ras", [[None], ["x" * 100]], indirect=True)
def test_where_nobody_of_the_job_answers_there_is_no_answer(ras: Ras) -> None:
    assert gpus_on_host.answer(ras.address, ASKED_PID) == ""


def test_where_nobody_listens_there_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    assert gpus_on_host.answer(f"localhost:{port}", ASKED_PID) == ""


@pytest.mark.parametrize(
    ("version", "address", "age_s", "why"),
    [
        ("", "localhost:28028", OLD_S, "no NCCL is seen"),
        ("2.26.2", "localhost:28028", OLD_S, "NCCL 2.26.2 is not asked"),
        ("2.28.3", "localhost:28028", OLD_S, "NCCL 2.28.3 is not asked"),
        ("2.28.7", "", OLD_S, "keeps it from loopback"),
        ("2.28.7", "localhost:28028", 59.0, "the youngest is 59 s old"),
        ("2.28.7", "localhost:28028", 60.0, ""),
        ("2.30", "localhost:28028", OLD_S, ""),
    ],
)
def test_nccl_is_asked_only_where_that_harms_nothing(version: str, address: str, age_s: float, why: str) -> None:
    found = gpus_on_host.refusal(version, address, age_s)

    assert why in found
    assert bool(found) is bool(why)


def test_of_two_libraries_the_older_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/a/libnccl.so.2": "2.30.7", "/b/nccl/libnccl.so.2.28.9": "2.28.9"}
    maps = "".join(f"7f00-7f10 r-xp 00000000 00:21 123    {path}\n" for path in files)
    monkeypatch.setattr(gpus_on_host, "read_text", lambda _path: maps)
    monkeypatch.setattr(gpus_on_host, "version_in", lambda path: files[path.removeprefix("/proc/1/root")])

    assert gpus_on_host.nccl_version(1) == "2.28.9"


def test_a_process_without_nccl_has_no_version() -> None:
    assert gpus_on_host.nccl_version(os.getpid()) == ""


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, "localhost:28028"),
        ({"NCCL_RAS_ADDR": "127.0.0.1:9"}, "127.0.0.1:9"),
        ({"NCCL_RAS_ADDR": "[::1]:9"}, "[::1]:9"),
        ({"NCCL_RAS_ADDR": "10.0.0.1:9"}, ""),
        ({"NCCL_RAS_ADDR": "localhost.example.org:9"}, ""),
        ({"NCCL_RAS_ENABLE": "0"}, ""),
    ],
)
def test_a_program_s_environment_names_no_other_machine(variables: dict[str, str], address: str) -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], env={"PATH": os.environ["PATH"], **variables})
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        until(lambda: comm.read_text().strip() == "sleep", 5, "its environment")
        assert gpus_on_host.ras_address(process.pid) == address
    finally:
        process.kill()
        process.wait()


def test_a_pid_is_the_process_s_own() -> None:
    assert gpus_on_host.own_pid(os.getpid()) == os.getpid()


def test_the_program_runs_as_it_is_sent(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$1" in *apps*) echo 7, GPU-a ;; *) echo GPU-a, 3, 80.5, 700.0 ;; esac\n')
    smi.chmod(0o755)
    source = Path(gpus_on_host.__file__).read_text()
    argv = [sys.executable, "-I", "-c", "import sys; exec(sys.argv.pop(1))", source, "12.5", str(rank.pid)]

    done = subprocess.run(argv, capture_output=True, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, timeout=60, check=True)

    told = json.loads(zlib.decompress(b64decode(done.stdout)))
    assert told["gpus"] == {"text": "GPU-a, 3, 80.5, 700.0\n", "trouble": ""}
    assert told["processes"] == {"text": "7, GPU-a\n", "trouble": ""}
    assert told["ras"][str(rank.pid)]["version"] == "2.30.7"
    assert "the youngest is 12 s old" in told["ras"][str(rank.pid)]["trouble"]


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        (None, "nvidia-smi is not run: No such file or directory"),
        ("echo No devices were found; exit 6", "nvidia-smi: No devices were found"),
        ("echo driver mismatch >&2; exit 18", "nvidia-smi: driver mismatch"),
        ("sleep 600", "nvidia-smi has not answered in 0 s"),
    ],
)
def test_a_driver_that_does_not_answer_is_told(
    script: str | None, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(gpus_on_host, "SMI_TIMEOUT_S", 0.3 if script == "sleep 600" else 10.0)

    assert gpus_on_host.smi(gpus_on_host.GPU_QUERY)["trouble"] == trouble
