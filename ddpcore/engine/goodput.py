"""How much of the time was training: productive time over wall time, kept across attempts. Pure.

Productive is the time of steps whose result is part of the model as it is now. What a checkpoint does not hold is lost,
and so is its time: a resumed attempt goes on from the counts in the checkpoint, while wall time runs on from the first
attempt's beginning, downtime included.
"""

from __future__ import annotations

import msgspec

from ddpcore.errors import CheckpointContentError


class GoodputState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State in a checkpoint."""

    began_wall_time: float
    """Unix time in seconds at which the first attempt began."""
    productive_s: float
    num_attempts: int


class Goodput:
    """Counts productive time over attempts; this one begins at `wall_time`, Unix time in seconds."""

    def __init__(self, wall_time: float) -> None:
        self._state = GoodputState(began_wall_time=wall_time, productive_s=0.0, num_attempts=1)

    @property
    def productive_s(self) -> float:
        """Seconds of the steps that the present model is made of."""
        return self._state.productive_s

    @property
    def num_attempts(self) -> int:
        """Attempts so far, this one included."""
        return self._state.num_attempts

    def add_step(self, duration_s: float) -> None:
        self._state = msgspec.structs.replace(self._state, productive_s=self._state.productive_s + duration_s)

    def frac(self, wall_time: float) -> float:
        """Return productive time over the time since the first attempt began, 0 to 1.

        A clock that was set back between attempts cannot make it exceed 1.
        """
        wall_s = max(wall_time - self._state.began_wall_time, self._state.productive_s)
        return self._state.productive_s / wall_s if wall_s > 0 else 0.0

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = msgspec.to_builtins(self._state)
        return state

    def load_state_dict(self, state: object) -> None:
        """Continue from an earlier attempt's counts; raise CheckpointContentError for another state."""
        try:
            earlier = msgspec.convert(state, GoodputState)
        except msgspec.ValidationError as error:
            raise CheckpointContentError(f"the checkpoint's goodput makes no sense: {error}") from error
        self._state = msgspec.structs.replace(earlier, num_attempts=earlier.num_attempts + 1)
