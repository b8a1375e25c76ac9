"""Which events a filter shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.event_log import EventKind
from app.filters.terms import Filter, Key, KeyKind, NumberTerm, TextTerm, WordTerm
from app.rows import Severity

if TYPE_CHECKING:
    from app.event_log import Event
    from app.filters.terms import Term

EVENT_KEYS = (
    Key("kind", KeyKind.WORD, words=tuple(str(kind) for kind in EventKind)),
    Key("severity", KeyKind.WORD, words=tuple(str(severity) for severity in Severity)),
    Key("rank", KeyKind.NUMBER),
)
PROBLEMS = frozenset({Severity.WARNING, Severity.CRITICAL})


def is_event_shown(event: Event, wanted: Filter, *, is_problems_only: bool) -> bool:
    """Tell whether every term of a filter holds of an event."""
    if is_problems_only and event.severity not in PROBLEMS:
        return False
    return all(_holds(event, term) is not term.is_inverse for term in wanted.terms)


def _holds(event: Event, term: Term) -> bool:
    match term:
        case WordTerm(key="kind", words=words):
            return event.kind in words
        case WordTerm(words=words):
            return event.severity in words
        case NumberTerm():
            return bool(term.among(np.array(event.ranks, np.int64)).any())
        case _:
            assert isinstance(term, TextTerm), "no key of an event is a name or a figure"
            return term.pattern.is_in(event.text)
