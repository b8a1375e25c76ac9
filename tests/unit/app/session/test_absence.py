"""What is said to be lacking on the way to a node, by what was met there."""

from __future__ import annotations

import pytest

from app.errors import (
    AgentUnreachableError,
    AppError,
    HostKeyError,
    HostUnreachableError,
    IncompatibleAgentError,
    NoAgentError,
)
from app.model.unreachable_reason import UnreachableKind
from app.session.reconnector import unreachable_reason_of


@pytest.mark.parametrize(
    ("error", "unreachable_kind"),
    [
        (NoAgentError("h1", "nothing is known of jobs there"), UnreachableKind.AGENT),
        (AgentUnreachableError("h1", "/nfs/python does not run there"), UnreachableKind.ANSWER),
        (IncompatibleAgentError("h1", "it speaks wire version 1"), UnreachableKind.FITTING_AGENT),
        (HostUnreachableError("h1", "it does not answer in time"), UnreachableKind.CONNECTION),
        (HostKeyError("h1", "its key has changed", "ask who keeps it"), UnreachableKind.CONNECTION),
    ],
)
def test_an_agent_is_lacking_only_where_it_is_known_that_none_serves(
    error: AppError, unreachable_kind: UnreachableKind
) -> None:
    unreachable_reason = unreachable_reason_of(error, "h1")

    assert unreachable_reason.unreachable_kind is unreachable_kind
    assert str(error).rpartition(": ")[2] in unreachable_reason.why
