"""Waiting for a condition, never for time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

POLL_S = 0.02
PAUSE = 4.0
"""Times as long as the last look took is waited before the next: looks that start a program, or read all of /proc,
would else take from a busy machine what they wait for."""
LONGEST_PAUSE_S = 1.5


def _pause_s(look_s: float) -> float:
    return min(max(POLL_S, PAUSE * look_s), LONGEST_PAUSE_S)


def until(condition: Callable[[], Answer], within_s: float, what: str) -> Answer:
    """Return the first truthy answer of `condition`; fail the test when none comes in time."""
    deadline_s = time.monotonic() + within_s
    while True:
        looked_s = time.monotonic()
        answer = condition()
        if answer:
            return answer
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what} (last answer: {answer!r})")
        time.sleep(_pause_s(now_s - looked_s))


async def until_async(condition: Callable[[], Answer], within_s: float, what: str) -> Answer:
    """Like `until`, letting the event loop run between two looks."""
    deadline_s = time.monotonic() + within_s
    while True:
        looked_s = time.monotonic()
        answer = condition()
        if answer:
            return answer
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what} (last answer: {answer!r})")
        await asyncio.sleep(_pause_s(now_s - looked_s))
