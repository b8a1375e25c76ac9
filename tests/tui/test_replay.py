"""A recording in the console: the same views, and keys to move in it."""

from __future__ import annotations

from app.recording.replay import Replay
from tests.support.consoles import desk
from tests.support.recordings import Watch, frozen_recording
from tests.support.screens import assert_looks_as_before


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
