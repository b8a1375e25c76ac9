"""The names that gates have in the job's store, and what stands there.

Pure. A gate is one passage: the n-th call of a label. `|go` is set once when it is decided: its value says how.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.barriers.whereabouts import GateKind

MAX_LABEL_IN_KEY = 200
"""Longer labels stand there as their hash: torch 2.13's TCPStore closes the connection on a key of over 8 KiB."""

MAX_RESULT_BYTES = 4 << 20
"""Of all texts of an exchange together: over 8 MiB in one value TCPStore closes the connection."""


class Reason(StrEnum):
    """Why nobody passes a gate."""

    NEVER = "never"
    """Some ranks can never come."""
    RAISED = "raised"
    """The rank that went first has raised."""
    DIED = "died"
    """The rank that goes first has ended, or never comes."""
    TOO_LARGE = "too large"
    """The texts of an exchange do not fit into the store."""


class GateResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a gate was decided: passed, with the ranks' texts; or not, with a reason."""

    values: list[str] = []
    reason: Reason | None = None
    text: str = ""
    missing: list[int] = []
    """Ranks that have not come."""
    ended: list[int] = []
    """Those of them that have died, or left."""
    trace: str = ""
    """The traceback of the rank that went first."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(GateResult)
PASSED = GateResult()


def gate_key(kind: GateKind, scope: str, label: str) -> tuple[str, str]:
    """Return what stands before and after its number in the start of all keys of a gate.

    Args:
        kind: What it is.
        scope: Whose: the name of a node, or empty for the whole job.
        label: As `journal.told_label` returns it.
    """
    if not label.isascii() or len(label) > MAX_LABEL_IN_KEY:
        digest = sha256(label.encode()).hexdigest()
        label = f"{label[:32]!a}~{digest[:24]}"
    return f"rankdeck/{kind}/{scope}/", f"/{label}"


def go_key(gate: str) -> str:
    """Return the key whose existence says that a gate is decided."""
    return f"{gate}|go"


def value_key(gate: str, rank: int) -> str:
    """Return the key of a rank's text."""
    return f"{gate}|value {rank}"


def readers_key(gate: str) -> str:
    """Return the key of the counter of those who have read a first-block's end."""
    return f"{gate}|readers"


def beat_key(rank: int) -> str:
    """Return the key of a rank's last beat."""
    return f"rankdeck/beat/{rank}"


def gone_key(rank: int) -> str:
    """Return the key that a neighbour sets when a rank's process has ended without a word."""
    return f"rankdeck/gone/{rank}"


def failure_key(session: int) -> str:
    """Return the key of the first rank's failure in the n-th process group of a store."""
    return f"rankdeck/failure/{session}"


def passed_with(values: Sequence[str]) -> str:
    """Return the text of a passed gate; an exchange too large for the store is not passed."""
    text = _encoder.encode(GateResult(values=list(values)))
    if len(text) <= MAX_RESULT_BYTES:
        return text.decode()
    largest = max(range(len(values)), key=lambda rank: len(values[rank]))
    words = (
        f"the ranks' texts have {len(text):,} bytes together, at most {MAX_RESULT_BYTES:,} can be exchanged; "
        f"the largest, of rank {largest}, has {len(values[largest]):,} characters"
    )
    return encode_result(GateResult(reason=Reason.TOO_LARGE, text=words))


def encode_result(result: GateResult) -> str:
    """Return a result as the store keeps it."""
    return _encoder.encode(result).decode()


def decode_result(text: str | bytes) -> GateResult:
    """Return the result that stands at a gate; nothing is passed."""
    return _decoder.decode(text) if text else PASSED
