"""What a Slurm allocation says of itself to what runs in it. Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_NODES_VARIABLE = "SLURM_JOB_NUM_NODES"
MAX_NUMBER = 10**6


def expected_nodes(environ: Mapping[str, str]) -> int:
    """Return of how many nodes an allocation is; 0 where there is none."""
    text = environ.get(NUM_NODES_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) <= MAX_NUMBER else 0
