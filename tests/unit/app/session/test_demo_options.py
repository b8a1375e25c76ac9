"""What a person may ask of the demo."""

from __future__ import annotations

import pytest

from app.errors import ExitCode, UsageError
from app.session.demo import DemoOptions, check_options
from app.view.actions import parse_fault
from ddpcore.wire import Fault, FaultKind


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("freeze:2@10", Fault(FaultKind.FREEZE, 2, 10)),
        ("kill:0@1", Fault(FaultKind.KILL, 0, 1)),
        ("slow:3", Fault(FaultKind.SLOW, 3, 10)),
        ("skip-barrier:1@30", Fault(FaultKind.SKIP_BARRIER, 1, 30)),
    ],
)
def test_a_fault_is_kind_rank_and_step(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text", ["", "freeze", "freeze:", "freeze:x@1", "freeze:1@", "thaw:1@2", "freeze:-1@2", "a:1@2 "]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault(text)

    assert caught.value.exit_code == ExitCode.USAGE
    assert "freeze" in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("at_step", [1, 200])
def test_a_fault_within_the_run_is_taken(at_step: int) -> None:
    check_options(DemoOptions(steps=200, fault=Fault(FaultKind.KILL, 3, at_step)))


@pytest.mark.parametrize(("rank", "at_step"), [(4, 10), (0, 0), (0, 201)])
def test_a_fault_outside_the_run_is_refused(rank: int, at_step: int) -> None:
    with pytest.raises(UsageError):
        check_options(DemoOptions(steps=200, fault=Fault(FaultKind.KILL, rank, at_step)))
