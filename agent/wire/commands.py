"""What an agent is asked: one JSON line each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.codec import decode_line
from agent.wire.fields import JobId, Port
from agent.wire.jobs import JobSpec, LocalWorldSize
from agent.wire.logs import PullLogs, ReadLog
from agent.wire.stacks import GetStacks
from ddpcore.wire import (
    DEFAULT_HOLD_S,
    DEFAULT_SLOW_FACTOR,
    Count,
    Fault,
    FaultKind,
    HoldSeconds,
    Name,
    Rank,
    Seconds,
    SlowFactor,
)


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Take control: commands of an older generation are refused from now on."""

    generation: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Above that of every node's `control`; the same on all nodes of a cluster."""
    holder: Name
    """Who claims it, for people: `user@host, console 1234`."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True, omit_defaults=True):
    """Check and reserve; nothing runs yet. Asked twice for the same it changes nothing."""

    spec: JobSpec
    generation: Count = 0
    """Here and below: of the console's claim; 0 is a command by hand, which always counts."""


class PrepareAgain(msgspec.Struct, frozen=True, tag="prepare_again", forbid_unknown_fields=True, omit_defaults=True):
    """Prepare the next attempt of a job that has ended, of what the node keeps of it: also what no console is shown.

    Its program, environment and limits stay; faults were for the attempt that they came with. Else as `Prepare`.
    """

    job_id: JobId
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Above that of the one that has ended; the same on all nodes."""
    first_rank: Rank
    """This and the next two as in `JobSpec`."""
    local_world_size: LocalWorldSize
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    master_port: Port | None = None
    """None is as the job was first asked for; so below."""
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """This and the next two when it goes on with other nodes than before."""
    node_rank: Rank | None = None
    master_addr: Name | None = None
    generation: Count = 0


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True, omit_defaults=True):
    """Start a prepared job. Asked twice it changes nothing."""

    job_id: JobId
    generation: Count = 0


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Forget a prepared job; of an attempt that follows another one, that one is what the node knows again."""

    job_id: JobId
    generation: Count = 0


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True, omit_defaults=True):
    """End a job in an orderly way. Asked twice it changes nothing.

    Ranks that can are asked to finish a step and write a checkpoint, and have the job's `save_s` for it. Then, or at
    once: SIGTERM, a grace period, SIGKILL for the whole tree.
    """

    job_id: JobId
    is_agreed: bool = True
    """False does not wait for an agreed step, also of a stop that is under way."""
    generation: Count = 0


class Kill(msgspec.Struct, frozen=True, tag="kill", forbid_unknown_fields=True, omit_defaults=True):
    """SIGKILL for the whole tree."""

    job_id: JobId
    generation: Count = 0


class InjectFault(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True, omit_defaults=True):
    """Do harm to one rank of this node: `ddpcore.wire.Fault` says what the fields are.

    Without a step signals act at once, and what only the rank's own main thread can do at its next step.
    """

    job_id: JobId
    kind: FaultKind
    rank: Rank
    factor: SlowFactor = DEFAULT_SLOW_FACTOR
    at_step: Count | None = None
    duration_s: HoldSeconds = DEFAULT_HOLD_S
    generation: Count = 0

    @property
    def fault(self) -> Fault:
        """What is to be done."""
        return Fault(self.kind, self.rank, self.at_step, self.factor, self.duration_s)


class Tier(StrEnum):
    """How closely a node keeps the past."""

    RECENT = "recent"
    """Every regular report of the last ten minutes."""
    DAY = "day"
    """One in ten seconds of the last day."""


class PullHistory(msgspec.Struct, frozen=True, tag="history", forbid_unknown_fields=True, omit_defaults=True):
    """Ask for reports of the past after `since_seq`, oldest first, as many as fit into a reply."""

    tier: Tier = Tier.RECENT
    since_seq: Count = 0
    max_age_s: Seconds | None = None
    """None is as old as there are."""
    period_s: Seconds = 0.0
    """Of each so many seconds by the node's clock only the first report; 0 is every one."""
    is_packed: bool = False
    """Wants a `PackedHistory`, of which a reply holds more."""


class GetStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Ask for a fresh NodeReport."""


class ShowJob(msgspec.Struct, frozen=True, tag="show", forbid_unknown_fields=True):
    """Ask what a job is made of."""

    job_id: JobId


class FindLeftovers(msgspec.Struct, frozen=True, tag="leftovers", forbid_unknown_fields=True):
    """Ask for what earlier runs of this user have left on the node."""


class CleanLeftovers(msgspec.Struct, frozen=True, tag="clean", forbid_unknown_fields=True, omit_defaults=True):
    """End leftover processes, remove leftover shared memory; the reply holds what was cleaned."""

    names: list[Name] = []
    """Of `Leftover`; none means all of rankdeck's own."""
    is_confirmed: bool = False
    """True to clean also what rankdeck has not started, as far as it is named."""
    generation: Count = 0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True, omit_defaults=True):
    """End the agent. Its jobs go on without it, until another agent in the same directory takes them up."""

    kill_jobs: bool = False
    """Kill them instead; a private agent always does."""
    generation: Count = 0


Command = (
    Claim
    | Prepare
    | PrepareAgain
    | Commit
    | Abort
    | Stop
    | Kill
    | InjectFault
    | PullLogs
    | ReadLog
    | PullHistory
    | GetStatus
    | ShowJob
    | GetStacks
    | FindLeftovers
    | CleanLeftovers
    | Shutdown
)


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode_command(command: Command) -> bytes:
    """Return one line, its newline included."""
    return _encoder.encode(command) + b"\n"


def decode_command(line: bytes) -> Command:
    """Return the command in a line.

    Raises:
        MalformedMessageError: The line is too long or not a command.
    """
    return decode_line(_decoder, line, "a command")
