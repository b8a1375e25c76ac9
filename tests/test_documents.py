"""ARCHITECTURE.md names files, functions and headings that exist; the documents stay short."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
SOURCES = {path: path.read_text() for package in ("app", "agent", "ddpcore") for path in (ROOT / package).rglob("*.py")}


def matching(name: str) -> list[Path]:
    """Return the sources that a name of the page may mean: a file's name, with some of its folders before it."""
    return [path for path in SOURCES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]


def defines(text: str, symbol: str) -> bool:
    forms = (rf"^ *(?:async )?(?:def|class) {part}\b|^{part}\b.* = " for part in symbol.split("."))
    return all(re.search(form, text, re.MULTILINE) for form in forms)


def test_every_file_that_the_architecture_names_is_one_file_of_the_tree() -> None:
    names = set(re.findall(r"`([a-z_/]+\.py)`", PAGE)) - {"tests/support/sim.py"}

    unclear = {name: len(found) for name in names if len(found := matching(name)) != 1}

    assert not unclear


def test_every_folder_that_the_architecture_names_exists() -> None:
    tests = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES} | {"tests/" + path.name for path in tests}

    named = {name.rstrip("/") for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*/)`", PAGE)}

    assert not {name for name in named if not any(f"/{folder}".endswith(f"/{name}") for folder in folders)}


def test_every_function_that_a_walk_names_stands_in_the_file_named_before_it() -> None:
    walks = PAGE[PAGE.index("## A report") : PAGE.index("## Invariants")]
    owners: dict[str, str] = {}
    missing = []
    file = ""
    for name in re.findall(r"`([\w/.]+)`", walks):
        if name.endswith(".py"):
            file = name
            continue
        owner = name.split(".", maxsplit=1)[0]
        if not re.fullmatch(r"[A-Z]\w+\.\w+|[a-z]\w*_\w+|[A-Z_]{5,}|[a-z]+", name):
            continue
        # `Class.method` without a file is of the file where its class was named first.
        where = owners.setdefault(owner, file) if "." in name else file
        if where and not any(defines(SOURCES[path], name) for path in matching(where)):
            missing.append((where, name))

    assert not missing


def test_every_heading_that_a_decision_names_is_in_the_results() -> None:
    results = (ROOT / "tests/bench/RESULTS.md").read_text()
    headings = {re.sub(r":.*", "", heading) for heading in re.findall(r"^#+ (.*)", results, re.MULTILINE)}

    pointers = re.findall(r"\[([\w', ]+)\]$", PAGE[PAGE.index("## Decisions") :], re.MULTILINE)

    assert pointers
    assert not {name for name in pointers if name not in headings and not set(name.split(", ")) <= headings}


def test_the_documents_stay_short() -> None:
    assert len(PAGE.encode()) <= 14 * 1024
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 36


def test_what_pip_is_to_install_from_this_clone_is_a_path_that_no_index_can_answer() -> None:
    pages = [ROOT / "README.md", *(ROOT / "app/help").glob("*.md")]
    asked = {(page, what) for page in pages for what in re.findall(r"pip install[^`']*'([^`'\[]+)\[", page.read_text())}

    assert {what for _, what in asked} == {".", "PATH"}
    assert {page.name for page, what in asked if what == "PATH"} == {"README.md"}
    assert "PATH is this clone, absolute or with `./`" in " ".join(pages[0].read_text().split())
