"""What blocks, awaited without holding anybody up at the end: for asyncio's own threads its loop waits there."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from app.errors import AppError

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")


async def in_daemon_thread(call: Callable[[], Answer]) -> Answer:
    """Return what a call returns that blocks; whoever is cancelled meanwhile leaves it to itself.

    Raises:
        AppError: The call has raised it; whatever else it raises is told by its thread, and a RuntimeError here.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(call())
        except AppError as error:
            answer.set_exception(error)
        finally:
            if not answer.done():
                answer.set_exception(RuntimeError("a thread has failed"))

    threading.Thread(target=run, name="rankdeck-call", daemon=True).start()
    return await asyncio.wrap_future(answer)
