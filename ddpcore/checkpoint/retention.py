"""Which checkpoints stay: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


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


def victims(
    published: Sequence[Published],
    *,
    keep_last: int | None,
    keep_every: int | None,
    invalid: Collection[str] = (),
) -> list[str]:
    """Return the names of those to delete, oldest first, once the newest of `published` is known to be whole.

    A checkpoint that a later one of the same step has replaced goes first. One that is known to be damaged does not
    count among the last ones, and the newest sound one never goes.

    Args:
        published: All of the directory, in any order.
        keep_last: How many of the newest stay; None keeps all.
        keep_every: Steps that are a multiple of it stay for good; None for none.
        invalid: Names of damaged ones.
    """
    by_age = sorted(published, key=lambda one: one.sequence)
    newest_of_step = {one.step: one for one in by_age if one.name not in invalid}
    sound = [one for one in by_age if newest_of_step.get(one.step) is one]
    last = sound if keep_last is None else sound[-max(1, keep_last) :]
    kept = {one.name for one in last}
    if keep_every is not None:
        kept |= {one.name for one in sound if one.step % keep_every == 0}
    oldest_of_last = min((one.sequence for one in last), default=0)
    # A damaged one among the last ones is left for people to look at.
    return [
        one.name
        for one in by_age
        if one.name not in kept and (one.name not in invalid or one.sequence < oldest_of_last)
    ]
