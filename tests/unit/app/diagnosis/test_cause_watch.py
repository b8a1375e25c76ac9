"""Causes over time: nothing is named from one look, what is named stays, and without a slow rank nothing is done."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from agent.wire.signals import Signal
from app.diagnosis.because import comparison, watch
from app.diagnosis.because.findings import Comparison
from app.diagnosis.causes import Cause
from tests.corpus.generator.causes import COMPUTING, PROGRAM, CauseCluster, drag
from tests.support.sim import played_once
from tests.support.sim_signals import SimSignals, give_signals

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Verdict

RANK = 2
NAMED_WITHIN_S = 40.0


@played_once
def slow_cluster() -> tuple[CauseCluster, SimSignals]:
    """Return a training of which rank 2 has just been named as slow, and nothing else differs."""
    sim = CauseCluster(2, 2, program=PROGRAM, seed=4)
    signals = give_signals(sim)
    sim.run(28)
    drag(sim, [RANK], COMPUTING, 0.4)
    sim.run_until(lambda: bool(straggler(sim)), NAMED_WITHIN_S)
    return sim, signals


def straggler(sim: CauseCluster) -> Verdict | None:
    return next((verdict for verdict in sim.diagnosis.verdicts if verdict.cause is Cause.STRAGGLER), None)


def named(sim: CauseCluster) -> list[Signal]:
    found = straggler(sim)
    assert found is not None, "it is still slow"
    return [because.signal for because in found.because]


def heat(signals: SimSignals, at_s: float) -> None:
    for signal, value in ((Signal.GPU_THERMAL, 0.7), (Signal.GPU_CLOCK, 1.2e9), (Signal.GPU_TEMPERATURE, 88.0)):
        signals.shift(signal, value, rank=RANK, at_s=at_s)


def test_a_cause_is_named_at_the_third_look_and_that_nothing_differs_too() -> None:
    sim, signals = slow_cluster()
    heat(signals, sim.now_s - 9.0)
    took_s = sim.run_until(lambda: bool(named(sim)), 20.0)
    assert took_s >= 2 * watch.LOOK_S
    assert named(sim) == [Signal.GPU_THERMAL]

    sim, _ = slow_cluster()
    assert straggler(sim).comparison is None  # type: ignore[union-attr]
    took_s = sim.run_until(lambda: straggler(sim).comparison is not None, 20.0)  # type: ignore[union-attr]
    assert took_s >= 2 * watch.LOOK_S - 1.0
    found = straggler(sim)
    assert found is not None
    assert found.because == ()
    assert found.comparison is not None
    assert found.comparison.num_signals > 30
    assert (found.comparison.num_peers, found.comparison.num_hosts) == (3, 2)


def test_a_cause_stays_over_a_few_looks_without_it_and_keeps_its_beginning() -> None:
    sim, signals = slow_cluster()
    began_s = sim.now_s - 9.0
    heat(signals, began_s)
    sim.run_until(lambda: bool(named(sim)), 20.0)
    shifts = list(signals.shifts)
    signals.shifts.clear()
    sim.run(watch.LOOK_S * 2)
    assert named(sim) == [Signal.GPU_THERMAL], "two looks without it"
    signals.shifts.extend(shifts)
    sim.run(20)
    found = straggler(sim)
    assert found is not None
    assert [one.signal for one in found.because] == [Signal.GPU_THERMAL]
    assert found.because[0].since_s == pytest.approx(sim.now_s - began_s, abs=4.0)

    signals.shifts.clear()
    sim.run(watch.LOOK_S * (watch.MAX_MISSES + 3))
    assert named(sim) == []


def test_a_cause_is_named_again_after_a_checkpoint_in_which_no_pace_is_seen() -> None:
    saves_s = watch.FORGET_S + 20.0
    sim = CauseCluster(2, 2, program=replace(PROGRAM, longer_checkpoints=((400, saves_s),)), seed=4)
    signals = give_signals(sim)
    sim.run(28)
    heat(signals, sim.now_s)
    drag(sim, [RANK], COMPUTING, 0.4)
    sim.run_until(lambda: bool(straggler(sim)), NAMED_WITHIN_S)
    sim.run_until(lambda: bool(named(sim)), 20.0)
    sim.run_until(lambda: straggler(sim) is None, 60.0)
    assert sim.run_until(lambda: bool(straggler(sim)), saves_s) > watch.FORGET_S
    sim.run(watch.LOOK_S * (watch.MIN_LOOKS + 1))
    assert named(sim) == [Signal.GPU_THERMAL]


@pytest.mark.parametrize("slow_after_s", [0.0, 28.0])
def test_a_look_that_misses_a_signal_from_the_start_does_not_date_its_beginning(slow_after_s: float) -> None:
    sim = CauseCluster(2, 2, program=PROGRAM, seed=4)
    signals = give_signals(sim)
    heat(signals, sim.now_s)
    sim.run(slow_after_s)
    drag(sim, [RANK], COMPUTING, 0.4)
    sim.run_until(lambda: bool(straggler(sim)), NAMED_WITHIN_S)
    sim.run(watch.LOOK_S * 0.5)
    shifts = list(signals.shifts)
    signals.shifts.clear()
    sim.run(watch.LOOK_S)
    signals.shifts.extend(shifts)
    sim.run(watch.LOOK_S * (watch.MIN_LOOKS + 2))
    found = straggler(sim)
    assert found is not None
    from_start = [(Signal.GPU_THERMAL, None)] if slow_after_s == 0.0 else []
    assert [(one.signal, one.since_s) for one in found.because] == from_start, "hot long before it was slow: no reason"


@pytest.mark.parametrize(("slow_s", "quick_s"), [(0.3, 1.2), pytest.param(1.0, 4.0, marks=pytest.mark.slow)])
def test_the_cause_of_a_rank_that_is_slow_at_times_is_named_however_long_it_takes_to_name_the_rank(
    slow_s: float, quick_s: float
) -> None:
    sim = CauseCluster(2, 2, program=PROGRAM, seed=4)
    signals = give_signals(sim)
    sim.run(60)
    began_s = sim.now_s
    heat(signals, began_s)
    while straggler(sim) is None or not named(sim):
        for for_s, drags in ((slow_s, dict.fromkeys(COMPUTING, 4.0)), (quick_s, {})):
            sim.ranks[RANK].drags = drags
            sim.run(for_s)
        assert sim.now_s - began_s < 120.0
    assert named(sim) == [Signal.GPU_THERMAL]


def test_what_stands_out_in_the_panel_differs_in_the_sentence_too_though_it_is_no_cause() -> None:
    sim, signals = slow_cluster()
    sim.run_until(lambda: "none of 36 signals differs enough" in sim.view().headline().text, 20.0)
    signals.shift(Signal.CPU_WAIT, 0.5, rank=RANK)
    sim.run(watch.LOOK_S * 4)

    assert named(sim) == [], "it began after the rank was slow"
    pace = sim.view().pace
    assert pace is not None
    assert [row.signal for row in pace.signals(RANK) if row.is_worse] == [Signal.CPU_WAIT]
    assert "; no cause found; 1 of 36 signals differs: waits for a CPU" in sim.view().headline().text
    (verdict,) = sim.view().verdicts()
    assert ([one.signal for one in verdict.differing], verdict.because) == ([Signal.CPU_WAIT], [])

    signals.shifts.clear()
    sim.run_until(lambda: "none of 36 signals differs enough" in sim.view().headline().text, 30.0)


def test_whether_a_signal_differs_does_not_change_with_one_look() -> None:
    sim, signals = slow_cluster()
    sim.run_until(lambda: "differs enough" in sim.view().headline().text, 20.0)

    def headlines(for_s: float) -> set[bool]:
        seen = set()
        for _ in range(int(for_s / 0.5)):
            sim.run(0.5)
            seen.add("differs enough" in sim.view().headline().text)
        return seen

    signals.shift(Signal.CPU_WAIT, 0.5, rank=RANK)
    shifts = list(signals.shifts)
    sim.run(watch.LOOK_S)
    signals.shifts.clear()
    assert headlines(watch.LOOK_S * 3) == {True}, "one look finds it"

    signals.shifts.extend(shifts)
    sim.run(watch.LOOK_S * (watch.MIN_LOOKS + 1))
    signals.shifts.clear()
    assert headlines(watch.LOOK_S * (watch.MAX_MISSES - 1)) == {False}, "some looks miss it"


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_cores_of_a_slow_rank_and_its_peers_are_known_without_gpus(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_gpu:
        monkeypatch.setattr(comparison, "GPU_LEVELS", ())
    sim, _ = slow_cluster()
    sim.run(watch.LOOK_S * watch.MIN_LOOKS)
    found = straggler(sim)
    assert found is not None
    assert found.comparison is not None
    own, peers = found.comparison.cores or (0.0, 0.0)
    assert (own > peers > 0.0) == (not has_gpu)


def test_one_sample_names_nothing() -> None:
    sim, signals = slow_cluster()
    heat(signals, sim.now_s - 9.0)
    sim.run(watch.LOOK_S * 1.5)
    pace = sim.view().pace
    assert pace is not None
    assert next(row.signal for row in pace.signals(RANK) if row.is_worse) == Signal.GPU_THERMAL, "it was there to see"
    signals.shifts.clear()
    seen = set[Signal]()
    for _ in range(20):
        sim.run(0.5)
        seen.update(named(sim))
    assert seen == set()


def test_an_agent_that_takes_no_signals_is_known_by_that() -> None:
    sim, _ = slow_cluster()
    for node in sim.nodes:
        node.with_signals = None
    sim.run(4)
    found = straggler(sim)
    assert found is not None
    assert found.comparison == Comparison(0, 3, 0)
    assert "its agent takes no signals" in sim.view().headline().text
    assert sim.view().verdicts()[0].num_signals_compared == 0


def test_without_a_slow_rank_and_of_one_that_is_slowed_on_request_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(watch, "signals_of", lambda *about: compared.append(about))
    sim = CauseCluster(2, 2, program=PROGRAM, seed=4)
    give_signals(sim)
    sim.run(15)
    sim.slow(RANK, 2.0)
    sim.run_until(lambda: bool(straggler(sim)), NAMED_WITHIN_S)
    sim.run(8)

    assert compared == []
    assert straggler(sim).comparison is None  # type: ignore[union-attr]
