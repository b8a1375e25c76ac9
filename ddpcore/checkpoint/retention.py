"""Which checkpoints stay: pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ddpcore.arguments import check_text, check_whole, refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Mode = Literal["min", "max"]


class Retention(NamedTuple):
    """What stays.

    Attributes:
        keep_last: How many of the newest; None keeps all.
        keep_every: Steps that are a multiple of it stay permanently; None for none.
        keep_best: How many with the best metric; None for none.
        metric: Its name.
        mode: Whether the least or the greatest is best.
    """

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Mode = "min"


class Published(NamedTuple):
    """A checkpoint of the directory, as its commit marker has it.

    Attributes:
        name: Of its directory.
        step: The step it was taken at.
        sequence: The n-th checkpoint of this directory; the newest has the highest.
        id: The same for all copies of one checkpoint.
    """

    name: str
    step: int
    sequence: int
    id: str


def check_retention(kind: type[Exception], retention: Retention) -> None:
    """Refuse what makes no sense."""
    for name in ("keep_last", "keep_every", "keep_best"):
        if getattr(retention, name) is not None:
            check_whole(kind, name, getattr(retention, name), wanted="a number above 0, or None")
    if retention.metric is not None:
        check_text(kind, "metric", retention.metric)
    if retention.mode not in tuple(get_args(Mode)):
        raise refuse(kind, "mode", retention.mode, '"min" where the least value is best, or "max"')
    if (retention.keep_best is None) != (retention.metric is None):
        raise kind('keep_best and metric go together: keep_best=3, metric="val_loss" keeps the three with the least')


def is_better(value: float, other: float, mode: Mode) -> bool:
    """Say whether a metric's value beats another one; NaN beats nothing, and everything beats NaN."""
    if math.isnan(value) or math.isnan(other):
        return not math.isnan(value)
    return value < other if mode == "min" else value > other


def is_among_best(value: float, others: Iterable[float], retention: Retention) -> bool:
    """Say whether a checkpoint with this value would be kept as one of the best."""
    if retention.keep_best is None or math.isnan(value):
        return False
    num_better = sum(not is_better(value, other, retention.mode) and not math.isnan(other) for other in others)
    return num_better < retention.keep_best


def best_first(published: Iterable[Published], metrics: Mapping[str, float], mode: Mode) -> list[Published]:
    """Return those with a metric, the best first; of equal ones the earlier, which took fewer steps.

    Args:
        published: In any order.
        metrics: Of those that have one, by their names.
        mode: Whether the least or the greatest is best.
    """
    sign = 1.0 if mode == "min" else -1.0
    measured = [one for one in published if not math.isnan(metrics.get(one.name, math.nan))]
    return sorted(measured, key=lambda one: (sign * metrics[one.name], one.sequence))


def victims(
    published: Sequence[Published],
    retention: Retention,
    *,
    metrics: Mapping[str, float] | None = None,
    invalid: Collection[str] = (),
) -> list[str]:
    """Return the names of those to delete, oldest first, once the newest of `published` is known to be whole.

    A checkpoint that a later one of the same step has replaced goes first. One that is known to be damaged does not
    count among the last ones or the best ones, and the newest sound one never goes.

    Args:
        published: All of the directory, in any order.
        retention: What stays.
        metrics: As of `best_first`.
        invalid: Names of damaged ones.
    """
    by_age = sorted(published, key=lambda one: one.sequence)
    newest_of_step = {one.step: one for one in by_age if one.name not in invalid}
    sound = [one for one in by_age if newest_of_step.get(one.step) is one]
    last = sound if retention.keep_last is None else sound[-max(1, retention.keep_last) :]
    kept = {one.name for one in last}
    if retention.keep_every is not None:
        kept |= {one.name for one in sound if one.step % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= {one.name for one in best_first(sound, metrics or {}, retention.mode)[: retention.keep_best]}
    oldest_of_last = min((one.sequence for one in last), default=0)
    # A damaged one among the last ones is left for people to look at.
    return [
        one.name
        for one in by_age
        if one.name not in kept and (one.name not in invalid or one.sequence < oldest_of_last)
    ]
