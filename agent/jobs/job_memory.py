"""What a job remembers: for an agent after this one, and of its ranks."""

from __future__ import annotations

import msgspec

from agent.jobs.lifecycle import Round  # noqa: TC001 - msgspec looks at it
from agent.jobs.root_cause import Failure  # noqa: TC001 - msgspec looks at it
from agent.wire.jobs import JobSpec, JobState  # noqa: TC001 - as above


class JobMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job must not forget when its agent is killed. Times are of the machine's monotonic clock."""

    spec: JobSpec
    """Of the current attempt."""
    state: JobState
    since_s: float
    exit_code: int | None = None
    """Of the launcher, once the last attempt has ended."""
    cause: str = ""
    """The first thing that went wrong, as a sentence."""
    failure: Failure | None = None
    """The failure that the others followed from, as far as this node can tell."""
    num_restarts: int = 0
    kill_at_s: float | None = None
    """When patience ends: set while stopping, and after a rank has failed."""
    terminate_at_s: float | None = None
    """When patience with an agreed stop ends: set while there is one."""
    restart_at_s: float | None = msgspec.field(default=None, name="begin_again_at_s")
    """When the next attempt begins: set while restarting."""
    round: Round | None = None
    """Of an elastic job, once the launcher has gathered nodes."""
    is_abandoned: bool = False
    """The ranks are ended since they hang and nobody watches."""
    unprobed: str = ""
    """Why no rank has a probe, as it was when the launcher was started; empty where they should have one."""
    started_s: float | None = None
    """When the launcher of this attempt was started; None before, and after a reboot."""
    last_request_id: int = 0
    """Of requests to probes: ranks that outlive an agent have heard them."""

    def of_another_boot(self, now_s: float) -> JobMemory:
        """Return it with times that the clock of this boot can be compared with: all of them are now."""
        return msgspec.structs.replace(
            self,
            since_s=now_s,
            started_s=None,
            failure=None if self.failure is None else msgspec.structs.replace(self.failure, at_s=now_s),
            kill_at_s=None if self.kill_at_s is None else now_s,
            terminate_at_s=None if self.terminate_at_s is None else now_s,
            restart_at_s=None if self.restart_at_s is None else now_s,
        )


class WorkerMemory(msgspec.Struct):
    """What the lifecycle needs to know of a rank's process."""

    has_exited: bool = False
    has_failed: bool = False
