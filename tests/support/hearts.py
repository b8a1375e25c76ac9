"""What a rank of a test knows of its own heart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.barriers.gate_session import current_session

if TYPE_CHECKING:
    from ddpcore.barriers.heart import Heart


def own_heart() -> Heart:
    """Return the heart of this rank, which has come to a gate.

    Before it has beaten once, `cpu_s` is 0, and nobody could say this rank's fate. A test waits for that in a line of
    its own: the beat tells where the rank is.
    """
    session = current_session()
    assert session is not None
    return session.heart
