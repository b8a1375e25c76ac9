"""Until when a job may run: what its scheduler says."""

from __future__ import annotations

import os
import time

DEADLINE_VARIABLE = "SLURM_JOB_END_TIME"
"""Unix time at which Slurm ends the job.

Source: https://slurm.schedmd.com/sbatch.html, output environment variables.
"""

DEADLINE_MARGIN_S = 120.0
"""Before it, for the last steps and the last checkpoint."""


def monotonic_deadline_s(deadline: float | None) -> float | None:
    """Return when training should stop, on the monotonic clock; None for no such time.

    Args:
        deadline: Unix time in seconds; None asks Slurm's variable.
    """
    if deadline is None:
        end = os.environ.get(DEADLINE_VARIABLE, "")
        if not end.isdigit():
            return None
        deadline = int(end) - DEADLINE_MARGIN_S
    return time.monotonic() + deadline - time.time()  # noqa: TID251 - a scheduler's deadline is wall time
