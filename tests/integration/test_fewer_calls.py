"""Row S2's program (c) under torchrun: a rank that ends after fewer calls is named by the one it leaves waiting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpcore.wire import FIRST_GROUP, Phase
from tests.support.ranks import RealRanks, Reports, group

if TYPE_CHECKING:
    from collections.abc import Iterator

FEWER_CALLS = Path(__file__).parents[1] / "support" / "programs" / "fewer_calls.py"
BLOCK = f"{FIRST_GROUP}/corpus"

pytestmark = pytest.mark.ranks


def line_of(comment: str) -> str:
    """Return `fewer_calls.py:12` of the line with this comment."""
    lines = FEWER_CALLS.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# {comment}")]
    return f"{FEWER_CALLS.name}:{number}"


@pytest.fixture
def job() -> Iterator[RealRanks]:
    with RealRanks([FEWER_CALLS], 2) as job:
        yield job


def rank_1_waits_in_the_block(reports: Reports) -> bool:
    waiting = group(reports[1], BLOCK)
    place = reports[1].place
    is_there = place is not None and f"{FEWER_CALLS.name}:{place.line}" == line_of("ENTERS THE BLOCK")
    return waiting is not None and waiting.is_waiting and is_there and group(reports[0], BLOCK) is not None


@pytest.mark.slow
def test_the_one_left_waiting_names_rank_count_and_lines_and_the_block_before_was_shown(job: RealRanks) -> None:
    reports = job.wait_until(rank_1_waits_in_the_block, "rank 1 waits for the master")
    waiting, master = group(reports[1], BLOCK), group(reports[0], BLOCK)
    assert waiting is not None
    assert (waiting.op, waiting.label, waiting.enqueued_seq, waiting.completed_seq) == (
        "barrier",
        "first: corpus",
        1,
        0,
    )
    assert waiting.ranks == []
    assert master is not None
    assert (master.enqueued_seq, master.is_waiting) == (0, False)
    assert reports[1].phase is Phase.BARRIER
    assert reports[0].phase is not Phase.BARRIER

    (job.directory / "prepared").touch()
    # Long before the half hour of a barrier.
    assert job.wait_for_end() == 1

    assert (job.log(0), job.log(1)) == ("passed once\n", "passed once\n")
    assert (
        "ddpcore.errors.BarrierDeadlockError: barrier 'epoch' can never be passed: rank 1 has ended after 1 call of "
        f"barrier 'epoch' (the last at {line_of('FIRST CALL')} in main); "
        f"rank 0 waits in its 2nd call of barrier 'epoch' at {line_of('SECOND CALL')} in main"
    ) in job.log(0, "stderr")
