"""What a person may choose about any session over live agents."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - msgspec looks at it

import msgspec

from app.diagnosis.rank_facts import Thresholds
from app.session.audit import AuditLog


class SessionOptions(msgspec.Struct, frozen=True):
    """How a session looks on, and what it keeps."""

    evidence_dir: Path | None = None
    """Keep evidence of each incident there; None keeps none."""
    recording: Path | None = None
    """Record all that is heard into this file; None records nothing."""
    is_read_only: bool = False
    """Let nothing be done to a job from here."""
    thresholds: Thresholds = Thresholds()
    """From when on something is wrong."""
    audit: AuditLog = msgspec.field(default_factory=lambda: AuditLog(None))
    """Where what is done to jobs is written down; by default nowhere."""
