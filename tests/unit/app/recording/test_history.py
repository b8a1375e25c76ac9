"""How figures went: every second of the last minutes, coarser the longer ago, bounded, and never made up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.rank_facts import Thresholds
from app.recording.history import MAX_JOBS, MAX_SERIES, NUM_BUCKETS, History, JobHistory, Rings
from app.recording.playback import BEGIN_S, Playback
from app.view.rows import Figure, FigureKey
from tests.support.recordings import frozen_recording
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.recording.history import Window


def fed(*told: tuple[float, float | None]) -> Rings:
    """Return what is kept of one figure, and of nothing else."""
    rings = Rings()
    for at_s, value in told:
        rings.put(at_s, [Figure("x", value, value, value)])
    return rings


def known(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


class Watcher:
    """Looks at a simulated cluster as often as a console does."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim, self.history = sim, History()
        sim.each_view = self.history.observe

    @property
    def job(self) -> JobHistory:
        assert self.history.shown is not None
        return self.history.shown

    def of(self, key: str, last_s: float) -> Window:
        return self.job.window(key, self.sim.now_s - last_s)


def test_each_second_is_kept_and_a_second_that_nobody_looked_at_is_not_known() -> None:
    rings = fed((100.0, 1.0), (101.0, 2.0), (103.2, 4.0), (104.0, None), (105.0, math.nan), (106.0, math.inf))
    window = rings.window("x", 100.0, 106.0)

    assert window.at_s.tolist() == [100.5, 101.5, 102.5, 103.5, 104.5, 105.5, 106.0]
    assert known(window.mean) == known(window.low) == known(window.high) == [1.0, 2.0, None, 4.0, None, None, None]


def test_of_what_is_longer_ago_means_and_extremes_are_kept() -> None:
    rings = fed(*((float(second), float(second % 4)) for second in range(4 * NUM_BUCKETS)))
    window = rings.window("x", 0.0, 4 * NUM_BUCKETS - 1)

    assert np.diff(window.at_s)[:-1].tolist() == [4.0] * (NUM_BUCKETS - 2)
    assert (set(window.low.tolist()), set(window.mean.tolist()), set(window.high.tolist())) == ({0.0}, {1.5}, {3.0})
    assert len(rings.window("x", 4 * NUM_BUCKETS - 60.0, 4 * NUM_BUCKETS - 1).at_s) == 60


def test_a_month_of_training_takes_what_a_minute_takes() -> None:
    rings, short = Rings(), fed((0.0, 1.0))
    for hour in range(24 * 40):
        rings.put(3600.0 * hour, [Figure("x", float(hour), 0.0, 1.0)])
    window = rings.window("x", 0.0, 3600.0 * (24 * 40 - 1))

    assert rings.num_bytes == short.num_bytes < 44_000
    assert 20 < (window.at_s[-1] - window.at_s[0]) / 86_400 < 25, "what is older than 24 days is not kept"
    assert np.nanmax(window.mean) > 24 * 39


def test_what_is_told_later_is_kept_from_then_on_and_too_much_is_not() -> None:
    rings = Rings()
    for second in range(10):
        rings.put(float(second), [Figure(f"f{number}", 1.0) for number in range(2 * second + 1)])

    assert known(rings.window("f4", 0.0, 9.0).mean) == [None, None] + [1.0] * 8
    assert known(rings.window("f4", 0.0, 9.0).low) == [None] * 10
    assert len(rings.window(f"f{MAX_SERIES - 1}", 0.0, 9.0).at_s) == 10
    assert len(rings.window(f"f{MAX_SERIES}", 0.0, 9.0).at_s) == 0
    assert rings.num_bytes < 720_000
    assert len(Rings().window("x", 0.0, 9.0).at_s) == 0


FIGURES = st.none() | st.floats() | st.sampled_from([3e38, -3e38, 4e38])


@given(
    pauses=st.lists(st.sampled_from([0.1, 0.9, 1.0, 3.7, 100.0, 5000.0, 1e6]), min_size=1, max_size=40),
    values=st.lists(FIGURES, min_size=40, max_size=40),
    begin_frac=st.floats(-0.2, 1.0),
)
def test_whatever_comes_a_window_holds_what_was_told_in_it_in_order(
    pauses: list[float], values: list[float | None], begin_frac: float
) -> None:
    moments = np.cumsum([7.0, *pauses]).tolist()
    told = list(zip(moments, values, strict=False))
    end_s = told[-1][0]
    begin_s = 7.0 + begin_frac * (end_s - 7.0)
    window = fed(*told).window("x", begin_s, end_s)

    assert len(window.at_s) <= NUM_BUCKETS
    assert bool(np.all(np.diff(window.at_s) > 0))
    assert all(begin_s <= at_s <= end_s for at_s in window.at_s.tolist())
    real = [value for _, value in told if value is not None and abs(value) <= 3e38]
    rounding = 1e-30 + 1e-5 * max((abs(value) for value in real), default=0.0)
    for kept in (window.mean, window.low, window.high):
        for value in kept[~np.isnan(kept)].tolist():
            assert min(real) - rounding <= value <= max(real) + rounding
    both = ~np.isnan(window.mean)
    assert bool(np.all(np.isnan(window.low) == ~both))


def test_a_training_is_followed_with_who_is_the_lowest_and_the_highest() -> None:
    watcher = Watcher(SimCluster())
    watcher.sim.run(30)
    figures = {figure.key: figure for figure in watcher.job.figures}

    assert list(figures) == [
        FigureKey.LOSS,
        FigureKey.STEP_RATE,
        FigureKey.WAIT_FRAC,
        FigureKey.CPU_CORES,
        FigureKey.RANK_MEMORY,
        FigureKey.HOST_CPU,
    ]
    memory = figures[FigureKey.RANK_MEMORY]
    assert (memory.low_who, memory.high_who) == ("rank 0", "rank 3")
    assert memory.value == pytest.approx(306 * 2**20)
    loss = watcher.of(FigureKey.LOSS, 20)
    assert known(loss.mean) == sorted(known(loss.mean), reverse=True)  # type: ignore[type-var]
    assert bool(np.all(loss.low <= loss.mean))
    assert watcher.job.loss.points[0][1] > watcher.job.loss.points[-1][1]
    assert watcher.job.num_bytes < 300_000


def test_a_lost_node_is_a_gap_in_what_only_it_tells_and_the_others_go_on() -> None:
    watcher = Watcher(SimCluster())
    watcher.sim.run(20)
    watcher.sim.lose_node(1)
    watcher.sim.run(10)
    assert known(watcher.of(FigureKey.LOSS, 4).mean)[-1] is not None
    (memory,) = [figure for figure in watcher.job.figures if figure.key == FigureKey.RANK_MEMORY]
    assert memory.high_who == "rank 1"

    watcher.sim.lose_node(0)
    watcher.sim.run(10)
    for figure in watcher.job.figures:
        assert known(watcher.of(figure.key, 5).mean) == [None] * len(watcher.of(figure.key, 5).mean)
    watcher.sim.return_node(0)
    watcher.sim.return_node(1)
    watcher.sim.run(5)
    loss = known(watcher.of(FigureKey.LOSS, 20).mean)
    assert loss[0] is not None
    assert loss[-1] is not None
    assert None in loss


def test_the_loss_goes_on_over_its_steps_when_these_become_exact_and_about_right_again() -> None:
    history, sim = JobHistory(), SimCluster(num_nodes=1, ranks_per_node=1)
    sim.run_to_step(3)
    view = sim.view()
    row = view.job()
    assert row is not None
    seen = [
        (0, 30, None),
        (0, 41, None),
        (0, 41, 38),
        (0, 55, 50),
        (0, 60, None),
        (0, 64, 62),
        (1, 2, None),
        (1, 9, None),
    ]
    for number, (attempt, step, loss_step) in enumerate(seen):
        found = msgspec.structs.replace(row, attempt=attempt, step=step, loss_step=loss_step, loss=1.0 + number)
        history.observe(view, found)
        if attempt == 0:
            assert history.loss.points[0][0] == 30.0

    assert [x for x, _ in history.loss.points] == [2.0, 9.0]
    history.observe(view, msgspec.structs.replace(row, attempt=1, step=4, loss_step=None, loss=1.0))
    assert [x for x, _ in history.loss.points] == [4.0], "the steps restart"


def test_the_loss_of_an_earlier_attempt_is_not_that_of_one_which_reports_none() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=1)
    sim.run_to_step(3)
    view = sim.view()
    row = view.job()
    assert row is not None

    def seen(*attempts: tuple[int, int, float | None]) -> JobHistory:
        history = JobHistory()
        for attempt, step, loss in attempts:
            found = msgspec.structs.replace(row, attempt=attempt, step=step, loss_step=step, loss=loss)
            history.observe(view, found)
        return history

    history = seen((0, 262, 0.08), (1, 2, None))
    assert (history.loss.curve, history.loss_curve) == ([(262, 0.08)], ())
    history = seen((1, 2, None))
    history.reach_back(seen((0, 262, 0.08), (1, 1, None)), view.now_s)
    assert history.loss_curve == ()
    history = seen((1, 2, 0.3))
    history.reach_back(seen((0, 262, 0.08), (1, 1, None)), view.now_s)
    assert history.loss_curve == [(2, 0.3)]
    history.reach_back(seen((1, 1, 0.4)), view.now_s)
    assert history.loss_curve == [(1, 0.4), (2, 0.3)]


def test_a_printed_loss_of_an_unknown_step_stands_where_it_came_and_is_exact_only_once_another_is() -> None:
    history, sim = JobHistory(), SimCluster(num_nodes=1, ranks_per_node=1)
    sim.run_to_step(3)
    view = sim.view()
    row = view.job()
    assert row is not None
    for step, loss_step, loss in ((40, None, 3.7), (41, None, 3.7), (59, None, 3.7), (60, 60, 3.5), (61, 60, 3.5)):
        history.observe(view, msgspec.structs.replace(row, step=step, loss_step=loss_step, loss=loss))

    assert history.loss.curve == [(40, 3.7), (60, 3.5)]
    assert history.is_loss_dated


def test_the_end_of_a_job_is_where_its_history_ends_and_another_attempt_goes_on() -> None:
    watcher = Watcher(SimCluster())
    watcher.sim.run(12)
    watcher.sim.stop()
    watcher.sim.run(20)
    ended_s, num_looks, is_over = watcher.job.now_s, watcher.job.num_looks, watcher.job.is_over
    assert is_over
    assert ended_s < watcher.sim.now_s - 15
    watcher.sim.run(5)
    assert (watcher.job.now_s, watcher.job.num_looks) == (ended_s, num_looks)

    watcher.sim.next_attempt()
    watcher.sim.run(12)
    assert watcher.job.is_over is False
    ((at_s, attempt),) = watcher.job.attempts
    assert attempt == 1
    assert ended_s < at_s < watcher.job.now_s
    assert len(watcher.job.loss.points) > 0
    assert watcher.job.loss.points[0][0] < 20, "the loss over the steps begins anew"


def test_the_histories_of_the_last_jobs_are_kept() -> None:
    history, seen = History(), []
    for number in [*range(MAX_JOBS + 1), 1]:
        sim = SimCluster()
        for node in sim.nodes:
            node.admit(f"job-{number}", 0, sim.now_s)
        sim.run(0.5)
        history.observe(sim.view())
        seen.append(history.shown)

    assert seen[-1] is seen[1]
    assert len({id(job) for job in seen}) == MAX_JOBS + 1
    history.observe(SimCluster().view())
    assert history.shown is None


def test_a_recording_that_is_skimmed_has_the_whole_history_up_to_each_moment() -> None:
    def played_to(*goals_s: float) -> JobHistory:
        playback = Playback(frozen_recording(), Thresholds())
        for goal_s in goals_s:
            if goal_s < playback.at_s:
                playback.begin()
            while playback.at_s < goal_s:
                playback.step(goal_s)
        assert playback.history.shown is not None
        return playback.history.shown

    def rates(job: JobHistory) -> Sequence[float | None]:
        return known(job.window(FigureKey.WAIT_FRAC, BEGIN_S).mean)

    straight, back = played_to(12.0), played_to(16.0, 12.0)
    assert rates(straight) == rates(back)
    assert len([rate for rate in rates(straight) if rate is not None]) > 5
    assert straight.loss.points == back.loss.points
    assert straight.now_s == pytest.approx(BEGIN_S + 12.0, abs=1.01)
