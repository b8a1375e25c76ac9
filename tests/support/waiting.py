"""Waiting for a condition, never for time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

POLL_S = 0.02


def until(condition: Callable[[], Answer], within_s: float, what: str) -> Answer:
    """Return the first truthy answer of `condition`; fail the test when none comes in time."""
    deadline_s = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what} (last answer: {answer!r})")
        time.sleep(POLL_S)


async def until_async(condition: Callable[[], Answer], within_s: float, what: str) -> Answer:
    """Like `until`, letting the event loop run between two looks."""
    deadline_s = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what} (last answer: {answer!r})")
        await asyncio.sleep(POLL_S)
