"""Sends and receives of real gloo ranks: counted, matched, and seen while a rank waits in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcore.wire import PeerCall
from tests.support.ranks import RealRanks

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "peers.py"
LINE = next(number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("FOR A PEER"))


def test_calls_of_two_ranks_have_the_same_numbers_and_a_wait_for_one_names_its_peer_and_tag() -> None:
    with RealRanks([PROGRAM], 2) as job:
        reports = job.wait_until(
            lambda reports: all(report.peer_wait is not None and report.stood_s > 0 for report in reports.values()),
            "both wait for each other",
        )

    awaited = {rank: report.peer_wait.calls for rank, report in reports.items() if report.peer_wait is not None}
    # Rank 0 has received five times from rank 1 without a tag, which is tag 0: this is the sixth.
    assert awaited == {0: [PeerCall("recv", 1, tag=0, number=6)], 1: [PeerCall("recv", 0, tag=1, number=1)]}
    assert [report.place.line for report in reports.values() if report.place is not None] == [LINE, LINE]
    first, second = (
        {(call.op, call.peer, call.tag): call.number for call in reports[rank].peer_calls} for rank in (0, 1)
    )
    assert first == {("send", 1, 0): 5, ("recv", 1, 0): 6, ("send", 1, 3): 5, ("recv", 1, 3): 5}
    assert {call.num_bytes for call in reports[0].peer_calls} == {(40, 40, 40, 40)}
    of_any = {("recv", None, 0): 5}
    assert second == of_any | {("send", 0, 0): 5, ("send", 0, 3): 5, ("recv", 0, 3): 5, ("recv", 0, 1): 1}
