"""Options of any session over live agents."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - msgspec looks at it

import msgspec

from app.diagnosis.rank_facts import Thresholds
from app.session.audit import AuditLog


class SessionOptions(msgspec.Struct, frozen=True):
    """What a session watches for, and what it keeps."""

    evidence_dir: Path | None = None
    """Directory for evidence of each incident; None keeps none."""
    recording: Path | None = None
    """File that records everything received; None records nothing."""
    is_read_only: bool = False
    """Forbids all actions on jobs from here."""
    thresholds: Thresholds = Thresholds()
    """Limits at which diagnosis reports a problem."""
    audit: AuditLog = msgspec.field(default_factory=lambda: AuditLog(None))
    """Log of actions on jobs; by default none."""
