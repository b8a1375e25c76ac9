"""What a rank of a test knows of its own heart."""

from __future__ import annotations

from ddpcore.barriers.gate_session import current_session
from tests.support.waiting import until

FIRST_BEAT_S = 30.0


def wait_until_told_of() -> None:
    """Return once the others can know of this rank, which has come to a gate: before that nobody could say its fate."""
    session = current_session()
    assert session is not None
    until(lambda: session.heart.cpu_s > 0.0, FIRST_BEAT_S, "the heart has beaten")
