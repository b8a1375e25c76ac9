"""Why a job failed stands above the logs, and a key shows the traceback."""

from __future__ import annotations

import pytest

from agent.jobs.root_cause import Failure
from agent.wire.logs import RootCause
from app.tui.views.logs import LogsView
from tests.support.consoles import Desk, TalkingSource, desk, training_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 41, in load
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'shards/00017.bin'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 112, in <module>
    main()
  File "/home/me/train.py", line 88, in main
    batch = next(batches)
  File "/home/me/train.py", line 44, in load
    raise RuntimeError(f"shard {number} cannot be read")
RuntimeError: shard 17 cannot be read"""


def failed_source(cause: RootCause | None = None) -> TalkingSource:
    """Return a training of four ranks of which rank 2 has failed."""
    source = training_source(20)
    source.sim.ranks[2].end = (1, None, "FileNotFoundError: [Errno 2] No such file or directory: 'shards/00017.bin'")
    source.run(1)
    cause = cause or RootCause(
        rank=2,
        end="exited with code 1",
        exception="FileNotFoundError: [Errno 2] No such file or directory: 'shards/00017.bin'",
        outer="RuntimeError: shard 17 cannot be read",
        where="train.py:41 in load",
        traceback=TRACEBACK,
    )
    source.sim.nodes[1]._failure = Failure(source.sim.now_s, cause)
    source.run(6)
    return source


def words(console: Desk) -> str:
    return " ".join(console.text().split())


@pytest.mark.parametrize("size", [(80, 24), (120, 35)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_root_cause_and_its_traceback_look_as_before(size: tuple[int, int]) -> None:
    async with desk(failed_source(), size) as console:
        await console.show("logs")
        assert_looks_as_before(f"failed-logs-{size[0]}x{size[1]}", console.lines())
        await console.press("r")
        assert_looks_as_before(f"failed-traceback-{size[0]}x{size[1]}", console.lines())


async def test_the_line_of_the_exception_stands_out_also_where_it_is_shown_in_other_words() -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has"
    cause = RootCause(2, "exited with code 1", "torch.OutOfMemoryError: CUDA out of memory: 8.00 GiB", traceback=said)
    async with desk(failed_source(cause), (80, 24)) as console:
        await console.press("r")
        view = console.console.query_one(LogsView)
        assert view.cause is not None
        (line,) = view._traceback_lines(view.cause)
        assert line.segments[-1].style == view.look.palette.critical
        assert "right: long lines   r: log lines" in console.text()
        await console.press("right")
        assert "GPU 0 has" in console.text()
        assert "long lines" not in console.text()


async def test_a_key_leads_to_the_traceback_from_any_view_and_back_to_the_lines() -> None:
    async with desk(failed_source(), (80, 24)) as console:
        await console.press("2", "r")
        assert console.console.active == "logs"
        assert "ROOT CAUSE rank 2 on demo-1, train.py:41 in load" in words(console)
        assert "During handling of the above exception" in console.text()
        await console.press("end")
        assert "RuntimeError: shard 17 cannot be read" in console.lines()[-2]
        await console.press("r")
        assert "During handling" not in console.text()
        assert "r: traceback" in console.text()
        assert console.console.query_one(LogsView).is_following


async def test_the_line_that_was_read_is_there_again_after_the_traceback() -> None:
    source = failed_source()
    for number in range(100):
        source.print("demo-0", 0, f"line {number}.")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await console.press("home", "pagedown")
        before = console.lines()
        await console.press("r", "end", "r")
        assert console.lines() == before


async def test_a_hang_that_ended_the_job_is_shown_in_the_sentence_of_its_verdict() -> None:
    source = TalkingSource(SimCluster(timeout_s=8.0))
    source.sim.freeze(2, at_step=45)
    source.run(40)
    async with desk(source, (120, 35)) as console:
        await console.show("logs")
        assert "ROOT CAUSE rank 2 on demo-1" in words(console)
        assert console.text().count("rank 2 on demo-1 was frozen (SIGSTOP)") == 2, (
            "in the first line, and above the logs"
        )
        await console.press("r")
        assert "it left no traceback" not in console.text()
        lines = [line.strip() for line in console.lines()]
        assert any(line.startswith("the job ended when ranks 0-1, 3 timed out after 8.0 s") for line in lines)


async def test_without_a_failure_there_is_nothing_to_show() -> None:
    source = training_source(10)
    async with desk(source, (80, 24)) as console:
        await console.press("r")
        assert console.console.active == "overview"
        assert "No rank has failed." in words(console)
        await console.show("logs")
        assert "ROOT CAUSE" not in console.text()


async def test_while_a_rank_fails_its_cause_is_not_known_yet_and_that_goes_when_it_is() -> None:
    source = training_source(10)
    async with desk(source, (80, 24)) as console:
        await console.press("r")
        source.sim.fail(1, 20)
        await console.play(source, 6)
        assert "rank 1 on demo-0 fails after step" in words(console)
        assert "No rank has failed" not in words(console)
        await console.press("r")
        assert "The root cause is not known yet: the job has not ended." in words(console)
        cause = RootCause(rank=1, end="exited with code 1", exception="ValueError: boom")
        source.sim.nodes[0]._failure = Failure(source.sim.now_s, cause)
        await console.play(source, 1)
        assert "not known yet" not in words(console)
        await console.press("r")
        assert "ROOT CAUSE rank 1 on demo-0" in words(console)


async def test_a_cause_that_is_forgotten_gives_the_lines_back() -> None:
    source = failed_source()
    async with desk(source, (80, 24)) as console:
        await console.press("r")
        source.sim.nodes[0]._failure = source.sim.nodes[1]._failure = None
        await console.play(source, 1)
        assert "During handling" not in console.text()
        assert "LOGS" in console.text()


@pytest.mark.parametrize(
    "payload", ["[/b]", "\x1b[2J", "\x1b]52;c;eA==\x07", "\u202egnp.exe", "\u4e16" * 300, "\x9b2J"]
)
async def test_no_traceback_is_markup_or_an_escape(payload: str) -> None:
    cause = RootCause(2, payload, f"Odd{payload}: x", payload, f"t{payload}.py:3 in f", f"{payload}\n{payload}\rx")
    async with desk(failed_source(cause), (80, 24)) as console:
        await console.press("r")
        await console.press("right", "right")
        text = console.text()
        assert "ROOT CAUSE" in text
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(text)
        assert len(console.lines()) == 24
