"""The meetings of a loop: before its first step and after its last one all ranks must be at the same place.

Ranks that would train for different times, or of which some leave the loop by `break` or leave out a backward, would
hang in collectives that the others never call; those that leave out an update would go on with other weights. Here they
are named, on every rank.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.agreement import common_problem, difference, ranks_by_value, ranks_text, speakers
from ddpcore.barriers.failure_notice import first_failure
from ddpcore.barriers.named_barriers import exchange
from ddpcore.engine.cadence import Unit, parse_cadence
from ddpcore.errors import BarrierDeadlockError, BarrierTimeoutError, CadenceError, EngineUseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpcore.engine.cadence import Cadence

BEGIN = "begin of engine.steps"
END = "end of engine.steps"
BACKWARDS = "step without its last engine.backward"
UPDATES = "calls of engine.update with gradients"

ADVICE = "End the loop on all ranks at once: call engine.stop() instead of leaving it, or leave it in the same step"


class Leaving(NamedTuple):
    """Early end of this rank's loop: the number of the step, from 1, and the line, `train.py:12`."""

    step: int
    line: str

    @property
    def text(self) -> str:
        """A predicate of one rank."""
        return f"left engine.steps in step {self.step} at {self.line}"


def agree_to_begin(until: str, facts: Mapping[str, object], timeout_s: float) -> Cadence:
    """Meet before the first step; return until when all ranks train.

    `until` is as the program gives it, `facts` is what else has to be the same on all ranks. Raises CadenceError if it
    is no cadence on all ranks, EngineUseError with the same text on every rank if they differ, BarrierTimeoutError.
    """
    cadence, error = None, None
    try:
        cadence = parse_cadence(until, Unit.STEP, Unit.EPOCH)
    except CadenceError as failure:
        error = failure
    listing = {name: str(value) for name, value in {"until": until_text(cadence), **facts}.items()}
    answers = [json.loads(text) for text in exchange(BEGIN, json.dumps([str(error or ""), listing]), timeout_s)]
    problems = [problem for problem, _ in answers]
    if error is not None and len(set(problems)) == 1:
        raise error
    digests = [json.dumps(facts_of) for _, facts_of in answers]
    problem = common_problem(problems)
    if not problem and speakers(digests):
        problem = difference(digests, {rank: answers[rank][1] for rank in speakers(digests)})
    if problem or cadence is None:
        raise EngineUseError(f"the ranks would not train for the same steps: {problem}") from error
    return cadence


def until_text(cadence: Cadence | None) -> str:
    """Return one text for all texts that mean the same: `3 epochs`."""
    return "" if cadence is None else f"{cadence.amount:g} {cadence.unit}{'s' * (cadence.amount != 1)}"


def agree_on_left_out(left_out: str, timeout_s: float) -> None:
    """Meet after a step without the last micro-batch's backward, which is right only if all ranks have left it out.

    `left_out` is what this rank has not called. Raises EngineUseError if the others wait for it.
    """
    try:
        exchange(BACKWARDS, "", timeout_s)
    except BarrierDeadlockError as error:
        if error.ended:
            raise
        raise EngineUseError(
            f"this rank {left_out}, for which others wait: call it in each, on every rank. ({error})"
        ) from error


def agree_on_updates(num_updates: int, timeout_s: float) -> None:
    """Meet, and compare how many updates the ranks have made: calls of `Engine.update` with gradients.

    Raises EngineUseError with the same text on every rank if they differ, RankFailedError, BarrierTimeoutError.
    """
    try:
        counts = exchange(UPDATES, str(num_updates), timeout_s)
    except BarrierTimeoutError as error:
        failure = first_failure(0.0, among=error.ended, counts_leaving=False) if error.ended else None
        if failure is None:
            raise
        raise failure from error
    _check_updates(counts)


def _check_updates(counts: Sequence[str]) -> None:
    if speakers(counts):
        found = difference(counts, {rank: {f"the number of {UPDATES}": counts[rank]} for rank in speakers(counts)})
        raise EngineUseError(
            f"the ranks go on with different weights: {found}. Call it on every rank, in the same steps"
        )


def agree_to_end(leaving: Leaving | None, step: int, num_updates: int, timeout_s: float) -> None:
    """Meet after the last step, or after this rank has left the loop; `leaving` is None at the loop's own end.

    Raises EngineUseError, the same text on every rank that can raise it, if not all ranks have reached the same end or
    have made as many updates; BarrierTimeoutError.
    """
    try:
        texts = exchange(END, json.dumps([step, leaving.text if leaving else "", str(num_updates)]), timeout_s)
    except BarrierDeadlockError as error:
        if leaving is None:
            raise
        raise EngineUseError(f"this rank {leaving.text}, and others go on: {error}. {ADVICE}") from error
    ends = [json.loads(text) for text in texts]
    if all(end[0] == ends[0][0] and bool(end[1]) == bool(ends[0][1]) for end in ends):
        _check_updates([end[2] for end in ends])
        return
    ranks_of = ranks_by_value([text or f"came to its end after step {at}" for at, text, _ in ends])
    ways = ", ".join(f"{ranks_text(ranks)} {text}" for text, ranks in ranks_of.items())
    raise EngineUseError(f"the ranks have not ended engine.steps together: {ways}. {ADVICE}")
