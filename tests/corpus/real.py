"""The corpus on real torchrun ranks: real gloo, a real agent, the console's own model and diagnosis."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.wire.commands import InjectFault
from agent.wire.jobs import ENDED_STATES
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from ddpcore.wire import FaultKind
from tests.corpus.scenarios import Blame, Outcome
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from agent.wire.jobs import JobSpec

PROGRAMS = Path(__file__).parent / "programs"
START_S = 120.0
LOOK_S = 0.1


@dataclass(frozen=True)
class RealScenario:
    """One program, and what must be said of it.

    Attributes:
        name: What happens.
        command: Of the two ranks, in `programs/`.
        expected: Cause and culprits; None is a healthy life.
        within_s: From the strike on: from `at_step`, else from the first collective.
        at_step: The step at which it happens.
        fault: What the agent does to rank 1 at that step.
        watch_s: How long to look on, if the job does not end before.
        needs_quiet: Its verdict is about time: on a machine with other work it may rightly differ.
        until_ended: What may be said until the rank's process has ended: how it ends is not known before.
    """

    name: str
    command: tuple[str, ...]
    expected: Blame | None = None
    within_s: float = 10.0
    at_step: int | None = None
    fault: FaultKind | None = None
    watch_s: float = 5.0
    needs_quiet: bool = False
    until_ended: Blame | None = None


REAL = (
    RealScenario("two barriers, the one comes late (S2 a)", ("two_barriers.py", "first"), watch_s=30),
    RealScenario("two barriers, one slow rank (S2 b)", ("two_barriers.py", "slow"), watch_s=30),
    RealScenario(
        "two barriers, a rank calls one (S2 c)", ("two_barriers.py", "once"), (Cause.FEWER_CALLS, (1,)), watch_s=4
    ),
    RealScenario(
        "an all-reduce against a broadcast", ("different_calls.py",), (Cause.MISMATCH, (0, 1)), within_s=12, watch_s=4
    ),
    RealScenario("the first one raises (S1)", ("first_one_first.py", "raise"), (Cause.EXITED, (0,)), watch_s=3),
    RealScenario(
        "the first one raises and is not out before the others (S1)",
        ("first_one_first.py", "raise-and-linger"),
        (Cause.EXITED, (0,)),
        watch_s=3,
    ),
    RealScenario("the first one takes its time (S1)", ("first_one_first.py", "take"), watch_s=20),
    RealScenario("freeze", ("steps.py", "9999"), (Cause.FROZEN, (1,)), 4.0, 60, FaultKind.FREEZE),
    RealScenario("kill", ("steps.py", "9999"), (Cause.EXITED, (1,)), 6.0, 60, FaultKind.KILL),
    RealScenario("the GIL is held", ("steps.py", "9999", "gil", "60"), (Cause.SILENT, (1,)), 12.0, 60),
    RealScenario("more memory than there is", ("steps.py", "9999", "oom", "60"), (Cause.OOM, (1,)), 15.0, 60),
    RealScenario(
        "an end without a traceback",
        ("steps.py", "9999", "refuse", "60"),
        (Cause.EXITED, (1,)),
        6.0,
        60,
        until_ended=(Cause.FEWER_CALLS, (1,)),
    ),
    RealScenario("an early return", ("steps.py", "9999", "return", "60"), (Cause.FEWER_CALLS, (1,)), 15.0, 60),
    RealScenario(
        "30 % slower", ("steps.py", "9999", "slow", "60"), (Cause.STRAGGLER, (1,)), 20.0, 60, needs_quiet=True
    ),
    RealScenario("slow input", ("steps.py", "9999", "input"), (Cause.INPUT_BOUND, ()), 25.0, 5, needs_quiet=True),
    RealScenario("healthy training", ("steps.py", "500"), watch_s=60, needs_quiet=True),
)


def play_real(scenario: RealScenario, directory: Path, patience: float = 1.0) -> Outcome:
    """Run a scenario's program under an agent of its own, and look at it as a console does.

    `patience` is how many times as long the verdict may take as on a quiet machine.
    """
    spec = make_local_spec(PROGRAMS, command=list(scenario.command), env={"PYTHONPATH": str(Path.cwd())})
    with RunningAgent(node="here") as agent:
        return _Watch(agent, spec, scenario, patience).outcome()


class _Watch:
    def __init__(self, agent: RunningAgent, spec: JobSpec, scenario: RealScenario, patience: float) -> None:
        self._agent, self._scenario = agent, scenario
        self._within_s = patience * scenario.within_s if scenario.expected else 0.0
        self._cluster, self._diagnoser = Cluster(["here"]), Diagnoser()
        self._alarms: list[tuple[float, Blame]] = []
        self._standing: set[Blame] = set()
        agent.start_job(spec)

    def outcome(self) -> Outcome:
        scenario = self._scenario
        until(self._has_begun, START_S, "the strike")
        struck_s = time.monotonic()
        if scenario.fault is not None:
            self._agent.ask(InjectFault("train", scenario.fault, 1))
        took_s = None
        while time.monotonic() - struck_s < self._within_s:
            self._look()
            if scenario.expected in self._standing:
                took_s = time.monotonic() - struck_s
                break
            time.sleep(LOOK_S)
        watched_from_s = time.monotonic()
        while time.monotonic() - watched_from_s < scenario.watch_s and not (took_s is None and self._has_ended()):
            self._look()
            time.sleep(LOOK_S)
        rightly = (scenario.expected, scenario.until_ended)
        in_vain = tuple(dict.fromkeys(blame for _, blame in self._alarms if blame not in rightly))
        is_fault = scenario.expected is not None
        return Outcome(scenario.name, is_fault, (took_s is not None or not is_fault) and not in_vain, took_s, in_vain)

    def _look(self) -> None:
        self._agent.processes()  # what it has seen, it ends
        now_s = time.monotonic()
        self._cluster.apply("here", self._agent.report(), now_s)
        found = self._diagnoser.observe(self._cluster, now_s)
        standing = {(v.cause, v.culprits) for v in found.verdicts if v.severity is not Severity.QUIET}
        self._alarms += [(now_s, blame) for blame in sorted(standing - self._standing)]
        self._standing = standing

    def _has_begun(self) -> bool:
        self._look()
        job = self._cluster.jobs.get("train")
        if job is None:
            return False
        at_step = self._scenario.at_step
        return bool(job.groups) if at_step is None else int(job.step.max()) >= at_step - 1

    def _has_ended(self) -> bool:
        job = self._cluster.jobs.get("train")
        return job is not None and all(share.status.state in ENDED_STATES for share in job.assignments.values())
