"""A whole run of pytest inside the test: what fails beside others, and passes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

FAILS_ONCE = """
import os
from pathlib import Path
import pytest

def fails_once(name):
    been = Path(name)
    first = not been.exists()
    been.touch()
    return first
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(
        "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\nasyncio_default_fixture_loop_scope = function"
    )
    pytester.makeconftest("pytest_plugins = ['tests.support.second_run']")
    return pytester


def _run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-q", *options, timeout=120)


def _side_by_side(suite: pytest.Pytester) -> pytest.RunResult:
    return _run(suite, "-n", "2", "--dist", "loadfile")


def test_what_passes_alone_is_flaky_and_the_run_passes(suite: pytest.Pytester) -> None:
    in_the_name = "[two words] (and - more) :: 'quoted' ä"
    suite.makepyfile(
        test_one=f"""{FAILS_ONCE}
@pytest.mark.parametrize("value", [1, 2], ids=[{in_the_name!r}, "another"])
def test_that_fails_once(value):
    assert value == 2 or not fails_once("one")

def test_that_passes():
    pass
""",
        test_two=f"""{FAILS_ONCE}
def test_whose_worker_dies_once():
    if fails_once("two"):
        os._exit(3)
""",
    )

    result = _side_by_side(suite)

    assert result.ret == pytest.ExitCode.OK
    lines = result.outlines
    written = in_the_name.replace("ä", "\\xe4")
    assert f"FLAKY test_one.py::test_that_fails_once[{written}]" in lines
    assert "FLAKY test_two.py::test_whose_worker_dies_once" in lines
    # Two have passed, and a third time xdist itself, which gives the tests of a dead worker to the next one.
    assert lines[-1].startswith("3 passed, 2 flaky in ")
    assert not [line for line in lines if line.startswith(("FAILED", "ERROR"))]


@pytest.mark.slow
def test_what_fails_before_or_after_its_call_is_flaky_too(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
@pytest.fixture
def shaky():
    assert not fails_once("setup")
    yield
    assert not fails_once("teardown")

def test_with_a_fixture(shaky):
    pass

def test_with_the_fixture_at_its_end(shaky):
    assert not fails_once("call")
""")

    result = _side_by_side(suite)

    # The second one fails in its call and in its teardown, and both are forgiven.
    assert result.ret == pytest.ExitCode.OK
    assert [line.partition("::")[2] for line in result.outlines if line.startswith("FLAKY")] == [
        "test_with_a_fixture",
        "test_with_the_fixture_at_its_end",
    ]
    assert result.outlines[-1].startswith("2 flaky in ")


@pytest.mark.slow
def test_what_fails_again_fails_the_run_and_both_failures_are_shown(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
def test_that_is_wrong():
    first = fails_once("been")
    assert False, f"first: {{first}}"

def test_that_fails_once():
    assert not fails_once("other")
""")

    result = _side_by_side(suite)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = result.stdout.str()
    assert "AssertionError: first: True" in text
    assert "AssertionError: first: False" in text
    assert [line.partition(" - ")[0] for line in result.outlines if line.startswith("FAILED")] == [
        "FAILED test_what_fails_again_fails_the_run_and_both_failures_are_shown.py::test_that_is_wrong"
    ]
    assert result.outlines[-1].startswith("1 failed, 1 flaky in ")


@pytest.mark.slow
def test_three_that_are_flaky_fail_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_that_fails_once(name):
    assert not fails_once(name)
""")

    result = _side_by_side(suite)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert len([line for line in result.outlines if line.startswith("FLAKY")]) == 3
    assert "3 tests are FLAKY, which count as failed: 2 at most may be." in result.outlines
    assert result.outlines[-1].startswith("3 failed in ")


@pytest.mark.slow
def test_where_much_fails_nothing_is_run_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
@pytest.mark.parametrize("name", range(11))
def test_that_fails_once(name):
    assert not fails_once(str(name))
""")

    result = _side_by_side(suite)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "11 tests failed: none was run a second time." in result.outlines
    assert result.outlines[-1].startswith("11 failed in ")


@pytest.mark.slow
def test_what_fails_without_others_beside_it_has_failed(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
def test_that_fails_once():
    assert not fails_once("been")
""")

    result = _run(suite, "-n", "0")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.outlines[-1].startswith("1 failed in ")


@pytest.mark.slow
def test_a_run_that_ends_at_its_first_failure_has_no_second(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
def test_that_fails_once():
    assert not fails_once("been")
""")

    result = _run(suite, "-n", "1", "-x")

    assert result.ret != pytest.ExitCode.OK
    assert result.outlines[-1].startswith("1 failed in ")


@pytest.mark.slow
def test_only_what_the_run_was_to_take_is_run_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{FAILS_ONCE}
pytestmark = pytest.mark.filterwarnings("error")

def test_that_fails_once():
    assert not fails_once("been")
""")

    result = _run(suite, "-n", "1", "-m", "filterwarnings")

    assert result.ret == pytest.ExitCode.OK
    assert result.outlines[-1].startswith("1 flaky in ")
