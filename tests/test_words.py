"""One word for one thing, the field's word: in names, docstrings, texts and documents."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = [path for package in ("ddpcore", "agent", "app") for path in sorted((ROOT / package).rglob("*.py"))]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "app/help").glob("*.md"))]

NAME, DOCSTRING, TEXT = "name", "docstring", "text"


class Word(NamedTuple):
    """A banned word, or several: a pattern of whole words.

    Attributes:
        in_names: Banned in names only, and only in a folder: in prose and elsewhere it has another sense.
    """

    pattern: str
    instead: str
    in_names: str | None = None


WORDS = (
    Word("roads?", "transport, connection, channel"),
    Word("fans? in", "relay", in_names=""),
    Word("onlookers?|looks? on", "subscriber, client; watch"),
    Word("listeners?", "subscriber, client", in_names="app"),
    Word("newest", "latest"),
    Word("asking", "credit, pull", in_names="agent"),
    Word("pumps?|errands?|lanes?|far ends?", "io_thread, worker_pool, queue, channel", in_names=""),
    Word("whereabouts", "agent_info, rank_status"),
    Word("lifelines?", "parent_watch"),
    Word("says?|said|unsaid|saying|tells?|(?:un)?told|telling|hears?|heard|hearing", "report, message, received, show"),
    Word("words", "text", in_names=""),
    Word("hearts?|beats?", "heartbeat, tick"),
    Word("examiners?|condemned|fates?", "deadlock_check, failed, exit reason"),
    Word("gates?|tally|tallies", "barrier, arrivals"),
    Word("roll calls?|rank cards?", "join_check, rank_info"),
    Word("persons?", "user, operator"),
    Word("(?:begins?|began|begun|beginning) again", "restart"),
    Word("for good|in vain|anew|meanwhile", "permanently, falsely, again, while"),
    Word("deeds?", "action"),
    Word("acts?", "action", in_names=""),
    Word("mastheads?", "header"),
    Word("stages?|strips", "ui_state; rendering", in_names="app/tui"),
    Word("lookouts?|look(?:s|ing)? back", "replay, backfill"),
    Word("keepers?", "reconnector, incident_recorder, administrator"),
    Word("oddity|oddities", "anomaly"),
    Word("absences?", "unreachable_reason"),
    Word("lacks?", "unreachable_reason", in_names=""),
    Word("newcomers?", "new_node"),
    Word("shares?$", "node_assignment", in_names="app/session"),
    Word("meeting places?", "master_addr"),
    Word("nearness", "did_you_mean"),
    Word("at once", "run_parallel", in_names=""),
    Word("control words?", "stop_agreement", in_names=""),
    Word("take rounds", "drain", in_names=""),
)
PATTERN = re.compile("|".join(rf"(?<![a-z_])({word.pattern})(?![a-z_])" for word in WORDS), re.IGNORECASE)
"""One group a word."""
CONTINUES_A_NAME = re.compile(
    r"\A(?:Of|By|In|Between|Since|Until|With|Without|From|After|Behind|Also)\b|^ +\w+: (?:Of|Between)\b", re.MULTILINE
)


def names_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            yield name


def parts_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the names, docstrings and texts of a file, each with its line; a text is a string with a space."""
    if path.suffix == ".md":
        yield from ((TEXT, number, line) for number, line in enumerate(path.read_text().splitlines(), 1))
        return
    yield NAME, 1, path.stem
    docstrings = set()
    for node in ast.walk(ast.parse(path.read_text())):
        # A name is taken apart at `_` and at capitals.
        yield from (
            (NAME, getattr(node, "lineno", 1), re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", it).strip())
            for it in names_of(node)
        )
        match node:
            case ast.Expr(value=ast.Constant(value=str(content)) as constant):
                docstrings.add(constant)
                yield DOCSTRING, node.lineno, content
            case ast.Constant(value=str(content)) if " " in content and node not in docstrings:
                yield TEXT, node.lineno, content


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_read_has_the_words_of_the_field(path: Path) -> None:
    where = path.relative_to(ROOT).as_posix()
    found = []
    for kind, line, content in parts_of(path):
        for match in PATTERN.finditer(content):
            word = WORDS[(match.lastindex or 0) - 1]
            if word.in_names is None or (kind == NAME and where.startswith(word.in_names)):
                at = line + content[: match.start()].count("\n")
                found.append(f"{where}:{at}: {match[0]!r} in a {kind}: {word.instead}")
        for match in CONTINUES_A_NAME.finditer(content) if kind == DOCSTRING else ():
            at = line + content[: match.start()].count("\n")
            found.append(f"{where}:{at}: {match[0].strip()!r} continues a name: make it a noun phrase with its unit")

    assert not found, "\n".join(found)
