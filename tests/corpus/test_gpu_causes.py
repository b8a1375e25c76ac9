"""What slows the GPU of a real rank is named by a console, with its values.

The other causes, and those of which nothing may be named: `python -m tests.corpus --gpu-causes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.corpus.gpu_causes import HEAT, play_gpu_cause
from tests.support.hosts import require_hosts

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 3.0
"""For a machine with other work."""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_gpu_that_heat_slows_is_named_with_its_clock_and_its_peers(tmp_path: Path) -> None:
    require_hosts()

    told = play_gpu_cause(HEAT, tmp_path, PATIENCE)

    assert told.because_s is not None, told
    assert told.false == set(), told
    assert (told.because["ranks"], told.because["gpu"]) == ([1], 1)
    assert (told.because["value"], told.because["peers"]) == (pytest.approx(1.0, abs=0.1), 0.0)
    assert told.because["since_s"] == pytest.approx(told.because_s, abs=5.0)
    support = {one["signal"]: (one["value"], one["peers"]) for one in told.because["support"]}
    assert support["gpu_clock"] == (pytest.approx(1.24e9, abs=0.02e9), pytest.approx(1.97e9, abs=0.02e9))
    assert support["gpu_temperature"] == (pytest.approx(88, abs=2), pytest.approx(60, abs=2))
    assert "slowed by heat for" in told.sentence
    assert "GPU 1 runs at 1,2" in told.sentence
