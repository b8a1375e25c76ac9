"""The log of what commands do to jobs and agents: see `app.audit_log`."""

from __future__ import annotations

from app.audit_log import AuditLog, default_path
from app.headless import print_line


def audit_log() -> AuditLog:
    """Return this user's."""
    return AuditLog(default_path())


def tell_trouble(audit: AuditLog) -> None:
    """Say why nothing is written down, if it is so."""
    for notice in audit.drain_notices():
        print_line(f"rankdeck: {notice}")
