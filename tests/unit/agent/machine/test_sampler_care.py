"""When a GPU sampler is started, given up and replaced."""

from __future__ import annotations

import pytest

from agent.machine.sampler_care import (
    ABSENT_PAUSE_S,
    FIRST_PAUSE_S,
    HUNG_S,
    LONGEST_PAUSE_S,
    MAX_ABANDONED,
    SILENT_S,
    START_S,
    Effect,
    Event,
    KillSampler,
    SamplerCare,
    SamplerEnded,
    SamplerNotStarted,
    SamplerSpoke,
    SamplerStarted,
    StartSampler,
    Ticked,
)
from agent.wire.machine import GpuWatchState


class Bedside:
    """Care under test, with a clock of its own; every sampler that is asked for starts."""

    def __init__(self) -> None:
        self.care = SamplerCare()
        self.now_s = 100.0
        self.next_pid = 1

    def feed(self, event: Event) -> list[Effect]:
        effects = self.care.handle(event, self.now_s)
        self.care.validate()
        return effects

    def tick(self, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        effects = self.feed(Ticked())
        if effects == [StartSampler()]:
            self.feed(SamplerStarted(self.next_pid))
            self.next_pid += 1
        return effects

    def is_in(self, state: GpuWatchState) -> bool:
        return self.care.status(self.now_s)[0] is state

    @property
    def detail(self) -> str:
        return self.care.status(self.now_s)[1]


@pytest.fixture
def bedside() -> Bedside:
    return Bedside()


def test_the_first_tick_starts_a_sampler_and_the_next_ones_wait_for_it(bedside: Bedside) -> None:
    assert bedside.is_in(GpuWatchState.STARTING)
    assert bedside.feed(Ticked()) == [StartSampler()]
    assert bedside.feed(Ticked()) == []
    bedside.feed(SamplerStarted(1))
    assert bedside.is_in(GpuWatchState.STARTING)
    assert (bedside.detail, bedside.care.pids) == ("", {1})
    assert bedside.tick(START_S - 1) == []


def test_a_sampler_that_speaks_is_watching(bedside: Bedside) -> None:
    bedside.tick()
    bedside.feed(SamplerSpoke(1, ""))
    assert bedside.is_in(GpuWatchState.WATCHING)
    assert bedside.detail == ""


def test_silence_is_told_before_the_sampler_is_given_up(bedside: Bedside) -> None:
    bedside.tick()
    bedside.feed(SamplerSpoke(1, ""))
    assert bedside.tick(SILENT_S) == []
    assert bedside.is_in(GpuWatchState.SILENT)
    assert bedside.detail == "NVML has not answered for 5 s"


def test_a_hung_sampler_is_killed_abandoned_and_replaced_after_a_pause(bedside: Bedside) -> None:
    bedside.tick()
    bedside.feed(SamplerSpoke(1, ""))
    assert bedside.tick(HUNG_S) == [KillSampler(1)]
    assert bedside.is_in(GpuWatchState.SILENT)
    assert "sampler 1 was given up after 15 s" in bedside.detail
    assert bedside.tick(FIRST_PAUSE_S - 0.1) == []
    assert bedside.tick(0.1) == [StartSampler()]
    assert bedside.care.pids == {1, 2}
    assert bedside.is_in(GpuWatchState.SILENT)
    bedside.feed(SamplerSpoke(1, ""))
    assert bedside.is_in(GpuWatchState.SILENT), "a late word of an abandoned sampler is no news"
    bedside.feed(SamplerSpoke(2, ""))
    assert bedside.is_in(GpuWatchState.WATCHING)


def test_after_a_few_abandoned_samplers_no_more_are_started_until_one_ends(bedside: Bedside) -> None:
    for _ in range(MAX_ABANDONED):
        while bedside.tick(1.0) != [StartSampler()]:
            pass
        assert bedside.tick(START_S) == [KillSampler(bedside.next_pid - 1)]
    assert bedside.tick(10 * LONGEST_PAUSE_S) == []
    assert "3 samplers hang in the driver" in bedside.detail
    bedside.feed(SamplerEnded(2, -9))
    assert bedside.tick() == [StartSampler()]


def test_where_there_is_no_nvml_it_is_said_once_and_looked_for_rarely(bedside: Bedside) -> None:
    bedside.tick()
    bedside.feed(SamplerSpoke(1, "no driver"))
    assert bedside.is_in(GpuWatchState.ABSENT)
    assert bedside.detail == "no driver"
    bedside.feed(SamplerEnded(1, 0))
    assert bedside.tick(ABSENT_PAUSE_S - 1) == []
    assert bedside.tick(1) == [StartSampler()]
    assert bedside.is_in(GpuWatchState.ABSENT)
    bedside.feed(SamplerSpoke(2, ""))
    assert bedside.is_in(GpuWatchState.WATCHING)


def test_a_driver_that_went_away_is_looked_for_soon_and_then_more_rarely(bedside: Bedside) -> None:
    bedside.tick()
    bedside.feed(SamplerSpoke(1, ""))
    for pid, pause_s in ((1, FIRST_PAUSE_S), (2, 2 * FIRST_PAUSE_S), (3, 4 * FIRST_PAUSE_S)):
        bedside.feed(SamplerSpoke(pid, "the driver is not loaded"))
        bedside.feed(SamplerEnded(pid, 0))
        assert bedside.is_in(GpuWatchState.ABSENT)
        assert bedside.tick(pause_s - 0.1) == []
        assert bedside.tick(0.1) == [StartSampler()]
    bedside.feed(SamplerSpoke(4, ""))
    assert bedside.is_in(GpuWatchState.WATCHING)


@pytest.mark.parametrize(("code", "words"), [(3, "ended with code 3"), (-11, "was killed by signal 11")])
def test_a_sampler_that_dies_is_replaced_after_longer_and_longer_pauses(
    bedside: Bedside, code: int, words: str
) -> None:
    pauses = []
    for _ in range(10):
        waited_s = 0.0
        while bedside.tick(1.0) != [StartSampler()]:
            waited_s += 1.0
        pauses.append(waited_s)
        bedside.feed(SamplerEnded(bedside.next_pid - 1, code))
        assert words in bedside.detail
    assert pauses[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert pauses[-1] == LONGEST_PAUSE_S - 1


def test_a_sampler_that_cannot_be_made_is_tried_again(bedside: Bedside) -> None:
    assert bedside.feed(Ticked()) == [StartSampler()]
    bedside.feed(SamplerNotStarted("no memory"))
    assert bedside.is_in(GpuWatchState.SILENT)
    assert bedside.detail == "the GPU sampler cannot be started: no memory"
    assert bedside.tick(FIRST_PAUSE_S) == [StartSampler()]
