from __future__ import annotations

import pytest

from agent.transport.control_lease import ControlLease, Holder
from agent.wire.commands import Commit, GetStatus, Kill, Prepare, PrepareAgain, RefusalReason, Shutdown, Stop
from agent.wire.logs import PullLogs
from tests.support.jobs import make_spec


def test_the_newest_claim_counts_and_an_older_one_is_refused_with_its_holder() -> None:
    lease = ControlLease(Holder(), 0.0)
    assert lease.report(1.0) is None
    assert lease.claim(1, "ann@laptop", 10.0) is None
    assert lease.claim(3, "bob@desk", 20.0) is None

    refused = lease.claim(2, "ann@laptop", 27.0)

    assert refused is not None
    assert refused.reason is RefusalReason.OLD_GENERATION
    assert "generation 2 is not above 3, under which bob@desk has held control for 7 s" in refused.message
    held = lease.report(25.0)
    assert held is not None
    assert (held.generation, held.holder, held.held_s) == (3, "bob@desk", 5.0)


def test_a_claim_asked_twice_changes_nothing_and_two_holders_never_share_a_generation() -> None:
    lease = ControlLease(Holder(), 0.0)
    assert lease.claim(1, "ann@laptop", 10.0) is None
    assert lease.claim(1, "ann@laptop", 90.0) is None
    held = lease.report(100.0)
    assert held is not None
    assert held.held_s == 90.0
    assert lease.claim(1, "bob@desk", 100.0) is not None


@pytest.mark.parametrize(
    "command",
    [
        Commit("train", 1),
        Stop("train", generation=1),
        Kill("train", 1),
        Prepare(make_spec(), 1),
        PrepareAgain("train", 1, 0, 2, 2, generation=1),
        Shutdown(generation=1),
    ],
)
def test_commands_of_an_older_generation_are_refused(
    command: Commit | Stop | Kill | Prepare | PrepareAgain | Shutdown,
) -> None:
    lease = ControlLease(Holder(1, "ann@laptop"), 0.0)
    assert lease.refusal(command, 1.0) is None
    lease.claim(2, "bob@desk", 1.0)

    refused = lease.refusal(command, 3.0)

    assert refused is not None
    assert "is of generation 1, bob@desk has held control for 2 s under generation 2" in refused.message


def test_looking_and_commands_by_hand_need_no_claim() -> None:
    lease = ControlLease(Holder(7, "bob@desk"), 0.0)
    for command in (GetStatus(), PullLogs(), Kill("train"), Shutdown()):
        assert lease.refusal(command, 1.0) is None


def test_a_generation_that_nobody_has_claimed_is_refused() -> None:
    refused = ControlLease(Holder(), 0.0).refusal(Kill("train", 4), 1.0)
    assert refused is not None
    assert "nobody holds control" in refused.message
