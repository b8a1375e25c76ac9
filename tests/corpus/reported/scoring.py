"""How right it was what a user saw: right, partly, wrong, silent or a false alarm."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.diagnosis.causes import Cause

if TYPE_CHECKING:
    from tests.corpus.reported.playing import Look, Played
    from tests.corpus.reported.truth import Program

EARLY_S = 0.3
"""What is shown so long before the program notes its fault is of the fault."""


class Score(StrEnum):
    """Of one life of a program."""

    RIGHT = "right"
    PARTLY = "partly"
    """The culprit is right; cause, operation or line is not, or it came late, or was dropped while the hang stood."""
    WRONG = "wrong"
    """A victim or the network was blamed at some moment."""
    SILENT = "silent"
    FALSE_ALARM = "false alarm"
    """An alarm of a healthy program, or before the fault."""


@dataclass(frozen=True)
class Scored:
    """A score with its reason.

    Attributes:
        took_s: From the fault to the first right verdict.
        reason: What was not right, with the sentence.
    """

    program: Program
    score: Score
    took_s: float | None
    reason: str


def score(program: Program, played: Played, patience: float = 1.0) -> Scored:
    """Judge what was shown."""
    if not program.is_fault:
        return _score_healthy(program, played)
    fault_s = played.fault_s
    if fault_s is None:
        return Scored(program, Score.SILENT, None, f"the program did not come to its fault: {played.printed[-5:]}")
    early = [alarm for look in played.looks if look.at_s < fault_s - EARLY_S for alarm in look.alarms()]
    if early:
        return Scored(program, Score.FALSE_ALARM, None, f"before the fault: {early[0]['text']}")
    took_s = next((look.at_s - fault_s for look in played.looks if is_right(program, look)), None)
    if wrong := _wrong_words(program, played):
        return Scored(program, Score.WRONG, took_s, wrong)
    if took_s is None and program.is_optional:
        return Scored(program, Score.RIGHT, None, "")
    if took_s is None:
        return _score_unnamed(program, played)
    return _score_named(program, played, took_s, patience)


def is_right(program: Program, look: Look) -> bool:
    """Say whether one of the alarms of a moment is wholly right."""
    return any(_is_named(program, alarm) and _is_told(program, alarm) for alarm in look.alarms())


def _score_healthy(program: Program, played: Played) -> Scored:
    alarms = [alarm for look in played.looks for alarm in look.alarms()]
    if alarms:
        return Scored(program, Score.FALSE_ALARM, None, alarms[0]["text"])
    if played.exit_code != 0:
        return Scored(program, Score.FALSE_ALARM, None, f"exit code {played.exit_code}: {played.printed[-3:]}")
    return Scored(program, Score.RIGHT, None, "")


def _score_unnamed(program: Program, played: Played) -> Scored:
    alarms = [alarm for look in played.looks for alarm in look.alarms()]
    blaming = [alarm for alarm in alarms if tuple(alarm["culprits"]) in program.culprits]
    if blaming:
        last = blaming[-1]
        missing = [pattern.pattern for pattern in program.patterns() if not pattern.search(_words(last))]
        what = f"without {missing}" if missing else f"cause {last['cause']}"
        return Scored(program, Score.PARTLY, None, f"{what}: {last['text']}")
    if alarms:
        return Scored(program, Score.PARTLY, None, f"culprits {alarms[-1]['culprits']}: {alarms[-1]['text']}")
    return Scored(program, Score.SILENT, None, played.looks[-1].headline if played.looks else "nothing was shown")


def _score_named(program: Program, played: Played, took_s: float, patience: float) -> Scored:
    if took_s > patience * program.within_s + 1.0:
        return Scored(program, Score.PARTLY, took_s, f"late: {program.within_s:.0f} s are allowed")
    standing = [look for look in played.looks if look.at_s < played.ended_at_s]
    if standing and not is_right(program, standing[-1]):
        return Scored(program, Score.PARTLY, took_s, f"dropped: {standing[-1].headline}")
    asked = [] if played.status is None else [one for one in played.status["verdicts"] if _is_named(program, one)]
    if played.status is not None and not asked:
        return Scored(program, Score.PARTLY, took_s, "rankdeck status has no such verdict at the same time")
    # A job that was killed on request may end without a verdict; one that ended by itself may not.
    final = [verdict for verdict in played.summary.get("verdicts", []) if _is_named(program, verdict)]
    if program.ends_itself and not final:
        return Scored(program, Score.PARTLY, took_s, "the summary at the end has no such verdict")
    return Scored(program, Score.RIGHT, took_s, "")


def _is_named(program: Program, verdict: dict[str, Any]) -> bool:
    return verdict["cause"] in program.causes and tuple(verdict["culprits"]) in program.culprits


def _is_told(program: Program, verdict: dict[str, Any]) -> bool:
    return all(pattern.search(_words(verdict)) for pattern in program.patterns())


def _words(verdict: dict[str, Any]) -> str:
    return f"{verdict['text']} | {verdict['hint']} | {verdict['where']}"


def _wrong_words(program: Program, played: Played) -> str:
    """Return the first sentence that blames a victim, or the network, or nothing."""
    alarms = [alarm for look in played.looks for alarm in look.alarms()]
    alarms += [verdict for verdict in (played.status or {}).get("verdicts", []) if verdict["severity"] != "quiet"]
    alarms += [verdict for verdict in played.summary.get("verdicts", []) if verdict["severity"] != "quiet"]
    for alarm in alarms:
        is_network = alarm["cause"] == Cause.TRANSPORT and Cause.TRANSPORT not in program.causes
        if is_network or not program.may_blame(tuple(alarm["culprits"])):
            return str(alarm["text"])
    root_cause = (played.summary.get("job") or {}).get("root_cause")
    if root_cause is not None and not root_cause["is_consequence"]:
        rank = root_cause["rank"]
        if rank is not None and not program.may_blame((rank,)):
            return f"root cause: {root_cause['text']}"
    return ""
