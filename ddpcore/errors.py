"""What can go wrong in a rank, by who must act.

DdpcoreError
|-- NotLaunchedError        the user: started without torchrun's variables
|-- UnknownPhaseError       the user: a phase that is not one of `ddpcore.wire.Phase`
|-- BarrierTimeoutError     a peer: ranks that did not reach a named barrier
`-- StoreLostError          a peer: the job's store is gone, and with it the job
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class DdpcoreError(Exception):
    """The root of this package's errors."""


class NotLaunchedError(DdpcoreError):
    """The program needs the variables that torchrun sets, and one is absent or makes no sense."""


class UnknownPhaseError(DdpcoreError, ValueError):
    """The program named a phase that does not exist."""


class BarrierTimeoutError(DdpcoreError):
    """Some ranks did not reach a named barrier in time.

    Attributes:
        label: The barrier's name.
        missing: Sorted global ranks that had not arrived when the time was over.
        timeout_s: How long this rank has waited.
    """

    def __init__(self, label: str, missing: Sequence[int], timeout_s: float) -> None:
        self.label = label
        self.missing = list(missing)
        self.timeout_s = timeout_s
        who = f"rank {self.missing[0]}" if len(self.missing) == 1 else f"ranks {self.missing}"
        super().__init__(
            f"{who} did not reach barrier {label!r} in {timeout_s:g} s: look at what they do there, "
            "or give the barrier a longer timeout_s"
        )


class StoreLostError(DdpcoreError):
    """The store that the ranks meet in does not answer: its host (torchrun on the first node) has ended."""
