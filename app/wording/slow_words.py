"""What slow ranks cost the others, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.words import percent_text, place_text, seconds_text
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Verdict

HABIT_TEXT = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer",
    Phase.CHECKPOINT: "saving checkpoints",
    Phase.EVAL: "evaluating",
    Phase.OTHER: "outside the model",
}


def slow_parts(verdict: Verdict, ranks: str) -> list[str]:
    """Return the parts of the sentence about ranks that make every step longer.

    Args:
        verdict: On them.
        ranks: Who they are, and where.
    """
    is_one = len(verdict.culprits) == 1
    slow = "is slow and costs" if is_one else "are slow and cost"
    if verdict.is_in_turns:
        slow = "are slow in turns and cost"
    elif verdict.is_at_times:
        slow = slow.replace("slow", "slow in some steps", 1)
    comes = f"{'it waits' if is_one else 'they wait'} {percent_text(verdict.wait_frac)} of the time"
    if verdict.last_frac is not None and not verdict.is_at_times:
        comes = "it comes" if is_one else "they come"
        comes += f" last to {percent_text(verdict.last_frac)} of the collectives"
    asked = f"slowed {verdict.slow_factor:g}x on request" if verdict.slow_factor > 1 else ""
    place = f"last seen at {place_text(verdict.place)}" if verdict.place else ""
    cost = f"about {percent_text(verdict.cost_frac)} of the step time{_trend(verdict)}"
    return [f"{ranks} {slow} the others {cost}: {comes}", asked, _habit(verdict), place]


def input_bound_parts(verdict: Verdict) -> list[str]:
    """Return the parts of the sentence about a job whose input decides how fast it is."""
    place = f"at {place_text(verdict.place)}" if verdict.place else ""
    return [f"the ranks spend {percent_text(verdict.cost_frac)} of their time waiting for input", place]


def _trend(verdict: Verdict) -> str:
    """Return `, up from 12 % 3 min ago`."""
    earlier = verdict.earlier_cost
    if earlier is None or verdict.cost_frac is None:
        return ""
    way = "up" if verdict.cost_frac > earlier.frac else "down"
    return f", {way} from {percent_text(earlier.frac)} {seconds_text(earlier.age_s)} ago"


def _habit(verdict: Verdict) -> str:
    """Return `it spends 55 % of its time in data, the others 3 %`."""
    habit = verdict.habit
    if habit is None or habit.phase not in HABIT_TEXT:
        return ""
    spends, its = ("it spends", "its") if len(verdict.culprits) == 1 else ("they spend", "their")
    own, others = percent_text(habit.frac), percent_text(habit.others_frac)
    return f"{spends} {own} of {its} time {HABIT_TEXT[habit.phase]}, the others {others}"
