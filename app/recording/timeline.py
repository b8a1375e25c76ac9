"""What was said in a recording, and when. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from app.wording.verdict_words import sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.diagnosis.verdicts import Verdict
    from app.recording.playback import Playback
    from app.recording.records import Recording


class Moment(NamedTuple):
    """Something that was said.

    Attributes:
        at_s: Behind the recording's begin.
        text: The verdict in words, as it first was; or a notice.
    """

    at_s: float
    text: str


def timeline(playback: Playback) -> Iterator[Moment]:
    """Play to the end; yield what is newly said on the way."""
    known: set[tuple[object, ...]] = set()
    while True:
        yield from (Moment(playback.at_s, text) for text in playback.drain_notices())
        said = {verdict_key(verdict): verdict for verdict in playback.verdicts}
        for key, verdict in said.items():
            if key not in known:
                yield Moment(playback.at_s, sentence(verdict))
        known = set(said)  # what has ended may come again
        if playback.is_over:
            return
        playback.step(playback.length_s)


def verdict_key(verdict: Verdict) -> tuple[object, ...]:
    """Return what makes a verdict another one."""
    return verdict.job, verdict.attempt, verdict.cause, verdict.culprits


def clock_text(recording: Recording, at_s: float) -> str:
    """Return when a moment of a recording was, in UTC: `03:12:34Z`; empty where the recording does not tell."""
    try:
        made_at = datetime.fromisoformat(recording.opening.made_at)
        behind_s = at_s if recording.opening.is_live else at_s - recording.length_s
        return f"{made_at + timedelta(seconds=behind_s):%H:%M:%S}Z"
    except (ValueError, OverflowError):
        return ""
