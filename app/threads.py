"""Runs what blocks in daemon threads, which nobody waits for at the end.

`run_parallel` does one thing to many at the same time. `in_daemon_thread` awaits one blocking call: for asyncio's own
threads its loop waits at the end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from app.errors import AppError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_PARALLEL = 32
"""Each takes a thread, and a process of ssh for a moment."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def run_parallel(items: Sequence[Item], do: Callable[[Item], Answer]) -> Iterator[Answer | AppError]:
    """Yield what `do` returned or raised of each, in their order and as soon as it is known; one stops no other.

    Args:
        items: At most `MAX_PARALLEL` at a time.
        do: Called in a thread.
    """
    todo: queue.SimpleQueue[tuple[Item, Future[Answer]]] = queue.SimpleQueue()
    answers: list[Future[Answer]] = []
    for item in items:
        answer: Future[Answer] = Future()
        answers.append(answer)
        todo.put((item, answer))

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                item, answer = todo.get_nowait()
                try:
                    answer.set_result(do(item))
                except AppError as error:
                    answer.set_exception(error)
                finally:
                    if not answer.done():  # the thread itself tells of what is no fault of ours
                        answer.set_exception(RuntimeError("a thread has failed"))

    # Not a pool: one would keep a person who has pressed Ctrl-C until the slowest has answered.
    for _ in range(min(MAX_PARALLEL, len(items))):
        threading.Thread(target=work, name="rankdeck-host", daemon=True).start()
    for answer in answers:
        try:
            yield answer.result()
        except AppError as error:
            yield error


Result = TypeVar("Result")


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Return what a call returns that blocks; whoever is cancelled meanwhile leaves it to itself.

    Raises:
        AppError: The call has raised it; whatever else it raises is told by its thread, and a RuntimeError here.
    """
    answer: Future[Result] = Future()

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
