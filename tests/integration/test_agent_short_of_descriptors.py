"""An agent that has no descriptor left, as where strangers take them: it goes on, and its jobs with it."""

from __future__ import annotations

import resource

import pytest

from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.waiting import until

NUM_STREAMS = 3
"""Standard input, output and error."""
ACCEPT_FAILED = "socket.accept() out of system resource\n"
"""asyncio's own line, where somebody connects at that moment."""


@pytest.mark.fault(row=34)
def test_an_agent_without_a_descriptor_to_spare_says_so_once_and_goes_on() -> None:
    with RunningAgent() as agent:
        pid = agent.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # No more than are open at any time: one that the agent is about to close would else leave room for the next.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (NUM_STREAMS, before[1]))

        assert agent.process.stderr is not None
        lines = iter(agent.process.stderr.readline, "")
        assert next(line for line in lines if "Too many open files; retrying" in line)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        until(lambda: run_agent_verb("status", "--dir", str(agent.directory)).returncode == 0, 10, "it answers")
        assert agent.process.poll() is None
