"""A random walk of faults: five minutes, or RANKDECK_NEMESIS_S seconds; by hand `tests/fault/nemesis.py` walks on."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fault.nemesis import walk
from tests.support.hosts import require_hosts

SECONDS = float(os.environ.get("RANKDECK_NEMESIS_S", "300"))
NUM_HOSTS = 3


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(SECONDS + 600)
def test_no_invariant_breaks_on_a_walk_of_faults() -> None:
    require_hosts()
    seed = int(os.environ.get("RANKDECK_NEMESIS_SEED", "0")) or random.SystemRandom().randrange(2**24)

    nemesis = walk(seed, SECONDS, NUM_HOSTS, Path("build/nemesis") / str(seed))

    assert nemesis.num_rounds > 0
