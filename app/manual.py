"""The manual, a file of `app/help` for each topic: `rankdeck help` prints it, the console shows parts. Pure."""

from __future__ import annotations

import re
from importlib.resources import files
from textwrap import wrap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPICS = (
    "cluster",
    "ssh",
    "relay",
    "slurm",
    "launchers",
    "exec",
    "inspect",
    "rehearsal",
    "doctor",
    "verdicts",
    "causes",
    "ends",
    "evidence",
    "settings",
    "keys",
    "security",
    "faults",
    "exit-codes",
    "engine",
    "checkpoints",
    "samplers",
    "barriers",
)
"""Topics in the order of the list; each is a file of `app/help`."""
COLUMNS = 79
CODE_INDENT = "  "
_CODE = re.compile(r"^```.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*-->\n", re.MULTILINE)
_MARKS = re.compile(r"`(?P<code>[^`]+)`|\[(?P<link>[^]]+)\]\((?P<target>[^)]+)\)|\*\*(?P<bold>[^*]+)\*\*")


def markdown(topic: str) -> str:
    """Return the text of a topic's file."""
    return (files("app") / "help" / f"{topic}.md").read_text(encoding="utf-8")


def summary(topic: str) -> str:
    """Return the subject of a topic: its first heading, without the topic's name."""
    heading, _, _ = markdown(topic).partition("\n")
    return _plain(heading.partition(": ")[2])


def rendered(text: str) -> Iterator[str]:
    """Yield the lines of a page for a terminal: headings are bold, tables are aligned, markup is removed."""
    for number, part in enumerate(_CODE.split(_COMMENT.sub("", text))):
        if number % 2:
            yield from (f"{CODE_INDENT}{line}".rstrip() for line in part.splitlines())
            yield ""
            continue
        for block in filter(None, part.strip().split("\n\n")):
            yield from _block(block)
            yield ""


def _block(block: str) -> Iterator[str]:
    if block.startswith("#"):
        yield click.style(_plain(block.lstrip("# ")), bold=True)
    elif block.startswith("|"):
        yield from _columns([[_plain(cell.strip()) for cell in row[1:-1].split(" | ")] for row in block.splitlines()])
    else:
        for item in re.split(r"\n(?=- )", block):
            line = " ".join(_plain(item).split())
            yield from wrap(line, COLUMNS, subsequent_indent="  " if line.startswith("- ") else "")


def _columns(table: list[list[str]]) -> Iterator[str]:
    rows = [row for row in table if set("".join(row)) - set("-|")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield line if number else click.style(line, bold=True)


def _plain(text: str) -> str:
    """Return a text without markup; a link to another topic becomes the command that prints it."""

    def without(match: re.Match[str]) -> str:
        link, target = match["link"], match["target"]
        if link is None:
            return match["code"] or click.style(match["bold"], bold=True)
        if target == f"{link}.md":
            return f"rankdeck help {link}"
        return f"{link} ({target})" if target.startswith("https://") else link

    return _MARKS.sub(without, text)
