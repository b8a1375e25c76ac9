"""One thing done for many at once, each in a thread of its own: one that fails stops no other."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from app.errors import AppError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_HOSTS_AT_ONCE = 32
"""Each takes a thread, and a process of ssh for a moment."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_parallel(items: Sequence[Item], do: Callable[[Item], Answer]) -> Iterator[tuple[Item, Answer | AppError]]:
    """Yield each item and what `do` returned or raised for it, in order, each as soon as it and those before are known.

    Not a pool: one would keep a person who has pressed Ctrl-C until the slowest has answered.
    """
    todo: queue.SimpleQueue[tuple[Item, Future[Answer]]] = queue.SimpleQueue()
    answers: list[tuple[Item, Future[Answer]]] = [(item, Future()) for item in items]
    for pair in answers:
        todo.put(pair)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                item, answer = todo.get_nowait()
                try:
                    answer.set_result(do(item))
                except AppError as error:
                    answer.set_exception(error)
                finally:
                    answer.cancel()  # of what went wrong in no way of ours, which the thread tells: nobody waits for it

    for _ in range(min(MAX_HOSTS_AT_ONCE, len(items))):
        threading.Thread(target=work, name="rankdeck-host", daemon=True).start()
    for item, answer in answers:
        try:
            yield item, answer.result()
        except AppError as error:
            yield item, error
