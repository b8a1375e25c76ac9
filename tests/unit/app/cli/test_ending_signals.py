"""Which signals end a session in an orderly way."""

from __future__ import annotations

import asyncio
import signal

import pytest

from agent.processes.parent_watch import watch_signals
from app.cli.presenting import _on_ending_signals, ending_signals


@pytest.mark.parametrize("is_in_step", [False, True])
@pytest.mark.parametrize("is_taken", [False, True])
async def test_sigterm_ends_a_session_unless_the_step_that_this_process_serves_has_taken_it(
    *, is_in_step: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JOB_ID", "STEP_ID", "PROCID", "STEP_NUM_TASKS", "STEP_NUM_NODES"):
        monkeypatch.setenv(f"SLURM_{name}", "1") if is_in_step else monkeypatch.delenv(f"SLURM_{name}", raising=False)
    loop, taken = asyncio.get_running_loop(), []
    before = signal.signal(signal.SIGTERM, (lambda number, _: taken.append(number)) if is_taken else signal.SIG_DFL)
    ended = asyncio.Event()
    try:
        _on_ending_signals(ended.set)
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not signal.SIG_DFL:  # else it would end the test
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert handler is not signal.SIG_DFL
        is_left = is_in_step and is_taken
        assert (ended.is_set(), bool(taken)) == (not is_left, is_left)
    finally:
        for number in ending_signals():
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, before)


async def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ended = asyncio.Event()
    try:
        _on_ending_signals(ended.set)
        watch_signals(ended.set)
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert (ended.is_set(), signal.getsignal(signal.SIGHUP)) == (False, signal.SIG_IGN)
    finally:
        for number in ending_signals():
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)
