"""Causes of slowness on real ranks: what is done to rank 1 from outside or inside, and what must be named.

Each cause is done by the kernel's own means: a CPU quota and a disk's limit by cgroups, CPUs taken away, processes that
compete. Beside each stands its opposite: the same slowness by the program alone, or the same burden where nobody is
late.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from agent.wire.signals import Signal
from app.diagnosis.causes import Cause
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

On = TypeVar("On")
"""What causes are done to."""
PROGRAMS = Path(__file__).parent / "programs"
START_S = 120.0
SETTLED_STEPS, SETTLED_S = 200, 40.0
"""Steps and seconds of healthy training before the strike: ranks have been compared, and signals have a past."""
WITHIN_S = 60.0
AFTER_S = 15.0
"""Seconds for which what is named is watched after that."""
LOOK_S = 0.1
CGROUPS = Path("/sys/fs/cgroup")
DATA_BYTES = 1 << 20
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


class Machine:
    """Means of this machine to burden a rank, taken back at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pids: list[int] = []
        """Of the ranks, once they run."""
        self.undo = contextlib.ExitStack()

    def quota(self, rank: int, cpu_frac: float) -> None:
        """Give a rank a part of one CPU."""
        pid = self.pids[rank]
        group = self._cgroup("cpu", pid)
        if (CGROUPS / "cgroup.controllers").exists():
            (group / "cpu.max").write_text(f"{int(cpu_frac * 100_000)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(int(cpu_frac * 100_000)))
        _enter(group, pid)

    def slow_disk(self, rank: int, bytes_hz: int) -> None:
        """Let a rank read so many bytes a second of the disk that holds the directory."""
        pid = self.pids[rank]
        group = self._cgroup("blkio", pid)
        device = self.directory.stat().st_dev
        (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {bytes_hz}")
        _enter(group, pid)

    def compete(self, rank: int, num: int) -> None:
        """Run processes on the CPU of a rank."""
        (cpu,) = os.sched_getaffinity(self.pids[rank])
        for _ in range(num):
            process = subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)])
            self.undo.callback(process.wait)
            self.undo.callback(process.kill)

    def bind(self, rank: int) -> None:
        """Take all CPUs but one from a rank, and its threads."""
        for task in Path(f"/proc/{self.pids[rank]}/task").iterdir():
            os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})

    def ask(self, what: str) -> None:
        """Have rank 1 do something from its next steps on."""
        (self.directory / what).touch()

    def _cgroup(self, controller: str, pid: int) -> Path:
        root = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / controller
        group = root / f"rankdeck-test-{os.getpid()}-{pid}"
        group.mkdir()
        self.undo.callback(_remove, group, root)
        return group


def _enter(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _remove(group: Path, root: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            _enter(root, int(pid))
    until(lambda: not (group / "cgroup.procs").read_text(), START_S, "the cgroup is empty")
    group.rmdir()


@dataclass(frozen=True)
class RealCause(Generic[On]):
    """What is done, and the signals of which one must be named first.

    Without signals no cause may be named; `is_slow` is whether rank 1 is to be named then.
    """

    name: str
    do: Callable[[On], None]
    signals: frozenset[Signal] = frozenset()
    is_slow: bool = True
    also: frozenset[Signal] = frozenset()
    """Signals that may be named besides: they show the same."""
    before: str = ""
    """What the ranks are asked for before they start."""
    settled_s: float = SETTLED_S
    """For how long all train before."""


@dataclass
class Told:
    """What was told of a run: seconds from the strike until rank 1 was named, and its cause; what was named wrongly."""

    name: str
    named_s: float | None = None
    because_s: float | None = None
    false: set[str] = field(default_factory=set)
    others: set[tuple[int, ...]] = field(default_factory=set)

    def note(self, cause: RealCause[On], culprits: Sequence[int], said: Sequence[str], at_s: float) -> None:
        """Note a verdict on slow ranks: the signals that it names, the best first, and when it was seen."""
        if tuple(culprits) != (1,):
            self.others.add(tuple(culprits))
            return
        self.named_s = at_s if self.named_s is None else self.named_s
        if self.because_s is None and said and said[0] in cause.signals:
            self.because_s = at_s
        self.false |= set(said) - cause.signals - cause.also


def _hold_both(machine: Machine) -> None:
    for rank in range(2):
        machine.quota(rank, 0.2)


def _work_in_quota(machine: Machine) -> None:
    machine.quota(1, 0.95)
    machine.ask("work")


QUOTA: RealCause[Machine] = RealCause(
    "a CPU quota",
    lambda on: on.quota(1, 0.15),
    frozenset({Signal.CPU_THROTTLED}),
    also=frozenset({Signal.CPU_WAIT}),
)
CAUSES: tuple[RealCause[Machine], ...] = (
    QUOTA,
    RealCause(
        "processes on its CPU",
        lambda on: on.compete(1, 6),
        frozenset({Signal.CPU_WAIT, Signal.CPU_OTHERS}),
    ),
    RealCause("a slow disk", lambda on: on.slow_disk(1, 2 << 20), frozenset({Signal.BLOCKED})),
    RealCause("garbage collection", lambda on: on.ask("gc"), frozenset({Signal.GC_PAUSE})),
    RealCause("a thread that holds the interpreter", lambda on: on.ask("gil"), frozenset({Signal.GIL_WAIT})),
    RealCause("printing", lambda on: on.ask("log"), frozenset({Signal.LOG_LINES})),
    RealCause(
        "one CPU for two threads",
        lambda on: on.bind(1),
        frozenset({Signal.CPUS_ALLOWED}),
        also=frozenset({Signal.CPU_WAIT}),
        before="threads",
    ),
)
MORE_WORK: RealCause[Machine] = RealCause("more work", lambda on: on.ask("work"))
OPPOSITES: tuple[RealCause[Machine], ...] = (
    MORE_WORK,
    RealCause("asleep", lambda on: on.ask("sleep")),
    # Their quotas begin anew at different moments: one may be held longer, and that is no false cause.
    RealCause("both in a quota", _hold_both, also=frozenset({Signal.CPU_THROTTLED}), is_slow=False),
    RealCause("a quota that is enough", lambda on: on.quota(1, 0.9), is_slow=False),
    RealCause("nothing", lambda _: None, is_slow=False),
    RealCause("more work, and a quota that is enough", _work_in_quota),
    RealCause("one CPU that is enough", lambda on: on.bind(1), is_slow=False, before="unbound"),
)


def play_cause(cause: RealCause[Machine], directory: Path, patience: float = 1.0) -> Told:
    """Run two ranks under an agent, do it, and return what a console says of them."""
    (directory / "data").write_bytes(os.urandom(DATA_BYTES))
    os.sync()
    machine = Machine(directory)
    if cause.before:
        machine.ask(cause.before)
    with machine.undo, RunningAgent(node="here") as agent:
        return _Watch(agent, machine, cause, patience).told()


class _Watch:
    """A console's look at the ranks, before and after the strike."""

    def __init__(self, agent: RunningAgent, machine: Machine, cause: RealCause[Machine], patience: float) -> None:
        self._agent, self._machine, self._cause = agent, machine, cause
        self._within_s = patience * (WITHIN_S if cause.is_slow else WITHIN_S / 2)
        self._cluster, self._diagnoser = Cluster(["here"]), Diagnoser()
        self._told, self._struck_s = Told(cause.name), time.monotonic()
        env = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
        agent.start_job(make_local_spec(PROGRAMS, command=["burdened.py", str(machine.directory)], env=env))

    def told(self) -> Told:
        until(self._has_begun, START_S, "the first step")
        self._watch(self._cause.settled_s, lambda: False)
        until(self._is_warm, START_S, "healthy training")
        self._told, self._struck_s = Told(self._cause.name), time.monotonic()
        self._machine.pids = [worker.pid for worker in self._agent.report().workers]
        self._cause.do(self._machine)
        self._watch(self._within_s, self._is_told)
        self._watch(AFTER_S, lambda: False)
        return self._told

    def _watch(self, for_s: float, is_enough: Callable[[], bool]) -> None:
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s and not is_enough():
            self._look()
            time.sleep(LOOK_S)

    def _is_told(self) -> bool:
        wanted = self._told.because_s if self._cause.signals else self._told.named_s
        return wanted is not None

    def _has_begun(self) -> bool:
        return self._lowest_step() > 0

    def _is_warm(self) -> bool:
        return self._lowest_step() >= SETTLED_STEPS

    def _lowest_step(self) -> int:
        self._look()
        job = self._cluster.jobs.get("train")
        return -1 if job is None else int(job.step.min())

    def _look(self) -> None:
        self._agent.processes()  # what it has seen, it ends
        now_s = time.monotonic()
        self._cluster.apply("here", self._agent.report(), now_s)
        for verdict in self._diagnoser.observe(self._cluster, now_s).verdicts:
            if verdict.cause is Cause.STRAGGLER:
                said = [one.signal for one in verdict.because]
                self._told.note(self._cause, verdict.culprits, said, now_s - self._struck_s)
