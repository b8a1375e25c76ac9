"""Where tests run side by side, sources are compiled before: on a new clone each worker would compile each of them.

pytest compiles files of tests in its own way, with assertions rewritten. Four workers that do it at the same time take
14 CPU-seconds more. There is no public function for it; the cache that is written here is the one that workers read.
"""

from __future__ import annotations

import compileall
import os
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING

from _pytest.assertion import rewrite

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest

PACKAGES = ("app", "agent", "ddpcore", "tests/support", "tests/corpus")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what has not been, before workers start, on all cores."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        for package in PACKAGES:
            compileall.compile_dir(config.rootpath / package, quiet=2, workers=0)
        rewrite_tests(config, config.rootpath / "tests")


def rewrite_tests(config: pytest.Config, folder: Path) -> None:
    """Write what pytest loads of each file of tests below a folder, where that is not there yet."""
    files = sorted(chain(folder.rglob("test_*.py"), folder.rglob("conftest.py")))
    count, fork = os.cpu_count() or 1, get_context("fork")
    parts = [fork.Process(target=_rewrite, args=(config, files[at::count])) for at in range(count)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()


def _rewrite(config: pytest.Config, files: Iterable[Path]) -> None:
    for file in files:
        cache = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, cache) is None:
            cache.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, cache)
