"""Reads that may hang: never on the caller's thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from agent.slow_reader import SlowReader, TimedReads
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def reader() -> Iterator[SlowReader[int]]:
    reader: SlowReader[int] = SlowReader("slow-reader", stale_s=60.0)
    yield reader
    reader.close()


def test_the_answer_is_there_once_it_has_been_read(reader: SlowReader[int]) -> None:
    assert reader.last("a") is None
    assert reader.ask("a", lambda: 7)
    until(lambda: reader.last("a") == 7, 30, "the answer")
    reader.forget("a")
    assert reader.last("a") is None


def test_while_a_read_hangs_another_is_refused_and_the_caller_goes_on(reader: SlowReader[int]) -> None:
    hanging = threading.Event()

    assert reader.ask("a", lambda: int(hanging.wait(60)))
    assert not reader.ask("b", lambda: 2)
    hanging.set()
    until(lambda: reader.ask("b", lambda: 2), 30, "the reader being free")
    until(lambda: reader.last("b") == 2, 30, "the answer")


def test_a_read_that_fails_leaves_no_answer_and_no_old_one(reader: SlowReader[int]) -> None:
    def fail() -> int:
        raise ProcessLookupError

    reader.ask("a", lambda: 1)
    until(lambda: reader.last("a") == 1, 30, "the answer")
    until(lambda: reader.ask("a", fail), 30, "the reader being free")
    until(lambda: reader.last("a") is None, 30, "the old answer's end")
    until(lambda: reader.ask("a", lambda: 2), 30, "the reader being alive")


def test_the_old_answer_stays_while_the_next_is_read(reader: SlowReader[int]) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def read() -> int:
        has_begun.set()
        return 1 + may_end.wait(60)

    reader.ask("a", lambda: 1)
    until(lambda: reader.ask("a", read), 30, "the reader being free")
    assert has_begun.wait(30)
    assert reader.last("a") == 1
    may_end.set()
    until(lambda: reader.last("a") == 2, 30, "the next answer")


def test_an_old_answer_counts_for_nothing() -> None:
    reader: SlowReader[int] = SlowReader("slow-reader", stale_s=-1.0)
    reader.ask("a", lambda: 1)
    until(lambda: reader.ask("b", lambda: 2), 30, "the first answer")
    assert reader.last("a") is None
    assert reader.last("a", stale_s=60.0) == 1
    reader.close()


async def test_who_awaits_a_read_that_hangs_goes_on_and_the_next_one_under_its_key_waits_for_it() -> None:
    reads, hanging = TimedReads("timed-reads"), threading.Event()

    with pytest.raises(TimeoutError):
        await reads.read("a", lambda: hanging.wait(60), 0.05)
    with pytest.raises(TimeoutError):
        await reads.read("a", lambda: pytest.fail("it began beside the one that hangs"), 0.05)
    assert await reads.read("b", lambda: 2, 30.0) == 2
    waiting = asyncio.create_task(reads.read("a", lambda: 3, 30.0))
    await asyncio.sleep(0)
    hanging.set()
    assert await waiting == 3
    with pytest.raises(ValueError, match="invalid literal"):
        await reads.read("a", lambda: int("x"), 30.0)
