"""What blocks is awaited, and left to itself by whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from app.errors import SessionError
from app.threads import in_daemon_thread
from tests.support.waiting import until_async


async def test_what_a_call_returns_or_raises_comes_back() -> None:
    def fail() -> None:
        raise SessionError("no")

    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(SessionError, match="no"):
        await in_daemon_thread(fail)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_call_that_fails_otherwise_leaves_nobody_waiting() -> None:
    with pytest.raises(RuntimeError, match="a thread has failed"):
        await asyncio.wait_for(in_daemon_thread(lambda: 1 // 0), 30)


def test_an_event_loop_ends_without_waiting_for_it() -> None:
    is_over, has_begun = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        is_over.wait(120)

    async def leave() -> None:
        call = asyncio.create_task(in_daemon_thread(block))
        await until_async(has_begun.is_set, 30, "it blocks")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    began_s = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - began_s < 60
    is_over.set()
