"""In which order files begin where tests run side by side."""

from __future__ import annotations

from pathlib import Path

from tests.support.order import LONG, SECONDS, order_of

ROOT = Path(__file__).parents[2]


def test_what_waits_and_what_computes_alternate_and_the_short_ones_come_last() -> None:
    waiting = {f"tests/integration/test_{number}.py": number for number in range(1, 11)}
    computing = {f"tests/unit/a/test_{number}.py": 10 * number for number in range(1, 11)}

    order = order_of({**waiting, **computing, "tests/test_top.py": 1})

    assert len(order) == len(set(order)) == 21
    assert {Path(file).stem for file in order[:2]} == {"test_10"}
    assert {Path(file).stem for file in order[-3:]} == {"test_1", "test_top"}
    for at in range(0, 20, 4):
        assert 1 <= sum("integration" in file for file in order[at : at + 4]) <= 3


def test_of_one_kind_alone_nothing_is_lost() -> None:
    assert order_of({"tests/unit/test_a.py": 1, "tests/unit/test_b.py": 2}) == [
        "tests/unit/test_b.py",
        "tests/unit/test_a.py",
    ]
    assert order_of({}) == []


def test_the_files_and_folders_that_are_named_are_there() -> None:
    assert [file for file in LONG if not (ROOT / file).exists()] == []
    assert [folder for folder in SECONDS if not (ROOT / "tests" / folder).is_dir()] == []
