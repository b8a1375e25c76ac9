"""What the kernel says of a process, as far as it says anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from agent.jobs.rank_watch import undying
from agent.processes.worker_sampler import has_uninterruptible_thread, kernel_facts
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_process_that_is_stopped_is_told_from_one_that_runs_and_one_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        facts = kernel_facts(process.pid)
        assert facts
        assert not facts.is_stopped
        assert all("+" not in frame and "]" not in frame for frame in facts.stack)

        process.send_signal(signal.SIGSTOP)
        until(lambda: (found := kernel_facts(process.pid)) and found.is_stopped, 30.0, "it is stopped")

        process.kill()
        until(lambda: kernel_facts(process.pid) is None, 30.0, "a zombie says nothing")
    finally:
        process.kill()
        process.wait()
    assert kernel_facts(process.pid) is None


def test_this_process_is_in_no_system_call_that_sleeps() -> None:
    facts = kernel_facts(os.getpid())

    assert facts
    assert facts.state == "R"


SPAWNS = """
import os, sys, threading
def spawn():
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
threading.Thread(target=spawn).start()
"""
"""Its child opens a pipe that nobody writes to; the kernel keeps the thread waiting until the child has its program."""


def test_a_thread_that_nobody_can_stop_is_seen_whichever_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen([sys.executable, "-c", SPAWNS, str(pipe)])
    try:
        until(lambda: has_uninterruptible_thread(process.pid), 30.0, "a thread waits for its child")
        assert undying({0: os.getpid(), 3: process.pid}) == f"pid {process.pid} (rank 3) does not die: state D"
        os.close(os.open(pipe, os.O_WRONLY))
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.wait()
    assert not has_uninterruptible_thread(process.pid)
    assert not has_uninterruptible_thread(os.getpid())
    assert undying({0: os.getpid(), 3: process.pid}) == ""
