"""Each row of the fault matrix has a test: what carries `@pytest.mark.fault(row=N)`, wherever it lies.

python -m pytest -s tests/fault/test_matrix.py      prints the rows with their tests
python -m pytest -m fault                           runs them all
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.fault_rows import ROWS

TESTS = Path(__file__).parents[1]


def rows_of(node: ast.AST) -> list[int]:
    """Return the rows that the marks below a part of a file name."""
    found = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault":
            for keyword in call.keywords:
                value = ast.literal_eval(keyword.value)
                found += value if isinstance(value, list) else [value]
    return found


def marked() -> dict[int, list[str]]:
    """Return the tests of each row, as FILE::TEST; what marks a list of parameters is of the file."""
    tests: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.fault(" not in text:
            continue
        for part in ast.parse(text).body:
            is_test = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"::{part.name}" if is_test else ""  # type: ignore[attr-defined]
            decorated = part.decorator_list if is_test else [part]  # type: ignore[attr-defined]
            for row in {row for one in decorated for row in rows_of(one)}:
                tests[row].append(f"{path.relative_to(TESTS)}{name}")
    return tests


def test_each_row_of_the_matrix_has_a_test() -> None:
    tests = marked()
    for number, row in ROWS.items():
        print(f"{number:2d}  {row.fault}: {row.expected} [{row.invariants}]")  # noqa: T201 - with -s
        for test in tests[number]:
            print(f"      {test}")  # noqa: T201 - with -s

    assert sorted(ROWS) == list(range(1, 36))
    assert [number for number in ROWS if not tests[number]] == []
    assert set(tests) <= set(ROWS), "a row that the matrix does not have"
