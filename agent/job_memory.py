"""What a job remembers: for an agent after this one, and of its ranks."""

from __future__ import annotations

import msgspec

from agent.root_cause import Failure  # noqa: TC001 - msgspec looks at it
from agent.wire.jobs import JobSpec, JobState  # noqa: TC001 - as above


class JobMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job must not forget when its agent is killed. Times are of the machine's monotonic clock."""

    spec: JobSpec
    """Of the current attempt."""
    state: JobState
    since_s: float
    exit_code: int | None = None
    cause: str = ""
    failure: Failure | None = None
    num_restarts: int = 0
    kill_at_s: float | None = None
    terminate_at_s: float | None = None
    begin_again_at_s: float | None = None

    def of_another_boot(self, now_s: float) -> JobMemory:
        """Return it with times that the clock of this boot can be compared with: all of them are now."""
        return msgspec.structs.replace(
            self,
            since_s=now_s,
            failure=None if self.failure is None else msgspec.structs.replace(self.failure, at_s=now_s),
            kill_at_s=None if self.kill_at_s is None else now_s,
            terminate_at_s=None if self.terminate_at_s is None else now_s,
            begin_again_at_s=None if self.begin_again_at_s is None else now_s,
        )


class WorkerMemory(msgspec.Struct):
    """What the lifecycle needs to know of a rank's process."""

    has_exited: bool = False
    has_failed: bool = False
