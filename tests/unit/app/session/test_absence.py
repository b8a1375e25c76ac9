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
from app.model.absence import Lack
from app.session.reconnector import absence_of


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (NoAgentError("h1", "none serves there"), Lack.AGENT),
        (AgentUnreachableError("h1", "/nfs/python does not run there"), Lack.ANSWER),
        (IncompatibleAgentError("h1", "it speaks wire version 1"), Lack.FITTING_AGENT),
        (HostUnreachableError("h1", "it does not answer in time"), Lack.CONNECTION),
        (HostKeyError("h1", "its key has changed", "ask who keeps it"), Lack.CONNECTION),
    ],
)
def test_an_agent_is_lacking_only_where_it_is_known_that_none_serves(error: AppError, lack: Lack) -> None:
    absence = absence_of(error, "h1")

    assert absence.lack is lack
    assert str(error).rpartition(": ")[2] in absence.why
