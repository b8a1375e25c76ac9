"""Ranks stop at the same step, whichever of them has the wish; and a rank that cannot stop still dies by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine.stop_agreement import StopAgreement, StopReason, UntilUpdate, Wishes, steps_between
from ddpcore.engine.stop_signals import MAX_PATIENCE_S, MIN_PATIENCE_S, SAME_WISH_S, StopSignals
from tests.support.waiting import until
from tests.support.warm_ranks import WarmRanks, run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


LONG_PATIENCE_S = 600.0


def stop_of_one_rank(wishing_rank: int, at_step: int, step_s: float) -> tuple[int, StopReason]:
    now_s = 0.0
    control = StopAgreement(dist.new_group(backend="gloo"), lambda: now_s)
    for step in range(1, 1000):
        dist.all_reduce(torch.ones(1))  # what a step does
        now_s += step_s
        wish = StopReason.SIGNAL if dist.get_rank() == wishing_rank and step >= at_step else StopReason.NONE
        agreed = control.at_boundary(Wishes(stop=wish))
        if agreed.stop:
            control.drain()
            return step, agreed.stop
    raise AssertionError("nobody stopped")


@pytest.mark.parametrize(("world_size", "wishing_rank"), [(2, 1), (4, 0), (4, 3)])
def test_one_ranks_wish_stops_all_at_the_same_step(world_size: int, wishing_rank: int) -> None:
    stops = run_ranks(stop_of_one_rank, world_size, wishing_rank, 7, 1.0)
    assert stops == [(stops[0][0], StopReason.SIGNAL)] * world_size
    assert 8 <= stops[0][0] <= 10


def test_short_steps_are_not_all_burdened_with_a_reduction() -> None:
    stops = run_ranks(stop_of_one_rank, 2, 0, 7, 0.02)
    assert stops[0] == stops[1]
    assert 8 <= stops[0][0] <= 7 + 2 * 50


def test_reductions_are_a_second_apart() -> None:
    assert [steps_between(step_s) for step_s in (0.0, 1.0, 0.2, 0.06, 0.002, 1e-9)] == [0, 0, 4, 16, 499, 1000]


def saves_of_one_wish(step_s: float) -> list[int]:
    now_s = 0.0
    control = StopAgreement(dist.new_group(backend="gloo"), lambda: now_s)
    saves: list[int] = []
    for step in range(1, 30):
        dist.all_reduce(torch.ones(1))
        now_s += step_s
        agreed = control.at_boundary(Wishes(save=step >= 5 and not saves))
        if agreed.save:
            saves.append(step)
    control.drain()
    return saves


@pytest.mark.parametrize("step_s", [0.3, 2.0])
def test_a_wish_to_save_is_fulfilled_once(step_s: float) -> None:
    first, second = run_ranks(saves_of_one_wish, 2, step_s)
    assert first == second
    assert len(first) == 1


def test_alone_a_wish_counts_at_once() -> None:
    wishes = Wishes(StopReason.DEADLINE, save=True, step_s=0.1)
    assert StopAgreement(None).at_boundary(wishes) == wishes


def steps_of_hold(step_s: float, patience_s: float | None = None) -> int:
    """Return for how many steps a program that makes no update is waited for."""
    until_update = UntilUpdate(patience_s)
    wishes = [Wishes(StopReason.SIGNAL, step_s=step_s), *[Wishes(step_s=step_s)] * 20000]
    for step, wish in enumerate(wishes):
        if until_update.at_boundary(wish, step, is_open=True).stop:
            assert until_update.at_boundary(wishes[0], step + 1, is_open=True).stop
            return step
    raise AssertionError("nobody stopped")


def test_a_stop_waits_for_the_next_update_but_not_for_long() -> None:
    until_update = UntilUpdate()
    wish = Wishes(StopReason.REQUEST, save=True, step_s=0.5)
    assert until_update.at_boundary(Wishes(), 4, is_open=True) == Wishes()
    assert until_update.at_boundary(wish, 5, is_open=True) == Wishes()
    assert until_update.held == wish
    due = until_update.at_boundary(Wishes(StopReason.DEADLINE), 6, is_open=False)
    assert (due.stop, due.save, until_update.held) == (StopReason.DEADLINE, True, Wishes())
    assert until_update.at_boundary(wish, 7, is_open=False) == wish

    # At most ten seconds, and so that a rank has stopped before its patience with SIGTERM is over.
    assert [steps_of_hold(step_s) for step_s in (0.125, 1.0, 4.0, 30.0)] == [80, 10, 1, 0]
    assert [steps_of_hold(0.5, patience_s) for patience_s in (1.0, 5.0, 600.0)] == [0, 4, 20]


def train_over_steps(directory: str, how: str, apart: int) -> tuple[int, list[float]]:
    """Train with an update every few steps; stop, or be asked to save, between two of them."""
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.randn(240, 2)), global_batch_size=6)
        every = "0.01 s" if how == "saved" else "1000 steps"
        engine.checkpoint(directory, every=every, keep_last=None, model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="40 steps"):
            for (inputs,) in batch.micro_batches(2):
                engine.backward(model(inputs).square().mean())
            if "own optimizer" in how and engine.is_due(f"{apart} steps"):
                optimizer.step()
                optimizer.zero_grad()
            elif engine.is_due(f"{apart} steps"):
                engine.update(optimizer)
            if engine.placement.rank == 0 and engine.step == 10 and "stopped" in how:
                engine.stop()
            if engine.placement.rank == 0 and engine.step == 10 and "SIGTERM" in how:
                os.kill(os.getpid(), signal.SIGTERM)
        return engine.step, [one for parameter in model.parameters() for one in parameter.flatten().tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ["stopped", "SIGTERM", "stopped, own optimizer"])
def test_a_stop_between_updates_loses_no_gradients(how: str, num_ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(train_over_steps, num_ranks, str(tmp_path / "whole"), "", 6, has_group=False)
    stopped = run_ranks(train_over_steps, num_ranks, str(tmp_path / "parts"), how, 6, has_group=False)
    resumed = run_ranks(train_over_steps, num_ranks, str(tmp_path / "parts"), "", 6, has_group=False)

    assert stopped[0][0] in (12, 18, 24, 30, 36)
    assert {step for step, _ in resumed} == {40}
    assert resumed == whole


def test_checkpoints_by_the_clock_are_taken_behind_updates(tmp_path: Path) -> None:
    run_ranks(train_over_steps, 2, str(tmp_path), "saved", 4, has_group=False)

    steps = [int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*")]
    assert len(steps) > 1
    assert [step for step in steps if step % 4] == []


def wait_in_a_collective(patience_s: float | None) -> None:
    with StopSignals(patience_s) as signals:
        signals.step_done(0.01)
        Path(f"waiting-{dist.get_rank()}").touch()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            while True:
                signal.pause()


@pytest.fixture
def blocked_ranks() -> Iterator[WarmRanks]:
    with blocked(None) as ranks:
        yield ranks


@contextlib.contextmanager
def blocked(patience_s: float | None) -> Iterator[WarmRanks]:
    with WarmRanks(wait_in_a_collective, 2, patience_s) as ranks:
        ranks.wait_for_file("waiting-0")
        ranks.wait_for_file("waiting-1")
        yield ranks


def test_a_rank_that_is_blocked_in_a_collective_dies_by_sigterm(blocked_ranks: WarmRanks) -> None:
    began_s = time.monotonic()
    blocked_ranks.kill(0, signal.SIGTERM)
    assert blocked_ranks.status(0) == -signal.SIGTERM
    assert time.monotonic() - began_s >= MIN_PATIENCE_S


def test_a_later_sigterm_ends_a_rank_at_once() -> None:
    with blocked(LONG_PATIENCE_S) as ranks:
        began_s = time.monotonic()

        def is_ended_by_one_more() -> bool:
            # Two signals at once are one to the kernel: the second comes when the first has been taken.
            with contextlib.suppress(ProcessLookupError):
                ranks.kill(0, signal.SIGTERM)
            return ranks.status_if_ended(0, within_s=0.1) is not None

        until(is_ended_by_one_more, within_s=LONG_PATIENCE_S / 10, what="the end, long before patience is over")
        assert ranks.status(0) == -signal.SIGTERM
        assert time.monotonic() - began_s >= SAME_WISH_S


def take_many_terms(first: signal.Signals, pauses_s: list[float], lock_s: float) -> tuple[bool, bool]:
    """Return whether a rank lives behind SIGTERMs with these pauses, and whether it has taken them for a wish.

    For `lock_s` behind the first pause nobody else has the interpreter's lock.
    """
    sys.setswitchinterval(lock_s or 0.005)
    with StopSignals(60.0) as signals:
        os.kill(os.getpid(), first)
        for pause_s in pauses_s:
            until_s = time.monotonic() + pause_s
            until(lambda: time.monotonic() > until_s, within_s=60, what="a pause")  # noqa: B023 - called here
            os.kill(os.getpid(), signal.SIGTERM)
            busy_until_s = time.monotonic() + lock_s
            while time.monotonic() < busy_until_s:
                pass
        sys.setswitchinterval(0.005)
        until(lambda: signals.is_asked, within_s=60, what="the signal is heard")
        time.sleep(0.3)
        has_term = signals._has_term
        signals.stop_reached()
        return signals.is_asked, has_term


@pytest.mark.parametrize(
    ("first", "pauses_s", "lock_s"),
    [
        (signal.SIGTERM, [0.0], 0.0),
        (signal.SIGTERM, [0.2, 0.2, 0.3], 0.0),
        (signal.SIGTERM, [0.2], 2.0),
        (signal.SIGUSR1, [1.5], 0.0),
        (signal.SIGUSR1, [1.5, 0.5], 0.0),
    ],
)
def test_sigterms_within_a_second_of_the_first_are_one_wish(
    first: signal.Signals, pauses_s: list[float], lock_s: float
) -> None:
    assert run_ranks(take_many_terms, 1, first, pauses_s, lock_s) == [(True, True)]


def test_a_sigterm_behind_that_second_ends_a_rank_that_has_reached_its_stop_too() -> None:
    (outcome,) = try_ranks(take_terms_behind_the_stop, 1)
    assert outcome.status == -signal.SIGTERM


def take_terms_behind_the_stop() -> None:
    with StopSignals(60.0) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: signals.is_asked, within_s=60, what="the signal is heard")
        signals.stop_reached()
        time.sleep(SAME_WISH_S + 1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)


def test_sigusr1_only_asks(blocked_ranks: WarmRanks) -> None:
    blocked_ranks.kill(1, signal.SIGUSR1)
    assert blocked_ranks.status_if_ended(1, within_s=MIN_PATIENCE_S + 0.5) is None


def test_patience_is_ten_steps_within_bounds() -> None:
    signals = StopSignals()
    assert signals.patience_s == MIN_PATIENCE_S
    signals.step_done(0.5)
    assert signals.patience_s == MIN_PATIENCE_S + 5.0
    signals.step_done(100.0)
    assert signals.patience_s == MAX_PATIENCE_S
    assert StopSignals(3.0).patience_s == 3.0


def test_a_signal_is_heard_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(60.0) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: signals.is_asked, within_s=60, what="the signal is heard")
        signals.stop_reached()
    assert signal.getsignal(signal.SIGTERM) is before


def take_a_signal_aside() -> bool:
    with StopSignals(0.1) as signals:
        with signals.aside():
            os.kill(os.getpid(), signal.SIGTERM)
            began_s = time.monotonic()
            until(lambda: time.monotonic() > began_s + 1.0, within_s=60, what="patience would be over")
            # In here, since patience of a tenth of a second may be over before anything else is done.
            signals.stop_reached()
        return signals.is_asked


def test_patience_is_held_while_something_is_evaluated_or_saved() -> None:
    assert run_ranks(take_a_signal_aside, 1) == [True]


def take_a_signal_too_late() -> list[int]:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with StopSignals(60.0) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: signals.is_asked, within_s=60, what="the signal is heard")
    return heard


def test_a_signal_that_no_boundary_has_heard_is_the_programs_again() -> None:
    assert run_ranks(take_a_signal_too_late, 1) == [[signal.SIGTERM]]


def fork_meanwhile() -> tuple[int, bool]:
    """Return how a child that was forked inside ended by SIGTERM, and whether the parent took that for its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    reader, writer = os.pipe()
    with StopSignals(60.0) as signals:
        child = os.fork()
        if not child:
            os.write(writer, b"up")
            while True:
                signal.pause()
        os.read(reader, 2)
    # The end did not wait for the child, which has inherited the pipe.
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signals.is_asked


def test_children_inherit_nothing_of_it() -> None:
    assert run_ranks(fork_meanwhile, 1) == [(-signal.SIGTERM, False)]


def test_another_thread_than_the_main_one_hears_no_signals() -> None:
    heard: list[bool] = []

    def listen() -> None:
        with StopSignals() as signals:
            heard.append(signals.is_asked)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == [False]
