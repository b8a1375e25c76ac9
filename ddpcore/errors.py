"""What can go wrong in a rank, by who must act.

DdpcoreError
|-- NotLaunchedError        the user: started without torchrun's variables
|-- ContradictoryLaunchError  the user: numbers, addresses, devices or ranks that cannot all be true
|-- GroupOpenError          the user: a process group is open already
|-- BackendMissingError     the user: a backend or a device that this torch or this machine does not have
|-- TorchFaultError         the user: a torch version with a known fault in DDP
|-- InterfaceError          the user: a network interface that this machine does not have
|-- PortInUseError          the user: another process listens where rank 0 should
|-- StaleRendezvousError    the user: the rendezvous file of an earlier run
|-- UnequalRanksError       the user: ranks that run different code, versions or settings
|-- UnknownPhaseError       the user: a phase that is not one of `ddpcore.wire.Phase`
|-- ArgumentError           the user: an argument of a wrong type or value, where no other kind below fits
|-- CadenceError            the user: "100 steps", "2 epochs", "10 min" are cadences, this text is not
|-- EngineUseError          the user: parts of the engine called in an order that makes no sense
|-- CheckpointContentError  the user: a whole checkpoint, but what it holds does not fit this program
|-- MetricMismatchError     the user: ranks that log different metrics
|-- WrapError               the user: a model or an argument that cannot be made data parallel
|-- ModelMismatchError      the user: ranks that have built different models
|-- UnsplittableBatchError  the user: a batch whose parts disagree on how many samples they hold
|-- SamplerArgumentError    the user: a data set, seed, rank, batch or share that no sampler can be made of
|-- SamplerStateError       the user: a sampler state of another data set, seed, order or version, or no state at all
|-- SamplerUseError         the user: steps finished that were never taken, or an epoch read without finishing any
|-- SamplerMismatchError    the user: ranks whose samplers would not cut up the same epoch
|-- CheckpointError         its kind shows who must act:
|   |-- StateNotStorableError     the user: something in the state that a checkpoint cannot hold, with its place
|   |-- CheckpointMismatchError   the user: a checkpoint of another model
|   |-- CheckpointCallError       the user: save or load not called by every rank, or not alike
|   |-- CheckpointDirectoryError  the user: a directory that cannot be used, or belongs to another run
|   |-- CheckpointWriteError      the operator: a checkpoint could not be written; those before it are untouched
|   `-- CheckpointInvalidError    the operator: a checkpoint that is damaged, half there, or not there
|-- BarrierUseError         the user: a barrier in a block that one rank runs alone, in a forked child, or without time
|-- MasterUnreachableError  a peer: nobody answers where rank 0 should
|-- RanksMissingError       a peer: ranks that did not come to the opening of the process group
|-- BarrierTimeoutError     a peer: ranks that did not reach a named barrier
|   `-- BarrierDeadlockError    a peer: ranks that can never reach it, raised at once
|-- MasterFailedError       a peer: the rank that goes first has raised, or died
|-- RankFailedError         a peer: a rank that has raised, died or left in the middle of the others' work
`-- StoreLostError          a peer: the job's store is gone, and with it the job
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.agreement import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence


class DdpcoreError(Exception):
    """The root of this package's errors."""


class NotLaunchedError(DdpcoreError):
    """The program needs the variables that torchrun sets, and one is absent or makes no sense."""


class ContradictoryLaunchError(DdpcoreError, ValueError):
    """What the ranks were launched with contradicts itself; every rank that is there raises it."""


class GroupOpenError(DdpcoreError, RuntimeError):
    """A process group is open in this process already."""


class BackendMissingError(DdpcoreError):
    """The backend or device asked for does not exist here; the message names what is missing."""


class TorchFaultError(DdpcoreError):
    """This torch version has a known fault that makes data-parallel training wrong."""


class InterfaceError(DdpcoreError, ValueError):
    """A network interface named in the environment does not exist on this machine."""


class PortInUseError(DdpcoreError):
    """Rank 0 cannot listen on its port, since another process does."""


class StaleRendezvousError(DdpcoreError):
    """The rendezvous file is an earlier run's, or none at all."""


class UnequalRanksError(DdpcoreError):
    """Ranks differ in what must be the same everywhere; raised on every rank alike.

    Attributes:
        differences: One sentence each.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = list(differences)
        super().__init__(message)


class MasterUnreachableError(DdpcoreError):
    """The store that the ranks should meet in was not reached in time, or is gone before they have met."""


class RanksMissingError(DdpcoreError):
    """Some ranks did not come to the opening of the process group; raised on every rank that did.

    Attributes:
        missing: Sorted global ranks.
        timeout_s: How long the rank that gave up first had waited.
    """

    def __init__(self, message: str, missing: Sequence[int], timeout_s: float) -> None:
        self.missing = list(missing)
        self.timeout_s = timeout_s
        super().__init__(message)


class UnknownPhaseError(DdpcoreError, ValueError):
    """The program named a phase that does not exist."""


class BarrierUseError(DdpcoreError, ValueError):
    """A barrier cannot be passed here: the other ranks do not come to this place, or the call makes no sense."""


class BarrierTimeoutError(DdpcoreError):
    """Some ranks did not reach a named barrier in time.

    Attributes:
        label: The barrier's name.
        missing: Sorted global ranks that had not arrived when the time was over.
        ended: Those of them that are known to have died, or to have left the process group.
        timeout_s: How long this rank has waited.
    """

    def __init__(
        self,
        label: str,
        missing: Sequence[int],
        timeout_s: float,
        details: str = "",
        *,
        did_not: str = "reach barrier",
    ) -> None:
        self.label = label
        self.missing = list(missing)
        self.ended: list[int] = []
        self.timeout_s = timeout_s
        who = ranks_text(self.missing)
        advice = "look at what they do there, or give the barrier a longer timeout_s"
        super().__init__(f"{who} did not {did_not} {label!r} in {timeout_s:g} s: {details or advice}")


class BarrierDeadlockError(BarrierTimeoutError):
    """Some ranks can never reach a named barrier: they have ended, or wait elsewhere for this one.

    A certain time-out, raised at once. Attributes as of `BarrierTimeoutError`, of the ranks that can never
    come.
    """

    def __init__(self, label: str, missing: Sequence[int], waited_s: float, why: str) -> None:
        super().__init__(label, missing, waited_s)
        self.args = (why,)


class MasterFailedError(DdpcoreError):
    """The rank that goes first has raised in its block, or has died.

    Attributes:
        label: The block's name.
        rank: The rank that goes first.
        trace: Its traceback as text, or "" where it died; also a note of this error, so that Python shows it.
    """

    def __init__(self, label: str, rank: int, why: str, trace: str = "") -> None:
        self.label = label
        self.rank = rank
        self.trace = trace
        super().__init__(why)
        if trace:
            self.add_note(f"on rank {rank}:\n{trace.rstrip()}")


class RankFailedError(DdpcoreError):
    """A collective has failed since another rank has raised, died or left; torch's own error is its `__cause__`.

    Attributes:
        rank: The first one that has failed.
        trace: Its traceback as text, or "" where there is none; also a note of this error, so that Python shows it.
    """

    def __init__(self, rank: int, why: str, trace: str = "") -> None:
        self.rank = rank
        self.trace = trace
        super().__init__(why)
        if trace:
            self.add_note(f"on rank {rank}:\n{trace.rstrip()}")


class StoreLostError(DdpcoreError):
    """The store that the ranks meet in does not answer: its host (torchrun on the first node) has ended."""


class ArgumentError(DdpcoreError, ValueError):
    """An argument has a type or a value that makes no sense."""


class CadenceError(DdpcoreError, ValueError):
    """A text for how often, or until when, is in no known form."""


class EngineUseError(DdpcoreError):
    """The engine was asked for something before, or without, what it needs for it."""


class MetricMismatchError(DdpcoreError):
    """The ranks have logged different metrics, so that no mean over them exists."""


class UnsplittableBatchError(DdpcoreError, ValueError):
    """A batch cannot be cut into parts: its tensors disagree on the number of samples, or have none."""


class SamplerArgumentError(DdpcoreError, ValueError):
    """No sampler can be made of these arguments."""


class SamplerIndexError(SamplerArgumentError, IndexError):
    """A position or a sample's number is outside of the epoch or the data set."""


class SamplerStateError(DdpcoreError, ValueError):
    """A saved sampler state does not belong to this sampler, or is none; the sampler is as it was."""


class SamplerUseError(DdpcoreError, RuntimeError):
    """The loop around a sampler has lost track of its steps."""


class SamplerMismatchError(DdpcoreError):
    """Ranks would train on different data sets, seeds or places of the epoch; raised on every rank alike."""


class WrapError(DdpcoreError, ValueError):
    """A model cannot be made data parallel as asked: its device, its parameters, or an argument."""


class ModelMismatchError(DdpcoreError):
    """The ranks are about to train different models, or one model with different settings, as one."""


class CheckpointError(DdpcoreError):
    """The root of what can go wrong with checkpoints."""


class StateNotStorableError(CheckpointError, TypeError):
    """The state holds something that a checkpoint cannot hold.

    Attributes:
        path: Where in the state, as an expression: `state['optimizer'][0]`.
    """

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


class CheckpointContentError(CheckpointError):
    """A checkpoint is whole, but holds what this program did not write, or could not have."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the objects it should be loaded into; nothing has been loaded.

    Attributes:
        differences: One sentence each.
    """

    MAX_SHOWN = 8

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = list(differences)
        shown = [*self.differences[: self.MAX_SHOWN]]
        if len(self.differences) > self.MAX_SHOWN:
            shown.append(f"and {len(self.differences) - self.MAX_SHOWN} more")
        super().__init__(
            "the checkpoint is of another model, nothing has been loaded: "
            + "; ".join(shown)
            + ". Build the model as it was saved, or give another checkpoint directory"
        )


class CheckpointCallError(CheckpointError):
    """Checkpoints are every rank's work, and some ranks did not come, or came with something else.

    Attributes:
        missing: Sorted global ranks that did not come; empty when all came, but with different calls.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = list(missing)
        super().__init__(message)


class CheckpointDirectoryError(CheckpointError):
    """The checkpoint directory cannot be used: not a directory, not writable, gone, or another run's."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written. Those before it are untouched; raised once, on every rank.

    Attributes:
        step: The step that is not saved.
    """

    def __init__(self, step: int, reasons: Sequence[str]) -> None:
        self.step = step
        super().__init__(
            f"step {step} is not saved: {'; '.join(reasons)}. The checkpoints before it are untouched; "
            "mend the cause and save again"
        )


class CheckpointInvalidError(CheckpointError):
    """A checkpoint is damaged, half there, or not there at all.

    Attributes:
        reasons: What is wrong, one sentence for each checkpoint looked at.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = list(reasons)
        super().__init__(message)
