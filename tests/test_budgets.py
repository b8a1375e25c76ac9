"""How large the house may be: `[tool.rankdeck.budgets]` in pyproject.toml says it, and only falls."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUDGETS = SETTINGS["tool"]["rankdeck"]["budgets"]
PACKAGES = ("ddpcore", "agent", "app")
TESTS = "tests"


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def modules_of(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.stem not in {"__init__", "__main__"}]


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for imported in sorted(imports[module]):
            if imported not in numbers:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == numbers[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(imports):
        if module not in numbers:
            visit(module)
    return found


@pytest.mark.parametrize("package", [*PACKAGES, TESTS])
def test_a_package_has_no_more_lines_and_files_than_its_budget(package: str) -> None:
    files = sources(package)

    assert sum(num_lines(path) for path in files) <= BUDGETS[package]["lines"]
    assert len(files) <= BUDGETS[package]["files"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_holds_two_to_sixteen_modules_and_lies_no_deeper_than_three(package: str) -> None:
    folders = {path.parent for path in sources(package)}

    assert {str(folder): len(modules_of(folder)) for folder in folders if not 2 <= len(modules_of(folder)) <= 16} == {}
    assert [str(folder) for folder in folders if len(folder.relative_to(ROOT).parts) > 3] == []


def test_a_file_has_at_most_500_lines_and_few_have_less_than_100() -> None:
    files = [path for package in PACKAGES for path in sources(package) if path.stem not in {"__init__", "__main__"}]

    assert [str(path) for path in files if num_lines(path) > 500] == []
    assert sum(num_lines(path) < 100 for path in files) <= BUDGETS["short_files"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    assert circles(imports) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_few_single_files_of_mixed_folders_are_declared_pure() -> None:
    contracts = SETTINGS["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["name"].startswith("pure cores")]
    single = [name for name in pure["source_modules"] if not re.search(r"\*|\.wire|samplers", name)]

    assert len(single) <= BUDGETS["pure_files"]
