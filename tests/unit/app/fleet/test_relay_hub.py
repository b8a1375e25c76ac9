"""What a console makes of what a relay says, whoever that is."""

from __future__ import annotations

import pytest

from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.relay import (
    MAX_MERGED_BYTES,
    MAX_NODES,
    Merged,
    Roster,
    RosterEntry,
    decode_merged,
    decode_roster,
    encode_merged,
    known_node,
)
from app.errors import AllocationEndedError, AppError, HostKeyError, HostUnreachableError, LoginRefusedError
from app.fleet.local_link import LocalLink
from app.fleet.relay_hub import RelayHub, natural


def test_nodes_are_in_the_order_of_their_numbers() -> None:
    names = ["gpu10", "gpu2", "gpu2-b", "a", "gpu", "gpu9"]

    assert sorted(names, key=natural) == ["a", "gpu", "gpu2", "gpu2-b", "gpu9", "gpu10"]


def test_a_relay_of_another_version_is_told_from_one_that_talks_nonsense() -> None:
    with pytest.raises(IncompatibleWireError):
        decode_merged(encode_merged(Merged("r", 0, version=99)))
    with pytest.raises(IncompatibleWireError):
        decode_roster(b'{"relay":"r","dir":"/d","num_expected":0,"num_here":0,"nodes":[],"version":99}')
    for nonsense in (b"", b"\xc1", b"x" * (MAX_MERGED_BYTES + 1)):
        with pytest.raises(MalformedMessageError):
            decode_merged(nonsense)
    with pytest.raises(MalformedMessageError):
        decode_roster(b"{}")


def test_a_place_that_is_no_object_is_none() -> None:
    for place in (b"", b"[]", b"{", b'{"a":\xff}'):
        with pytest.raises(MalformedMessageError):
            known_node(RosterEntry("a", is_here=True, place=place))
    assert known_node(RosterEntry("a", is_here=False, silent_ms=1500, place=b"{}")).silent_s == 1.5
    assert decode_roster(b'{"relay":"r","dir":"/d","num_expected":2,"num_here":1,"nodes":[]}') == Roster(
        "r", "/d", 2, 1, []
    )


def test_of_nodes_without_end_no_more_are_known_than_a_relay_may_have_and_those_that_are_followed_stay() -> None:
    hub = RelayHub(LocalLink())
    hub.follow("gone-0", lambda frame, age_s=0.0: None)  # noqa: ARG005 - by their names

    for prefix, is_here in (("gone", False), ("here", True), ("more", True)):
        entries = [RosterEntry(f"{prefix}-{number}", is_here=is_here) for number in range(MAX_NODES // 2 + 1)]
        hub._take(Merged("r", 0, nodes=entries), 0.0)

    assert len(hub.nodes) == MAX_NODES
    assert [node for node in hub.nodes if node.startswith("gone")] == ["gone-0"]


class NoWay(LocalLink):
    """A way to a relay's machine that ends with an error."""

    def __init__(self, error: AppError) -> None:
        super().__init__()
        self.error = error

    def connect(self) -> None:
        raise self.error

    def go_again(self, *, asks: bool = False) -> None:  # noqa: ARG002 - nothing is asked here
        raise self.error


ENDED = AllocationEndedError("h1", "Slurm job 7 has ended: TIMEOUT")


@pytest.mark.parametrize("kind", [HostUnreachableError, LoginRefusedError, HostKeyError])
@pytest.mark.parametrize("why", [ENDED, None])
def test_who_cannot_even_get_to_the_relay_s_machine_reads_why_it_is_gone(
    kind: type[HostUnreachableError], why: AppError | None
) -> None:
    met = kind("h1", "it does not let us in")
    hub = RelayHub(NoWay(met), why_gone=lambda: why)

    for go in (hub.connect, hub.reconnect):
        with pytest.raises(HostUnreachableError) as caught:
            go()
        assert caught.value is (met if why is None or kind is HostKeyError else why)
