"""Causes of slowness on real ranks are said, and nothing is said of a rank that is slow by its program alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.corpus.real_causes import CAUSES, CGROUPS, OPPOSITES, RealCause, play

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


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_what_slows_a_rank_is_said(cause: RealCause, tmp_path: Path) -> None:
    told = play(cause, tmp_path, PATIENCE)

    assert told.because_s is not None, told
    assert told.false == set(), told


@pytest.mark.parametrize("cause", OPPOSITES, ids=lambda cause: cause.name)
def test_of_a_rank_that_its_program_slows_nothing_is_said(cause: RealCause, tmp_path: Path) -> None:
    told = play(cause, tmp_path, PATIENCE)

    assert (told.named_s is not None, told.false) == (cause.is_slow, set()), told
