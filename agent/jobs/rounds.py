"""Reads what torchrun, through our plug-in, has decided when it gathered the nodes of an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.jobs.job_memory import Round
from ddpcore.wire import ROUND_FILE

if TYPE_CHECKING:
    from pathlib import Path

MAX_ROUND_BYTES = 1024


def read_round(job_dir: Path) -> Round | None:
    """Return the newest round of a launcher that was started in `job_dir`; None before the first."""
    try:
        with (job_dir / ROUND_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_ROUND_BYTES), type=Round)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
