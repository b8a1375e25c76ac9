"""Where tests run side by side, all files are compiled before: on a new clone each worker would compile each of them.

Source: `AssertionRewritingHook.exec_module` of pytest does for one file what is done here for all tests.
"""

from __future__ import annotations

import compileall
import os
from multiprocessing import get_context
from typing import TYPE_CHECKING

from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PACKAGES = ("app", "agent", "ddpcore", "tests/support", "tests/corpus")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what has not been, before workers start, on all cores."""
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        return
    tests = [path for path in (config.rootpath / "tests").rglob("test_*.py") if not _compiled(path).exists()]
    if not tests:
        return
    sources = [path for package in PACKAGES for path in (config.rootpath / package).rglob("*.py")]
    num_cores = len(os.sched_getaffinity(0))

    def compile_share(number: int) -> None:
        for path in sources[number::num_cores]:
            compileall.compile_file(path, quiet=2)
        for path in tests[number::num_cores]:
            _rewrite(config, path)

    processes = [get_context("fork").Process(target=compile_share, args=(number,)) for number in range(num_cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compiled(path: Path) -> Path:
    return get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"


def _rewrite(config: pytest.Config, path: Path) -> None:
    compiled = _compiled(path)
    compiled.parent.mkdir(exist_ok=True)
    source, code = _rewrite_test(path, config)
    _write_pyc(config.stash[assertstate_key], code, source, compiled)
