"""A recording in the console: the same views, and keys to move in it."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from agent.wire.logs import LogLine
from app.recording.records import LinesRecord
from app.recording.replay import MAX_FRAME_S, ON_REQUEST, Replay
from app.tui.actions import Keymap
from app.tui.theme import Look
from app.tui.ui_state import UiState
from tests.support.consoles import desk
from tests.support.recordings import Watch, frozen_recording, opening, recording_of
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster


async def test_one_jumps_to_the_verdict_sees_the_stacks_and_goes_back() -> None:
    watch = Watch()
    async with desk(Replay(frozen_recording(), clock=watch), (120, 35)) as console:
        assert "replay 0:00/0:17" in console.lines()[0]
        assert "space Pause" in console.lines()[-1]

        await console.press("n")
        await console.frames()
        assert "rank 2 on demo-1 is frozen" in console.text()
        assert "paused" in console.lines()[0]
        await console.show("logs")
        await console.frames()
        assert "step 1 loss 5.3" in console.text()

        await console.press("s")
        await console.frames()
        assert "later: taken 1.1 s on" in console.text()
        assert "rank 2 (1 rank): frozen at train.py:38" in console.text()
        assert console.lines()[-1].split("  ") == [" Esc Close", "a All frames"], "the others are of what is live"
        await console.press("n", "s", "escape")

        await console.press("comma", "comma", "comma", "comma")
        await console.frames(4)
        assert "replay 0:00/" in console.lines()[0]
        assert "step 1 loss 5.3" not in console.text(), "it has not been printed yet"
        await console.press("1", "right_square_bracket", "space")
        await console.frames()
        assert "x2" in console.lines()[0]


@pytest.mark.parametrize("stood", ["1.2 s", "1 min 10 s"])
async def test_evidence_opens_paused_where_its_incident_begins_and_goes_on_from_there(stood: str) -> None:
    known = frozen_recording()
    why = f"rank 2 on demo-1 is frozen (SIGSTOP) for {stood}; ranks 0-1, 3 wait for it in all_reduce #46 for 1.1 s"
    evidence = msgspec.structs.replace(known, opening=opening("demo-0", "demo-1", why=why))
    watch = Watch()
    async with desk(Replay(evidence, clock=watch), (120, 35)) as console:
        await console.frames(8)
        assert "is frozen (SIGSTOP)" in console.text()
        first = console.lines()[0]
        assert "paused" in first
        assert "replay 0:00/" not in first
        await console.press("space")
        watch.now_s += 3.0
        await console.frames()
        assert console.lines()[0] != first
        assert "paused" not in console.lines()[0]


FROZEN = "rank 2 on demo-1 is frozen (SIGSTOP) for 1.2 s"


@pytest.mark.parametrize(
    ("why", "start_s"), [("rank 9 is not in it", None), (ON_REQUEST, None), (FROZEN, 6.0), (FROZEN, 0.0)]
)
async def test_what_was_kept_for_no_verdict_in_it_plays_from_its_begin_and_so_does_a_moment_that_was_asked_for(
    why: str, start_s: float | None
) -> None:
    evidence = msgspec.structs.replace(frozen_recording(), opening=opening("demo-0", "demo-1", why=why))
    async with desk(Replay(evidence, start_s=start_s, clock=Watch()), (120, 35)) as console:
        await console.frames(12)
        assert f"replay 0:0{start_s or 0:.0f}/" in console.lines()[0]
        assert "paused" not in console.lines()[0]
        assert "seeking" not in console.lines()[0]


async def test_the_keys_of_a_recording_are_in_its_help_and_faults_are_not() -> None:
    async with desk(Replay(frozen_recording(), clock=Watch()), (120, 60)) as console:
        await console.press("question_mark")
        words = console.text()
        assert "Next verdict" in words
        assert "Slower" in words
        assert "Inject a fault" not in words


async def test_a_replay_looks_as_it_did() -> None:
    watch = Watch()
    for width, height in ((80, 24), (120, 35)):
        async with desk(Replay(frozen_recording(), clock=watch), (width, height)) as console:
            await console.press("n")
            await console.frames()
            await console.press("space")
            watch.now_s += 5.0
            await console.frames()
            assert_looks_as_before(f"replay-{width}x{height}", console.lines())


async def test_log_lines_are_there_after_going_back_in_a_frozen_picture() -> None:
    watch = Watch()
    async with desk(Replay(frozen_recording(), clock=watch), (120, 35)) as console:
        watch.now_s += 16.0
        await console.frames(40)
        await console.show("logs")
        assert "step 1 loss 5.3" in console.text()

        await console.press("f", "comma")
        await console.frames(40)
        assert "replay 0:06/" in console.lines()[0]
        assert "step 1 loss 5.3" in console.text(), "the picture stands still"
        assert "LOGS  2 lines" in console.text()

        await console.press("f")
        await console.frames(4)
        assert "step 1 loss 5.3" in console.text()
        assert "LOGS  2 lines" in console.text()


async def test_who_has_scrolled_up_follows_the_lines_again_once_the_recording_has_gone_back() -> None:
    sim = SimCluster()
    sim.run(20)
    printed = [
        LinesRecord(number / 5, "demo-0", [LogLine(number, 0, "stdout", f"line {number}.")]) for number in range(1, 91)
    ]
    watch = Watch()
    async with desk(Replay(recording_of(sim, *printed), clock=watch), (80, 24)) as console:
        await console.show("logs")
        watch.now_s += 18.0
        await console.frames(40)
        await console.press("pageup")
        assert "End follows" in console.text()

        await console.press("comma")
        await console.frames(4)
        assert "following" in console.text()
        assert "line 40." in console.text()
        await console.press("up")
        watch.now_s += 2.0
        await console.frames(4)
        assert "10 new below, End follows" in console.text()


def test_a_replay_that_is_behind_goes_on_at_each_frame_and_one_that_keeps_up_at_every_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much time of a core playing takes; each look here takes as long as a frame may."""
    monkeypatch.setattr("time.thread_time", count(step=MAX_FRAME_S).__next__)
    replay = Replay(frozen_recording(), clock=count(step=MAX_FRAME_S).__next__)
    ui = UiState(Look(), replay, Keymap())
    replay.pause()
    replay.skip(10.0)
    assert [ui.take_frame() for _ in range(10)] == [True] * 10
    assert "seeking" in replay.title
    while replay.is_behind:
        assert ui.take_frame()
    assert "0:10/" in replay.title
    assert [ui.take_frame() for _ in range(4)] == [False, True] * 2
