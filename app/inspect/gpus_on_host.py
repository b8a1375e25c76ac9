"""The part of `rankdeck inspect` that asks on a host with GPU ranks: the driver for its GPUs, NCCL's RAS for counts.

This text is sent to the host and run by its Python, of 3.9 or newer. It uses the standard library alone and prints one
JSON object, compressed. nvidia-smi runs as a process of its own, which a hung driver holds up instead of this one.

RAS is a thread of NCCL in each rank, which answers for all ranks of the job, on all hosts. It is asked only where a
user wants that, and never an NCCL below 2.27: asked while a communicator began, 2.26 ended the job. Only from 2.28.7
on does it answer with counts that a program can read.

Source: NCCL's src/ras/client_support.cc, 2.28.9 and 2.30.7; github.com/NVIDIA/nccl issues 1669 and 1718.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import re
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

GPU_QUERY = "--query-gpu=uuid,utilization.gpu,power.draw,enforced.power.limit"
PROCESS_QUERY = "--query-compute-apps=pid,gpu_uuid"
SMI_TIMEOUT_S = 10.0
"""A driver without persistence mode takes seconds to wake."""
MAX_SMI_TEXT = 1 << 16
RAS_ADDRESS = "localhost:28028"
LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\]):\d{1,5}$")
"""No program's environment sends this one elsewhere."""
RAS_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
RAS_CONNECT_S, RAS_ANSWER_S = 1.0, 3.0
"""Seconds for a connection, and for an answer: RAS waits one second for ranks that do not answer it."""
RAS_TRIES = 6
"""Tries at an address that ranks share: the kernel chooses one, which may be of another job, or stopped and mute."""
RAS_PERIOD_S = 1.0
"""Seconds between two answers: who is behind in both stands."""
MAX_ANSWER = 1 << 24
FIRST_WITH_COUNTS = (2, 28, 7)
BEGINS_S = 60.0
"""Age of the youngest rank below which nothing is asked: it may start its communicators."""


def smi(query: str) -> dict[str, str]:
    """Return what nvidia-smi prints for a query, or why it prints nothing."""
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SMI_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"text": "", "trouble": f"nvidia-smi has not answered in {SMI_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"text": "", "trouble": f"nvidia-smi is not run: {error.strerror}"}
    lines = (done.stderr or done.stdout).strip().splitlines()
    why = lines[0][:200] if lines else f"exit code {done.returncode}"
    return {"text": done.stdout[:MAX_SMI_TEXT], "trouble": f"nvidia-smi: {why}" if done.returncode else ""}


def nccl_version(pid: int) -> str:
    """Return the version of the NCCL that a process has loaded, the lowest of several; empty where none is seen."""
    maps = read_text(f"/proc/{pid}/maps")
    paths = set(re.findall(r" (/\S*libnccl\.so\S*)$", maps, re.MULTILINE))
    versions = [version for version in (version_in(f"/proc/{pid}/root{path}") for path in paths) if version]
    return min(versions, key=numbers, default="")


def version_in(path: str) -> str:
    """Return the version that a libnccl names in its text; empty where none is found."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"NCCL version (\d{1,3}(?:\.\d{1,4}){1,3})", content)
            return found[1].decode() if found else ""
    except (OSError, ValueError):
        return ""


def numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version."""
    return tuple(map(int, version.split(".")))


def read_text(path: str) -> str:
    """Return a file of /proc; empty when it is not there, or may not be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def ras_address(pid: int) -> str:
    """Return where the RAS of a process listens on loopback, by its environment; empty where it does not."""
    pairs = (pair.partition("=") for pair in read_text(f"/proc/{pid}/environ").split("\0"))
    environ = {name: value for name, _, value in pairs}
    if environ.get("NCCL_RAS_ENABLE", "1") == "0":
        return ""
    address = environ.get("NCCL_RAS_ADDR", RAS_ADDRESS)
    return address if LOOPBACK.match(address) else ""


def refusal(version: str, address: str, youngest_s: float) -> str:
    """Return why RAS is not asked; empty where it may be."""
    if not version:
        return "no NCCL is seen in the ranks"
    if numbers(version) < FIRST_WITH_COUNTS:
        return f"NCCL {version} is not asked: only 2.28.7 and newer answer with counts, and 2.26 may end the job"
    if not address:
        return "NCCL_RAS_ENABLE or NCCL_RAS_ADDR keeps it from loopback"
    if youngest_s < BEGINS_S:
        return f"not asked while ranks may begin: the youngest is {youngest_s:.0f} s old, ask from {BEGINS_S:.0f} s on"
    return ""


def own_pid(pid: int) -> int:
    """Return the pid of a process as it sees itself: in a container another one."""
    found = re.search(r"^NSpid:.*\s(\d+)$", read_text(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else pid


def answer(address: str, pid: int) -> str:
    """Return one answer of the RAS of a rank's job, by the rank's pid as it sees itself; empty where none comes."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        # localhost is ::1 first, which a host without IPv6 refuses.
        for family, _, _, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            for _ in range(RAS_TRIES):
                with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as talk:
                    talk.settimeout(RAS_CONNECT_S)
                    talk.connect(place)
                    talk.sendall(RAS_QUESTION)
                    text = received(talk)
                    if f'"pid": {pid},' in text:
                        return text
    return ""


def received(talk: socket.socket) -> str:
    """Return what comes until the other side ends the connection; empty where it does not in time."""
    answer, until_s = bytearray(), time.monotonic() + RAS_ANSWER_S
    while len(answer) < MAX_ANSWER:
        talk.settimeout(max(0.01, until_s - time.monotonic()))
        part = talk.recv(1 << 16)
        if not part:
            return answer.decode(errors="replace")
        answer += part
    return ""


def ask_ras(pid: int, youngest_s: float) -> dict[str, Any]:
    """Return two answers of the RAS of a rank's job, one after the other, or why there are none."""
    version, address = nccl_version(pid), ras_address(pid)
    trouble, answers = refusal(version, address, youngest_s), []
    if not trouble:
        answers = [answer(address, own_pid(pid))]
        if answers[0]:
            time.sleep(RAS_PERIOD_S)
            answers.append(answer(address, own_pid(pid)))
        if not all(answers):
            trouble = f"no rank of this job answers at {address[:100]}, or with more than {MAX_ANSWER >> 20} MiB"
    return {"version": version, "answers": [text for text in answers if text], "trouble": trouble}


def main(argv: list[str]) -> None:
    """Print what the GPUs do; the arguments are the age of the youngest rank, and the ranks 0 to ask RAS by."""
    youngest_s, *pids = argv
    seen = {"gpus": smi(GPU_QUERY), "processes": smi(PROCESS_QUERY)}
    answers = {int(pid): ask_ras(int(pid), float(youngest_s)) for pid in pids}
    text = json.dumps({**seen, "ras": answers}).encode()
    sys.stdout.write(base64.b64encode(zlib.compress(text)).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
