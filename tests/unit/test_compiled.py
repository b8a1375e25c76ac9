"""Files of tests are rewritten before workers start: what workers then load is what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.compiled import rewrite_tests

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]


def test_what_is_written_before_a_run_is_what_the_run_loads(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(test_sum="def test_sum():\n    assert 1 + 1 == 3\n")
    folder = pytester.path / "tests"
    folder.mkdir()
    (pytester.path / "test_sum.py").rename(folder / "test_sum.py")

    rewrite_tests(pytester.parseconfig(), folder)

    [cache] = folder.rglob("*.pyc")
    written = cache.stat()
    run = pytester.runpytest_subprocess("-q", timeout=120)
    run.stdout.fnmatch_lines(["E*assert (1 + 1) == 3"])
    assert (cache.stat().st_ino, cache.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)

    rewrite_tests(pytester.parseconfig(), folder)

    assert cache.stat().st_ino == written.st_ino
