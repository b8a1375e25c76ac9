"""The corpus: what can happen to a job, and what must be said of it, as data.

`python -m tests.corpus` plays all of it and prints how often the verdict was right, what was said in vain, and how long
it took; `test_corpus` is its part in CI.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from app.diagnosis.causes import Cause
from tests.support.sim import SimCluster
from tests.support.sim_program import Call, FirstBlock, Training

if TYPE_CHECKING:
    from collections.abc import Callable

Blame = tuple[Cause, tuple[int, ...]]
Strike: TypeAlias = "Callable[[SimCluster], None]"


@dataclass(frozen=True)
class Scenario:
    """One story of a simulated cluster.

    Attributes:
        name: What happens.
        expected: Cause and culprits that must be named, and nothing else; empty for a healthy life.
        within_s: From the strike on.
        strike: What happens, once the ranks have begun `step`.
        cluster: Arguments of `SimCluster` beside the seed.
        step: 0 strikes at the start.
        watch_s: How long to look on after the verdict, or altogether in a healthy life.
    """

    name: str
    expected: frozenset[Blame] = frozenset()
    within_s: float = 0.0
    strike: Strike = lambda _: None
    cluster: dict[str, object] = field(default_factory=dict)
    step: int = 40
    watch_s: float = 15.0


@dataclass(frozen=True)
class Outcome:
    """What was said."""

    name: str
    is_fault: bool
    is_right: bool
    took_s: float | None
    """From the strike to the right verdict; None where none was due or none came."""
    in_vain: tuple[Blame, ...]
    """Alarms beside the right one."""


def play(scenario: Scenario, seed: int) -> Outcome:
    """Simulate a scenario."""
    sim = SimCluster(seed=seed, **scenario.cluster)  # type: ignore[arg-type]
    if scenario.step:
        sim.run_to_step(scenario.step)
    struck_s = sim.elapsed_s
    scenario.strike(sim)
    if scenario.expected:
        while sim.elapsed_s - struck_s < scenario.within_s and not scenario.expected <= _blamed(sim, struck_s):
            sim.run(0.1)
    took_s = sim.elapsed_s - struck_s
    sim.run(scenario.watch_s)
    told = [(at_s - struck_s, (cause, culprits)) for at_s, cause, culprits in sim.alarms]
    is_named = scenario.expected <= {blame for at_s, blame in told if 0 <= at_s <= scenario.within_s + 0.2}
    in_vain = tuple(dict.fromkeys(blame for _, blame in told if blame not in scenario.expected))
    is_fault = bool(scenario.expected)
    # It must be said once, and stay said.
    num_told = [sum(at_s >= 0 and blame == one for at_s, blame in told) for one in scenario.expected]
    is_steady = all(number == 1 for number in num_told) and scenario.expected <= sim.alarming
    is_right = is_named and is_steady and not in_vain
    return Outcome(scenario.name, is_fault, is_right, took_s if is_fault and is_named else None, in_vain)


def _blamed(sim: SimCluster, since_s: float) -> set[Blame]:
    return {(cause, culprits) for at_s, cause, culprits in sim.alarms if at_s >= since_s}


def _slow(factor: float, *ranks: int) -> Strike:
    def strike(sim: SimCluster) -> None:
        for rank in ranks:
            sim.slow(rank, factor)

    return strike


def _for_a_moment(factor: float, seconds: float, *ranks: int) -> Strike:
    def strike(sim: SimCluster) -> None:
        _slow(factor, *ranks)(sim)
        sim.run(seconds)
        _slow(1.0, *ranks)(sim)

    return strike


def _freeze(*ranks: int, after_s: float = 0.0) -> Strike:
    def strike(sim: SimCluster) -> None:
        sim.run(after_s)
        for rank in ranks:
            sim.freeze(rank)

    return strike


def _training(**changes: object) -> dict[str, object]:
    return {"program": Training(**changes)}  # type: ignore[arg-type]


def _blocks(*prepare_s: float) -> dict[str, object]:
    return {"program": FirstBlock(prepare_s=prepare_s)}


def _named(cause: Cause, *culprits: int) -> frozenset[Blame]:
    return frozenset({(cause, culprits)})


WIDE: dict[str, object] = {"num_nodes": 2, "ranks_per_node": 4}
THREE_NODES: dict[str, object] = {"num_nodes": 3, "ranks_per_node": 4}
RANKS_ALONE: dict[str, object] = {"num_nodes": 4, "ranks_per_node": 1}
LOSSY: dict[str, object] = {"noise": 0.5, "drop": 0.2, "delay_s": 0.4}
PEERS_HANG: dict[str, object] = {"hangs_on_death": True}
BROADCAST = Call("broadcast", 150, "sync", sizes=((120_000,),))
OTHER_SIZE = Call("all_reduce", 142, "train_step", sizes=((60_000,),))
OTHER_TYPE = Call("all_reduce", 142, "train_step", sizes=((120_000,),), dtype="Double")
FORWARD_ALONE = _training(extra_calls=[(0, 60, Call("broadcast", 160, "evaluate", sizes=((16,),), root=0))])
LEFT_OUT = _training(skipped_calls=[(1, 60)])
LATE_INPUT = _training(slow_input=[(6, 0.015)])
LONG_CHECKPOINT = _training(checkpoint_s=4, epoch_steps=40, longer_checkpoints=[(80, 90.0)])
TWO_FROZEN = _named(Cause.FROZEN, 1) | _named(Cause.FROZEN, 6)
SLOW_NODE = _named(Cause.STRAGGLER, 4, 5, 6, 7)

FAULTS = (
    Scenario("freeze", _named(Cause.FROZEN, 2), 2.0, _freeze(2)),
    Scenario("freeze over a lossy road", _named(Cause.FROZEN, 2), 3.0, _freeze(2), LOSSY),
    Scenario("freeze of rank 0", _named(Cause.FROZEN, 0), 2.0, _freeze(0)),
    Scenario("freeze of two ranks of two nodes", TWO_FROZEN, 2.0, _freeze(1, 6), WIDE),
    Scenario("freeze while all load data", _named(Cause.FROZEN, 1), 2.0, _freeze(1), _training(data_s=2.0), 3),
    Scenario("freeze before the process group", _named(Cause.FROZEN, 3), 5.0, _freeze(3, after_s=2.0), step=0),
    Scenario("freeze of the first one in a block", _named(Cause.FROZEN, 0), 2.0, _freeze(0), _blocks(600.0), 1),
    Scenario("kill", _named(Cause.EXITED, 2), 2.0, lambda sim: sim.kill(2)),
    Scenario("kill where peers hang", _named(Cause.EXITED, 5), 2.0, lambda sim: sim.kill(5), WIDE | PEERS_HANG),
    Scenario("SIGTERM from outside", _named(Cause.EXITED, 2), 4.0, lambda sim: sim.kill(2, signal=15)),
    Scenario("an exception", _named(Cause.EXITED, 1), 4.0, lambda sim: sim.exit(1, code=1)),
    Scenario("an exception over a lossy road", _named(Cause.EXITED, 1), 5.0, lambda sim: sim.exit(1, code=1), LOSSY),
    Scenario("killed by the kernel for memory", _named(Cause.OOM, 2), 4.0, lambda sim: sim.kill_for_memory(2)),
    Scenario("an early return", _named(Cause.FEWER_CALLS, 1), 4.0, lambda sim: sim.exit(1)),
    Scenario("an early return, peers hang", _named(Cause.FEWER_CALLS, 1), 4.0, lambda sim: sim.exit(1), PEERS_HANG),
    Scenario("a rank holds the GIL", _named(Cause.SILENT, 3), 6.0, lambda sim: sim.hold_gil(3)),
    Scenario("a rank sleeps in the kernel", _named(Cause.SILENT, 3), 6.0, lambda sim: sim.block(3)),
    Scenario("a node is lost", _named(Cause.NODE_LOST, 2, 3), 7.5, lambda sim: sim.lose_node(1)),
    Scenario("a rank does not come", _named(Cause.NOT_JOINED, 3), 70.0, lambda sim: sim.come_late(3, 90.0), step=0),
    Scenario("nobody finds the others", _named(Cause.TRANSPORT), 70.0, SimCluster.cut_network, step=0),
    Scenario("the network dies", _named(Cause.TRANSPORT), 15.0, SimCluster.cut_network),
    Scenario("one broadcasts", _named(Cause.MISMATCH, 2), 4.0, lambda sim: sim.mismatch(2, BROADCAST)),
    Scenario("half the size", _named(Cause.MISMATCH, 2), 4.0, lambda sim: sim.mismatch(2, OTHER_SIZE)),
    Scenario("another element type", _named(Cause.MISMATCH, 2), 4.0, lambda sim: sim.mismatch(2, OTHER_TYPE)),
    Scenario("a forward through DDP on rank 0 alone", _named(Cause.MISMATCH, 0), 4.0, cluster=FORWARD_ALONE, step=60),
    Scenario(
        "a call is left out", _named(Cause.MISMATCH, 1), 60.0, cluster=_training(skipped_calls=[(1, 60)]), step=59
    ),
    Scenario("eight times as slow", _named(Cause.STRAGGLER, 3), 15.0, _slow(8, 3)),
    Scenario("twice as slow", _named(Cause.STRAGGLER, 3), 15.0, _slow(2, 3), WIDE, 100),
    Scenario("20 % slower", _named(Cause.STRAGGLER, 6), 15.0, _slow(1.2, 6), WIDE, 100),
    Scenario("a whole node is slow", SLOW_NODE, 15.0, _slow(8, 4, 5, 6, 7), THREE_NODES),
    Scenario("one rank's input is slow", _named(Cause.STRAGGLER, 6), 25.0, cluster=WIDE | LATE_INPUT, step=1),
    Scenario("a live rank that does not come", _named(Cause.STRAGGLER, 3), 13.0, _slow(4000, 3)),
    Scenario("all wait for input", _named(Cause.INPUT_BOUND), 25.0, cluster=_training(data_s=0.05), step=1),
    Scenario("a very long checkpoint", _named(Cause.CHECKPOINTING, 0), 130.0, cluster=LONG_CHECKPOINT, step=79),
)

HEALTHY = (
    Scenario("training, checkpoints and evaluations", watch_s=300.0, cluster={"noise": 0.4}),
    Scenario("noise, loss and disorder", watch_s=120.0, cluster={"noise": 0.8, "drop": 0.2, "delay_s": 0.6}),
    Scenario("ranks that share cores", watch_s=120.0, cluster={"noise": 0.95}),
    Scenario("slow checkpoints", watch_s=120.0, cluster=_training(checkpoint_s=25, epoch_steps=60)),
    Scenario("long evaluations", watch_s=120.0, cluster=_training(eval_s=20, epoch_steps=60)),
    Scenario("rank 0 does a little more", watch_s=120.0, strike=_slow(1.05, 0), cluster=WIDE),
    Scenario("nodes that differ a little", watch_s=120.0, strike=_slow(1.15, 1, 3), cluster=RANKS_ALONE),
    Scenario("a slow import", watch_s=60.0, strike=lambda sim: sim.come_late(3, 30.0), step=0),
    Scenario("a long first step", watch_s=60.0, strike=_for_a_moment(800, 0.02, 0, 1, 2, 3), step=1),
    Scenario("one hiccup", watch_s=60.0, strike=_for_a_moment(250, 0.05, 1), step=60),
    Scenario("a job that ends well", watch_s=40.0, cluster=_training(num_steps=200) | {"noise": 0.5}),
    Scenario("a job that is stopped", watch_s=20.0, strike=SimCluster.stop),
    Scenario("an agent that begins anew", watch_s=30.0, strike=lambda sim: sim.restart_agent(1)),
    Scenario("short first-blocks", watch_s=30.0, cluster=_blocks(0.5, 3.0, 6.0), step=0),
)

ALL = (*FAULTS, *HEALTHY)
