"""Where tests run side by side, sources are compiled before: on a new clone each worker would compile each of them."""

from __future__ import annotations

import compileall
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PACKAGES = ("app", "agent", "ddpcore", "tests/support", "tests/corpus")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what has not been, before workers start, on all cores."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        for package in PACKAGES:
            compileall.compile_dir(config.rootpath / package, quiet=2, workers=0)
