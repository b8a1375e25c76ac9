"""The hosts that ~/.ssh/config calls by name: what a person may choose from. How one is reached `ssh -G` says.

Source: ssh_config(5): keywords in any case, `=` or blanks behind them, quotes around names with blanks, `Include` of
patterns that are relative to ~/.ssh.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.ssh.config import parse_destination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_DEPTH = 16
"""Of files that include others, as in ssh."""
MAX_ALIASES = 10_000
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*)")
_WORD = re.compile(r'"([^"]*)"|(\S+)')


def host_aliases(text: str, included: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the names of all hosts in a configuration, each once, in the order of the file.

    Patterns name no host and are left out, and so is what ssh should not be given.

    Args:
        text: Of the file.
        included: Returns the texts of the files that an `Include` pattern stands for.
    """
    found: dict[str, None] = {}
    for name in _names(text, included, MAX_DEPTH):
        if len(found) == MAX_ALIASES:
            break
        if _is_alias(name):
            found.setdefault(name)
    return list(found)


def _names(text: str, included: Callable[[str], Iterable[str]], depth_left: int) -> Iterator[str]:
    for keyword, rest in config_lines(text):
        if keyword not in {"host", "include"}:
            continue
        words = list(words_of_line(rest))
        if keyword == "host":
            yield from words
        elif depth_left:
            for pattern in words:
                for other in included(pattern):
                    yield from _names(other, included, depth_left - 1)


def config_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each keyword of a configuration, in small letters, and what follows it in its line."""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            yield match["keyword"].lower(), match["rest"].rstrip()


def words_of_line(rest: str) -> Iterator[str]:
    """Yield the words of a line, up to a comment."""
    for quoted, plain in _WORD.findall(rest):
        if plain.startswith("#"):
            return
        yield quoted or plain


def _is_alias(name: str) -> bool:
    try:
        destination = parse_destination(name)
    except UsageError:  # `*`, `?` and `!` are in no host's name either
        return False
    return destination.text == name
