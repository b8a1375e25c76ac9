"""Whom a rank that stands in a send or a receive waits for."""

from __future__ import annotations

import pytest

from app.diagnosis.causes import Cause
from ddpcore.wire import PeerCall, PeerWait
from tests.unit.app.diagnosis.test_diagnosis import Watched, causes


@pytest.mark.parametrize(
    ("received", "stands_there", "missing"),
    [
        ([(None, 10)], False, [0]),
        ([(None, 11)], False, [0]),
        ([(None, 11)], True, []),
        ([(None, 12)], False, []),
        ([(1, 6), (None, 5)], False, []),
        ([(1, 5), (2, 6)], False, [0]),
    ],
    ids=["of neither", "of one of the two", "of whichever comes", "of both", "its own", "the other's"],
)
def test_a_send_is_met_by_a_receive_from_any_rank_only_where_no_send_is_left_over(
    received: list[tuple[int | None, int]], stands_there: bool, missing: list[int]
) -> None:
    """Ranks 1 and 2 stand in their sixth send to rank 0."""
    watched = Watched()
    halves = [PeerCall("recv", peer, number=number, num_bytes=(8,)) for peer, number in received]
    here = PeerCall("recv", None, number=received[0][1])
    hub = watched.tick(0, peer_calls=halves, peer_wait=PeerWait([here], 5.0) if stands_there else None)
    senders = []
    for rank in (1, 2):
        call = PeerCall("send", 0, number=6)
        senders.append(watched.tick(rank, peer_calls=[call], peer_wait=PeerWait([call], waiting_s=5.0)))

    waits = {int(wait.waiting[0]): wait for wait in watched.receive(hub, *senders, watched.tick(3)).waits}

    assert (waits[1].missing.tolist(), waits[1].is_settled) == (missing, True)


def test_of_more_receives_than_are_followed_no_rank_that_stands_in_one_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank receives from the next one, rank 1 from none, which stands in its own code."""
    for module in ("waits", "point_to_point"):
        monkeypatch.setattr(f"app.diagnosis.{module}.MAX_PEER_WAITS", 3)
    watched = Watched(num_nodes=4)
    calls = [PeerCall("recv", (rank + 1) % 8, number=3) for rank in range(8)]
    waits = [None if rank == 1 else PeerWait([calls[rank]], 20.0) for rank in range(8)]

    found = watched.receive(
        *(watched.tick(rank, peer_calls=[calls[rank]], peer_wait=waits[rank], stood_s=20.0) for rank in range(8))
    )

    assert causes(found) == {(Cause.STRAGGLER, (1,))}
