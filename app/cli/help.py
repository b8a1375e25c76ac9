"""The command `help`: the manual, one file of `app/help` per topic, rendered for the terminal."""

from __future__ import annotations

import os
import re
from textwrap import wrap
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from app.errors import UsageError
from app.manual import TOPICS, markdown
from app.settings.keys import nearest_text
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = 79
CODE_INDENT = "  "
_CODE = re.compile(r"^```.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*-->\n", re.MULTILINE)
_MARKS = re.compile(r"`(?P<code>[^`]+)`|\[(?P<link>[^]]+)\]\((?P<target>[^)]+)\)|\*\*(?P<bold>[^*]+)\*\*")


@click.command()
@click.argument("topic", required=False)
@click.pass_context
def help(context: click.Context, topic: str | None) -> None:  # noqa: A001 - a verb is found by its function's name
    """Print the manual, one TOPIC of it, or a command's options."""
    if topic is None:
        width = max(map(len, TOPICS))
        click.echo("rankdeck help TOPIC prints a topic, rankdeck help VERB a command's options.\n")
        for name in TOPICS:
            click.echo(f"  {name:<{width}}  {summary(name)}")
    elif topic in TOPICS:
        # less exits by itself and leaves the text on the screen when it fits.
        os.environ.setdefault("LESS", "-FRX")
        has_styles = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        click.echo_via_pager("\n".join(rendered(markdown(topic))), color=None if has_styles else False)
    else:
        click.echo(_verb_help(context, topic))


def _verb_help(context: click.Context, name: str) -> str:
    root = context.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, name)
    if command is None:
        near = nearest_text(name, [*TOPICS, *group.list_commands(root)])
        raise UsageError(f"{clean(name)} is no topic and no command{near}", "rankdeck help lists the topics")
    return command.get_help(click.Context(command, info_name=name, parent=root))


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


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and options.

    Save it where the shell reads it at its start.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "rankdeck", "_RANKDECK_COMPLETE").source())
