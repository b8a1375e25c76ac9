"""Counts the training steps of a program that reports none, by what its optimizers do. Pure."""

from __future__ import annotations

MAX_OPTIMIZERS = 65_536
"""Told apart within a step; a program with one optimizer for each parameter has thousands."""


class OptimizerSteps:
    """Counts rounds of optimizers: a step begins when an optimizer steps that has already stepped in the last one.

    So two optimizers that take turns make one step together; where one steps five times as often as the other, it is
    what counts; micro-batches whose gradients are only added up do not; and an optimizer may be replaced by another.

    Attributes:
        num_steps: Steps so far.
    """

    __slots__ = ("_stepped", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._stepped: set[int] = set()

    def note(self, optimizer_id: int) -> bool:
        """Take an optimizer's step; return whether a new step of the training began with it.

        Args:
            optimizer_id: `id()` of the optimizer: nothing of it is kept alive. One that gets the number of another
                that is gone counts as the same, which is right as often as not.
        """
        stepped = self._stepped
        if stepped and optimizer_id not in stepped and len(stepped) < MAX_OPTIMIZERS:
            stepped.add(optimizer_id)
            return False
        stepped.clear()
        stepped.add(optimizer_id)
        self.num_steps += 1
        return True
