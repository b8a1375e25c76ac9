"""Reads what torchrun, through our plug-in, has decided when it gathered the nodes of an elastic job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from agent.jobs.job_memory import Round
from agent.regular_file import open_regular
from ddpcore.wire import DECODE_ERRORS, ROUND_FILE

if TYPE_CHECKING:
    from pathlib import Path

MAX_ROUND_BYTES = 1024


def read_round(job_dir: Path) -> Round | None:
    """Return the newest round of a launcher that was started in `job_dir`; None before the first.

    The file is as hostile as the job: a link, a pipe or nonsense is no round.
    """
    try:
        fd = open_regular(job_dir / ROUND_FILE)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(fd, MAX_ROUND_BYTES), type=Round)
    except (OSError, *DECODE_ERRORS):
        return None
    finally:
        os.close(fd)
