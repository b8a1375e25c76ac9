"""The line in which an exception is shown: NCCL's reason is behind the first one, and CUDA's first one is too long."""

from __future__ import annotations

import time

import pytest

from agent.wire.logs import LOST_PEER, exception_line, rank_with_problem
from ddpcore.agreement import common_problem

NCCL = "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
VERSION = "NCCL version 2.28.9"
DUPLICATE = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
USAGE = f"ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n{DUPLICATE}"
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
INTERNAL = "ncclInternalError: Internal check failed.\n"
CUDA = "torch.OutOfMemoryError: CUDA out of memory"
WANTED = "Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which"
USED = "Process 909 has 1.53 GiB memory in use. Including non-PyTorch memory, this process has 129 GiB memory in use. "
OLD = "Tried to allocate 2.00 GiB (GPU 0; 79.20 GiB total capacity; 1.00 GiB free; 78.00 GiB reserved)"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), {VERSION}\n{USAGE}",
            f"DistBackendError: NCCL invalid usage: {DUPLICATE}",
        ),
        (
            f"{NCCL}unhandled system error, {VERSION}\n{SYSTEM}Last error:\nConnect to 10.0.0.2<4711> failed\n",
            "DistBackendError: NCCL unhandled system error: Connect to 10.0.0.2<4711> failed",
        ),
        (
            f"{NCCL}remote process exited or there was a network error, {VERSION}\n{REMOTE}Last error:\n\nstep 3",
            "DistBackendError: NCCL remote process exited or there was a network error",
        ),
        (
            f"{NCCL}internal error - please report this, {VERSION}\n{INTERNAL}Last error: Unknown NCCL Error\n\nstep 3",
            "DistBackendError: NCCL internal error",
        ),
        (f"RuntimeError: NCCL error: internal error, {VERSION}\n{INTERNAL}step 3", "RuntimeError: NCCL internal error"),
        (
            f"{NCCL}unhandled system error, {VERSION}\n[Rank 0] Watchdog caught a timeout",
            "DistBackendError: NCCL unhandled system error: [Rank 0] Watchdog caught a timeout",
        ),
        (
            f"{CUDA}. {WANTED} 3.56 GiB is free. {USED}Of the allocated memory 128.22 GiB is allocated by PyTorch",
            f"{CUDA}: 8.00 GiB wanted, 3.56 GiB of 139.80 GiB free on GPU 0",
        ),
        (
            f"{CUDA}. {WANTED} 0 bytes is free. {USED}506.00 MiB allowed; Of the allocated memory 499.00 MiB",
            f"{CUDA}: 8.00 GiB wanted, 0 bytes of 139.80 GiB free on GPU 0, 506.00 MiB allowed",
        ),
        (f"{CUDA}. {OLD} If reserved memory is >> allocated memory", f"{CUDA}. Tried to allocate 2.00 GiB"),
        (CUDA, CUDA),
        ("ValueError: one\ntwo", "ValueError: one"),
        ("", ""),
    ],
)
def test_an_exception_is_one_line_with_its_reason(text: str, line: str) -> None:
    assert exception_line(text) == line


def test_who_lost_a_peer_is_still_known() -> None:
    assert LOST_PEER.search(exception_line(f"{NCCL}remote process exited or there was a network error, {VERSION}\n"))


@pytest.mark.parametrize("text", ["NCCL error: " * 20_000, f"{NCCL}{' (run with' * 20_000}", "a" * 200_000])
def test_a_message_of_any_length_takes_no_time(text: str) -> None:
    began_s = time.monotonic()
    assert exception_line(text) == text
    assert time.monotonic() - began_s < 1.0


@pytest.mark.parametrize(
    ("problems", "rank"),
    [(["", "a", ""], 1), (["a", "", "b"], None), (["", "a", "a"], None), (["a", "a"], None), (["", "a: 2; b"], 1)],
)
def test_a_problem_of_one_rank_is_told_from_those_of_several(problems: list[str], rank: int | None) -> None:
    assert rank_with_problem(f"ddpcore.errors.CheckpointDirectoryError: {common_problem(problems)}") == rank
