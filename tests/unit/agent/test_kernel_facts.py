"""What the kernel says of a process, as far as it says anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from agent.processes.kernel_facts import kernel_facts
from tests.support.waiting import until


def test_a_process_that_is_stopped_is_told_from_one_that_runs_and_one_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        facts = kernel_facts(process.pid)
        assert facts
        assert not facts.is_stopped
        assert all("+" not in frame and "]" not in frame for frame in facts.stack)

        process.send_signal(signal.SIGSTOP)
        until(lambda: (found := kernel_facts(process.pid)) and found.is_stopped, 5.0, "it is stopped")

        process.kill()
        until(lambda: kernel_facts(process.pid) is None, 5.0, "a zombie says nothing")
    finally:
        process.kill()
        process.wait()
    assert kernel_facts(process.pid) is None


def test_this_process_is_in_no_system_call_that_sleeps() -> None:
    facts = kernel_facts(os.getpid())

    assert facts
    assert facts.state == "R"
