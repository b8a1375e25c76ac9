"""A job in the Slurm step in which this process runs: `srun --ntasks-per-node=1 rankdeck run train.py`.

Each node has one task. The first one serves the relay, is a node like the others, and is the console; the others become
their nodes' agents. `rankdeck attach --slurm JOBID` finds the relay by `relay_directory`.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agent.wire.relay import INVITATION_FILE
from app.errors import ExitCode, SessionError, UsageError
from app.slurm.client import SLURM_S, slurm_hostnames, why_ending
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from agent.wire.slurm import SlurmStep
    from app.fleet.relay_hub import RelayHub

RELAY_DIR = ".local/state/rankdeck/relay-slurm-"
"""Beginning of the relay's directory, from the home that all nodes share; the job's id follows."""
READY_S = 30.0
NODES_S = 180.0
"""Seconds for the agents of all nodes to come: starting a Python from a busy network disk takes long."""
LOOK_S = 0.2
END_S = 300.0
"""Seconds for the agent of this node to end once the relay has: its job may write a checkpoint first, for two minutes
by default."""
LAST_LOOK_S = 3.0
"""Seconds for other consoles to see how the job has ended: they ask once a second."""
LEAVE_S = 15.0
"""Seconds after the end of this node's agent in which the job's end is seen, unless there is none to be seen."""
FIRST_PAUSE_S = 1.0
"""Seconds before a killed process is started again; twice as long each time, up to `MAX_PAUSE_S`."""
MAX_PAUSE_S = 60.0
WHY_PAUSE_S = 5.0
"""Seconds between two questions to Slurm why it ends a job."""
INTERFACE_VARIABLE = "RANKDECK_INTERFACE"
_AGENT = (sys.executable, "-P", "-m", "agent")


def relay_directory(job_id: str) -> str:
    """Return the directory of a Slurm job's relay, from the user's home."""
    return RELAY_DIR + job_id


def refuse_several_tasks(step: SlurmStep) -> None:
    """Refuse a step with several tasks on a node: torchrun starts the ranks.

    Raises:
        UsageError: There are several; of them, only the first task prints that.
    """
    if step.num_tasks == step.num_nodes:
        return
    if step.task:
        raise SystemExit(ExitCode.USAGE)
    raise UsageError(
        f"srun starts {step.num_tasks} tasks on {step.num_nodes} nodes, and rankdeck starts the ranks of a node itself",
        "srun --ntasks-per-node=1 rankdeck run --nproc-per-node 8 train.py",
    )


def become_agent(step: SlurmStep) -> NoReturn:
    """Make this task the agent of its node, until the first task's relay has ended."""
    invitation = Path.home() / relay_directory(step.job_id) / INVITATION_FILE
    with open(os.devnull, "w") as nothing:  # noqa: PTH123 - its descriptor is what is wanted
        os.dup2(nothing.fileno(), 1)  # where it serves is of no interest in a job's output
    os.execv(sys.executable, [*_AGENT, *_serve(invitation)])  # noqa: S606 - no shell is the point


def _serve(invitation: Path) -> list[str]:
    return ["serve", "--relay", str(invitation), "--until-relay-ends"]


@contextmanager
def serving(step: SlurmStep, notify: Callable[[str], None]) -> Iterator[str]:
    """Serve the relay and the agent of this node while the block lasts; yield the relay's directory.

    Either is started again if a signal kills it, and jobs go on.

    Slurm's SIGTERM and SIGUSR1, which mean that the job ends soon, are passed on to the agent: Slurm sends them to the
    tasks alone. Jobs that still run when the block ends are stopped.

    Args:
        step: The step; this process is its first task.
        notify: Called with a sentence on what Slurm wants.

    Raises:
        SessionError: The relay does not start, or Slurm does not expand the list of nodes.
    """
    directory = Path.home() / relay_directory(step.job_id)
    with ExitStack() as undo:
        relay_argv = [*_AGENT, "relay", "--listen", _own_address(step), "--dir", str(directory), "--until-stdin-ends"]
        relay_argv += ["--expect", str(step.num_nodes)]
        relay = _Kept("relay", relay_argv, subprocess.PIPE, notify)
        undo.callback(relay.end)
        if not relay.is_ready():
            raise SessionError(f"the relay in {clean(str(directory))} does not start", "its own words are above")
        agent = _Kept("agent", [*_AGENT, *_serve(directory / INVITATION_FILE)], subprocess.DEVNULL, notify)
        undo.callback(_end_after_relay, relay, agent)
        relay.keep()
        agent.keep()

        # Not in the handler: Slurm's controller may take its time to answer.
        is_over = threading.Event()
        why = threading.Thread(target=_notify_why, args=(step.job_id, is_over, notify), name="slurm-why", daemon=True)
        undo.callback(_join, why)

        def on_notice(number: int, _frame: FrameType | None) -> None:
            notify(f"Slurm sends {signal.Signals(number).name}: what runs here is stopped first")
            if why.ident is None:
                why.start()
            agent.terminate()

        for number in (signal.SIGTERM, signal.SIGUSR1):
            undo.callback(signal.signal, number, signal.signal(number, on_notice))
        undo.callback(is_over.set)
        threading.Thread(target=_leave_after, args=(agent, is_over, notify), daemon=True).start()
        yield str(directory)


def _notify_why(job_id: str, is_over: threading.Event, notify: Callable[[str], None]) -> None:
    """Show why Slurm ends a job once that is known; it may be noted after the signal: the last look is at the end."""
    is_last = False
    while not (sentence := why_ending(job_id)) and not is_last:
        is_last = is_over.wait(WHY_PAUSE_S)
    if sentence:
        notify(sentence)


def _join(thread: threading.Thread) -> None:
    if thread.ident is not None:
        thread.join(SLURM_S)


def _leave_after(agent: _Kept, is_over: threading.Event, notify: Callable[[str], None]) -> None:
    """Interrupt this process once the agent of this node has ended before the job: nothing would be seen any more."""
    agent.has_ended.wait()
    if not is_over.wait(LEAVE_S):
        notify("the agent of this node has ended: what still runs elsewhere is stopped")
        os.kill(os.getpid(), signal.SIGINT)


def _end_after_relay(relay: _Kept, agent: _Kept) -> None:
    """End the relay, which all agents follow, and wait for this node's; other consoles see the job's end before."""
    agent.has_ended.wait(LAST_LOOK_S)
    relay.end()
    agent.end(END_S)


class _Kept:
    """A process of this task that is started again when a signal kills it, until it is to end.

    Attributes:
        has_ended: Set once it has ended and is not started again.
    """

    def __init__(self, name: str, argv: list[str], stream: int, notify: Callable[[str], None]) -> None:
        """Start it, with `stream` as its standard input and output."""
        self.has_ended = threading.Event()
        self._name = name
        self._start = functools.partial(subprocess.Popen[bytes], argv, stdin=stream, stdout=stream)
        self._notify = notify
        self._lock = threading.RLock()  # a signal's handler may come while this thread holds it
        self._is_to_end = threading.Event()
        self._process = self._start()

    def is_ready(self) -> bool:
        """Return whether it prints its first line in time."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], READY_S)[0] and self._process.stdout.readline())

    def keep(self) -> None:
        threading.Thread(target=self._keep, name=f"keep-{self._name}", daemon=True).start()

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (code := self._process.wait()) < 0 and not self._is_to_end.wait(pause_s):
            self._notify(f"the {self._name} of this node was killed by {signal.Signals(-code).name}: starting another")
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            with self._lock:
                if self._is_to_end.is_set():
                    break
                self._process = self._start()
        self.has_ended.set()

    def terminate(self) -> None:
        """Send SIGTERM, which it handles; it is not started again."""
        with self._lock:
            self._is_to_end.set()
            self._process.terminate()

    def end(self, within_s: float = READY_S) -> None:
        """End it by its pipe if it has one, which ends when this process is killed, too; kill it after that time."""
        with self._lock:
            self._is_to_end.set()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def await_nodes(hub: RelayHub, step: SlurmStep, notify: Callable[[str], None]) -> None:
    """Return once the agents of all nodes of a step are known to its relay.

    Args:
        hub: Connected to the relay.
        step: The step.
        notify: Called with how many are there, whenever that changes.

    Raises:
        SessionError: They do not come in time.
    """
    deadline_s, seen = time.monotonic() + NODES_S, -1
    while True:
        here = [node for node in hub.nodes if (entry := hub.entry(node)) is not None and entry.is_here]
        if len(here) >= step.num_nodes:
            return
        if len(here) != seen:
            seen = len(here)
            notify(f"{seen} of {step.num_nodes} nodes are there")
        if time.monotonic() > deadline_s:
            raise SessionError(
                f"{seen} of {step.num_nodes} nodes have come in {NODES_S:.0f} s: {clean(', '.join(here)) or 'none'}",
                f"all nodes must see the same ~/{relay_directory(step.job_id)}, and reach this one",
            )
        time.sleep(LOOK_S)


def _own_address(step: SlurmStep) -> str:
    """Return the address or interface at which the other nodes reach this one."""
    if named := os.environ.get(INTERFACE_VARIABLE):
        return named
    others = [name for name in slurm_hostnames(step.nodes) if name != os.environ.get("SLURMD_NODENAME")]
    if not others:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((others[0], 9))  # sends nothing: the kernel only chooses the way
        except OSError as error:
            why = error.strerror or str(error)
            raise SessionError(
                f"there is no way to node {clean(others[0])}: {why}", f"name the interface: {INTERFACE_VARIABLE}=ib0"
            ) from error
        return str(probe.getsockname()[0])
