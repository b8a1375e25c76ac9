"""A cause of slowness on real ranks is named, and none of a rank that is slow by its program alone.

The other causes want a quiet machine: `python -m tests.corpus --real-causes`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.corpus.real_causes import CGROUPS, MORE_WORK, QUOTA, play_cause

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 3.0
"""For a machine with other work."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.cpu_count() == 1, reason="two ranks want a CPU each"),
    pytest.mark.skipif(not os.access(CGROUPS, os.W_OK), reason="this user may make no cgroups"),
]


def test_a_quota_that_slows_a_rank_is_named(tmp_path: Path) -> None:
    told = play_cause(QUOTA, tmp_path, PATIENCE)

    assert told.because_s is not None, told
    assert told.false == set(), told


def test_of_a_rank_that_its_program_slows_no_cause_is_named(tmp_path: Path) -> None:
    told = play_cause(MORE_WORK, tmp_path, PATIENCE)

    assert (told.named_s is not None, told.false) == (True, set()), told
