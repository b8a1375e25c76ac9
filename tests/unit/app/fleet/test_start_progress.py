"""How far a start has come: what is told of it on the way, and what became of each node when it failed."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from agent.wire.commands import Abort, Accepted, PrepareAgain, RefusalReason, Refused
from app.fleet.fleet import Fleet
from app.fleet.start_progress import _NEXT, Milestones, NodeStage, StartProgress

if TYPE_CHECKING:
    from agent.wire.commands import Command, Reply


def progress_of(*nodes: str) -> StartProgress:
    return StartProgress("job gpt", nodes)


def prepare(progress: StartProgress, *nodes: str) -> None:
    for node in nodes:
        progress.move(node, NodeStage.ASKED)
        progress.move(node, NodeStage.PREPARED)


def begin(progress: StartProgress, *nodes: str) -> None:
    for node in nodes:
        progress.move(node, NodeStage.BEGINNING)
        progress.move(node, NodeStage.BEGUN)


def test_a_start_that_goes_well_is_counted_and_says_whom_it_waits_for() -> None:
    progress = progress_of("h1", "h2", "h3")
    assert progress.text == "starting job gpt: 0 of 3 prepared"
    prepare(progress, "h1")
    progress.move("h2", NodeStage.ASKED)
    assert progress.text == "starting job gpt: 1 of 3 prepared, waiting for h2"
    progress.move("h2", NodeStage.PREPARED)
    assert progress.milestone == ""
    prepare(progress, "h3")
    assert progress.milestone == "job gpt: prepared on h1, h2 and h3, 3 of 3 nodes"
    begin(progress, "h1", "h3")
    progress.move("h2", NodeStage.BEGINNING)
    assert progress.text == "starting job gpt: 2 of 3 begun, waiting for h2"
    progress.move("h2", NodeStage.BEGUN)
    assert progress.milestone == "job gpt: begun on h1, h2 and h3, 3 of 3 nodes"
    assert not progress.has_failed


def test_a_refusal_before_anything_runs_is_told_with_what_became_of_the_others() -> None:
    progress = progress_of("h1", "h2", "h3", "h4")
    prepare(progress, "h1", "h3")
    for node in ("h2", "h4"):
        progress.move(node, NodeStage.ASKED)
    progress.move("h2", NodeStage.REFUSED, "no directory /w")
    assert progress.text == "taking back job gpt: waiting for h4, h2 refused"
    progress.move("h4", NodeStage.SILENT, "no reply in 10 s")
    assert progress.milestone == "job gpt: h2: refused: no directory /w; h4: no reply in 10 s"
    for node in ("h1", "h3"):
        progress.move(node, NodeStage.TAKEN_BACK)
    progress.move("h4", NodeStage.UNKNOWN)

    assert progress.account() == (
        "h1 and h3: prepared, taken back; h2: refused: no directory /w; "
        "h4: no reply in 10 s, it may hold what it was to prepare"
    )
    assert progress.account(but_for="h2").startswith("h1 and h3: prepared, taken back; h4: ")
    assert progress.account(but_for="h4") == progress.account(), "what is not known of it is told all the same"


def test_a_node_that_dies_between_prepare_and_commit_may_run_it_and_the_others_are_killed() -> None:
    progress = progress_of("h1", "h2")
    prepare(progress, "h1", "h2")
    begin(progress, "h1")
    progress.move("h2", NodeStage.BEGINNING)
    progress.move("h2", NodeStage.SILENT, "no reply in 10 s")
    progress.move("h1", NodeStage.TAKEN_BACK)
    progress.move("h2", NodeStage.UNKNOWN)

    assert progress.account() == "h1: begun, killed; h2: prepared, no reply in 10 s, it may run there"


def test_nodes_that_were_never_asked_are_named_as_that() -> None:
    progress = progress_of("h1", "h2")
    progress.move("h1", NodeStage.ASKED)
    progress.move("h1", NodeStage.REFUSED, "it is busy")

    assert progress.account(but_for="h1") == "h2: not asked"


def test_of_a_single_node_there_are_no_milestones() -> None:
    progress = progress_of("h1")
    prepare(progress, "h1")

    assert progress.milestone == ""


@pytest.mark.parametrize("stage", NodeStage)
def test_every_stage_says_which_may_follow_and_all_are_reached_from_the_first(stage: NodeStage) -> None:
    reached = {NodeStage.WAITING}
    while more := {after for before in reached for after in _NEXT[before]} - reached:
        reached |= more

    assert stage in reached
    assert set(_NEXT) == set(NodeStage)


def test_what_cannot_follow_is_refused_with_the_way_so_far() -> None:
    progress = progress_of("h1")
    prepare(progress, "h1")

    with pytest.raises(ValueError, match="h1 cannot be begun after not asked -> asked -> prepared"):
        progress.move("h1", NodeStage.BEGUN)


def test_each_milestone_is_told_once_and_again_only_of_another_start() -> None:
    milestones = Milestones()
    for _ in range(2):  # as a node refuses whose last attempt is still ending
        progress = progress_of("h1", "h2")
        progress.move("h1", NodeStage.ASKED)
        milestones.take(progress)
        progress.move("h1", NodeStage.REFUSED, "it is still ending")
        milestones.take(progress)
    assert milestones.drain_notices() == ["job gpt: h1: refused: it is still ending"]
    assert milestones.drain_notices() == []

    again = StartProgress("attempt 1 of job gpt", ["h1", "h2"])
    prepare(again, "h1", "h2")
    milestones.take(again)
    assert milestones.drain_notices() == ["attempt 1 of job gpt: prepared on h1 and h2, 2 of 2 nodes"]


class LateRefusal:
    """A node that refuses to prepare a job, but only once it is allowed to."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.is_taken_back = False

    async def request(self, command: Command) -> Reply:
        if isinstance(command, Abort):
            self.is_taken_back = True
            self.may_answer.set()
            return Accepted()
        self.is_asked.set()
        await self.may_answer.wait()
        return Refused(RefusalReason.UNREACHABLE, "no way from here")


async def test_a_refusal_after_a_start_was_cancelled_is_no_error_that_nobody_retrieves() -> None:
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    node = LateRefusal()
    start = asyncio.create_task(Fleet({"h1": cast("Any", node)}).start_again({"h1": PrepareAgain("gpt", 1, 0, 1, 1)}))
    await node.is_asked.wait()

    start.cancel()
    with suppress(asyncio.CancelledError):
        await start
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()

    assert start.cancelled()
    assert node.is_taken_back
    assert lost == []
