"""How often an agent looks: five times a second while a job is under way, and at once where one begins; else once."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent import daemon as daemon_file
from agent.daemon import Daemon
from tests.support.waiting import until_async

IDLE_S, BUSY_S, WITHIN_S = 0.2, 0.02, 60.0


class Ticking(Daemon):
    """The loop of an agent whose jobs are what a test says, and nothing else of it."""

    def __init__(self) -> None:
        self._has_news, self._moving_at_s = asyncio.Event(), float("-inf")
        self._publish_timer, self._published_at_s = None, time.monotonic()
        self.ticks_s: list[float] = []
        self.are_moving = False

    def _tick(self, now_s: float) -> None:
        self.ticks_s.append(time.monotonic())
        self._publish_soon(10 * WITHIN_S)
        if self.are_moving:
            self._moving_at_s = now_s

    async def until_ticks(self, num: int) -> None:
        await until_async(lambda: len(self.ticks_s) >= num, WITHIN_S, f"{num} ticks")

    async def gaps_s(self, num: int) -> list[float]:
        """Run for so many ticks, and return the seconds between them."""
        loop = asyncio.create_task(self._tick_loop())
        await self.until_ticks(num)
        loop.cancel()
        return [later - earlier for earlier, later in zip(self.ticks_s, self.ticks_s[1:], strict=False)]


@pytest.fixture(autouse=True)
def _short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_file, "IDLE_PERIOD_S", IDLE_S)
    monkeypatch.setattr(daemon_file, "PUBLISH_PERIOD_S", BUSY_S)


@pytest.mark.parametrize("are_moving", [False, True])
def test_an_agent_looks_seldom_without_a_job_and_often_with_one(*, are_moving: bool) -> None:
    agent = Ticking()
    agent.are_moving = are_moving
    gaps_s = asyncio.run(agent.gaps_s(4))
    assert min(gaps_s) < IDLE_S / 2 if are_moving else min(gaps_s) >= 0.9 * IDLE_S


def test_it_looks_at_once_when_a_job_begins_and_goes_on_for_a_while_after_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_file, "IDLE_PERIOD_S", 10 * WITHIN_S)
    agent = Ticking()

    async def begin_and_end() -> None:
        loop = asyncio.create_task(agent._tick_loop())
        await agent.until_ticks(1)
        agent.are_moving = True
        agent._publish_soon(10 * WITHIN_S)
        await agent.until_ticks(3)
        agent.are_moving = False
        await agent.until_ticks(len(agent.ticks_s) + 3)
        loop.cancel()

    asyncio.run(begin_and_end())
