"""What the other ranks of a test know of this one."""

from __future__ import annotations

from ddpcore.barriers.arrivals import heartbeat_key
from ddpcore.barriers.open_session import current_session
from ddpcore.barriers.rank_status import decode_heartbeat


def told_function() -> str:
    """Return the function in which this rank stands as far as the others know, or "" while they know nothing of it.

    They hear of it when it opens the group, and every two seconds at most: of a rank that is killed or stopped they
    know where it stood at its last word.
    """
    session = current_session()
    assert session is not None
    store, key = session.connection().store, heartbeat_key(session.placement.rank)
    tick = decode_heartbeat(store.get(key)) if store.check([key]) else None
    return "" if tick is None or tick.place is None else tick.place.function
