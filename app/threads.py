"""Runs blocking calls in daemon threads, which the process does not wait for at exit.

`run_parallel` calls a function for many items in parallel. `in_daemon_thread` awaits one blocking call; asyncio's own
threads would delay exit, since the event loop waits for them.
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
"""Limit of threads; each may start an ssh process."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def run_parallel(items: Sequence[Item], do: Callable[[Item], Answer]) -> Iterator[Answer | AppError]:
    """Yield what `do` returned or raised for each item, in their order, as soon as known; an error stops no other item.

    Args:
        items: The items; `MAX_PARALLEL` run at the same time.
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
                    if not answer.done():  # the thread itself prints any other exception
                        answer.set_exception(RuntimeError("a thread has failed"))

    # Not a pool: after Ctrl-C a pool would keep the user waiting for the slowest call.
    for _ in range(min(MAX_PARALLEL, len(items))):
        threading.Thread(target=work, name="rankdeck-host", daemon=True).start()
    for answer in answers:
        try:
            yield answer.result()
        except AppError as error:
            yield error


Result = TypeVar("Result")


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Return the result of a blocking call; a cancelled caller leaves the call running.

    Raises:
        AppError: The call raised it. The thread prints any other exception, and a RuntimeError is raised here.
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
