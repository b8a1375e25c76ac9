from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from agent.node_state.memory_growth import NEAR_S, Held, Limit, MemoryGrowth
from agent.wire.machine import LimitKind, LimitReport
from ddpcore.wire import Phase
from tests.support.examples import few_and_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.wire.machine import GrowthReport

MIB, GIB = 2**20, 2**30
LIMIT_BYTES = 8 * GIB
BASE_BYTES = GIB
FREE_BYTES = LIMIT_BYTES - BASE_BYTES
LOOK_S = 1.0
STEPS_HZ = 4
SEEDS = st.integers(0, 2**16)
NOISES = st.sampled_from([0, 5 * MIB, 40 * MIB])


class Story(NamedTuple):
    died_s: float | None
    warned_s: float | None
    first: GrowthReport | None
    is_kept: bool
    """From the first warning to the end."""


def play(
    held_at: Callable[[float], float], until_s: float, *, noise: float = 0, seed: int = 0, has_steps: bool = True
) -> Story:
    """Let one rank live until its memory is at the limit."""
    growth, random, now_s = MemoryGrowth(), Random(seed), 0.0
    first: GrowthReport | None = None
    warned_s: float | None = None
    is_kept = True
    while now_s < until_s:
        held_bytes = int(held_at(now_s) + noise * random.random())
        if held_bytes >= LIMIT_BYTES:
            return Story(now_s, warned_s, first, is_kept)
        limit = Limit("cgroup", LimitReport(LimitKind.CGROUP, LIMIT_BYTES, held_bytes))
        step = int(STEPS_HZ * now_s) if has_steps else None
        growth.take(Held(("job", 0, "host"), held_bytes, [limit], step, Phase.FORWARD), now_s)
        growth.judge(now_s)
        near = [report for report in growth.of("job", 0) if report.is_near]
        if near and first is None:
            first, warned_s = near[0], now_s
        is_kept &= first is None or bool(near)
        now_s += LOOK_S
    return Story(None, warned_s, first, is_kept)


@few_and_many(3, 10, life_s=st.floats(60.0, 3600.0), noise=NOISES, seed=SEEDS)
def test_a_leak_of_any_rate_is_warned_of_before_the_limit_and_until_then(
    life_s: float, noise: float, seed: int
) -> None:
    rate_hz = FREE_BYTES / life_s
    story = play(lambda now_s: BASE_BYTES + rate_hz * now_s, 2 * life_s, noise=noise, seed=seed)
    assert story.died_s is not None
    assert story.warned_s is not None
    assert story.first is not None
    assert story.is_kept
    left_s = story.died_s - story.warned_s
    assert min(0.2 * life_s, 0.45 * NEAR_S) <= left_s <= 1.2 * NEAR_S
    assert abs(story.first.remaining_s - left_s) <= 0.35 * left_s + 10.0
    assert abs(story.first.rate_bytes_hz / rate_hz - 1.0) <= 0.35


@few_and_many(3, 10, epoch_s=st.floats(5.0, 120.0), num_epochs=st.integers(26, 60), noise=NOISES, seed=SEEDS)
def test_a_leak_of_every_epoch_is_warned_of_before_the_limit(
    epoch_s: float, num_epochs: int, noise: float, seed: int
) -> None:
    a_time = FREE_BYTES / num_epochs

    def held_at(now_s: float) -> float:
        return BASE_BYTES + a_time * int(now_s / epoch_s) + 200 * MIB * ((now_s % epoch_s) / epoch_s)

    story = play(held_at, 2 * num_epochs * epoch_s, noise=noise, seed=seed)
    assert story.died_s is not None
    assert story.warned_s is not None


@few_and_many(3, 10, fill_s=st.floats(1.0, 1500.0), part=st.floats(0.05, 0.4), noise=NOISES, seed=SEEDS)
def test_a_model_that_loads_or_a_cache_that_fills_evenly_is_no_leak(
    fill_s: float, part: float, noise: float, seed: int
) -> None:
    story = play(
        lambda now_s: BASE_BYTES + part * FREE_BYTES * min(1.0, now_s / fill_s),
        2 * fill_s + 300,
        noise=noise,
        seed=seed,
    )
    assert story.warned_s is None


@few_and_many(3, 10, tau_s=st.floats(2.0, 900.0), part=st.floats(0.05, 0.85), noise=NOISES, seed=SEEDS)
def test_a_cache_that_fills_ever_more_slowly_is_no_leak(tau_s: float, part: float, noise: float, seed: int) -> None:
    story = play(
        lambda now_s: BASE_BYTES + part * FREE_BYTES * (1.0 - math.exp(-now_s / tau_s)),
        5 * tau_s + 300,
        noise=noise,
        seed=seed,
    )
    assert story.warned_s is None


@few_and_many(3, 10, epoch_s=st.floats(2.0, 900.0), part=st.floats(0.05, 0.4), noise=NOISES, seed=SEEDS)
def test_memory_that_is_given_back_at_the_end_of_each_epoch_is_no_leak(
    epoch_s: float, part: float, noise: float, seed: int
) -> None:
    story = play(
        lambda now_s: BASE_BYTES + part * FREE_BYTES * ((now_s % epoch_s) / epoch_s),
        4 * epoch_s,
        noise=noise,
        seed=seed,
    )
    assert story.warned_s is None


@few_and_many(3, 10, period_s=st.floats(20.0, 600.0), for_s=st.floats(1.0, 15.0), part=st.floats(0.1, 0.9), seed=SEEDS)
def test_a_checkpoint_that_takes_much_memory_for_a_moment_is_no_leak(
    period_s: float, for_s: float, part: float, seed: int
) -> None:
    story = play(
        lambda now_s: BASE_BYTES + part * FREE_BYTES * (now_s % period_s < for_s),
        8 * period_s,
        noise=5 * MIB,
        seed=seed,
    )
    assert story.warned_s is None


@few_and_many(3, 10, level=st.floats(0.1, 0.9), walk=st.sampled_from([0, MIB, 5 * MIB]), seed=SEEDS)
def test_memory_that_goes_up_and_down_by_chance_is_no_leak(level: float, walk: float, seed: int) -> None:
    random, held = Random(seed), BASE_BYTES + level * FREE_BYTES

    def held_at(_now_s: float) -> float:
        nonlocal held
        held = max(BASE_BYTES, held + random.gauss(0.0, walk) - 0.02 * (held - BASE_BYTES - level * FREE_BYTES))
        return held

    assert play(held_at, 1800, noise=20 * MIB, seed=seed).warned_s is None


def test_a_program_without_steps_is_watched_for_longer() -> None:
    life_s = 600.0
    with_steps, without = (
        play(lambda now_s: BASE_BYTES + FREE_BYTES / life_s * now_s, 700, has_steps=has_steps)
        for has_steps in (True, False)
    )
    assert with_steps.warned_s is not None
    assert without.warned_s is not None
    assert with_steps.warned_s + 60 < without.warned_s < life_s
