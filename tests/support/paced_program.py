"""Programs whose steps take a known time, for ranks that are slower by a known factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ddpcore.wire import Phase
from tests.support.sim_program import Action, BeginStep, Call, EndStep, WaitBehind, Work

Factor = Callable[[int], float]
"""By how much a rank's work is stretched, by the number of the step."""


@dataclass(frozen=True)
class Paced:
    """Steps of forward and backward, with reductions behind backward as DDP has them, or one after another.

    Args:
        step_s: Work of a step.
        num_buckets: Reductions in a step.
        is_behind: Whether the ranks work on behind them.
        reports_steps: Whether anybody tells of the steps.
        factors: Of ranks that are slower.
    """

    step_s: float = 0.2
    num_buckets: int = 1
    is_behind: bool = True
    reports_steps: bool = True
    factors: Mapping[int, float | Factor] = field(default_factory=dict)

    def __call__(self, rank: int) -> Iterator[Action]:
        step = 0
        while True:
            step += 1
            factor = self.factors.get(rank, 1.0)
            step_s = self.step_s * (factor(step) if callable(factor) else factor)
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 20, "train_step", 0.3 * step_s)
            for _ in range(self.num_buckets):
                yield Work(Phase.BACKWARD, 21, "train_step", 0.65 * step_s / self.num_buckets)
                yield Call(
                    "all_reduce", 21, "train_step", sizes=((1000,),), phase=Phase.BACKWARD, is_behind=self.is_behind
                )
            if self.is_behind:
                yield WaitBehind(21, "train_step")
            yield Work(Phase.OPTIMIZER, 22, "train_step", 0.05 * step_s)
            if self.reports_steps:
                yield EndStep(step, 1.0, 0)
