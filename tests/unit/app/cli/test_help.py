"""`rankdeck help`: the list of topics, one of them, or what a command takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.resources import files
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from app.cli.inventory_file import FIRST_LINES
from app.cli.main import COMMANDS, rankdeck
from app.errors import ExitCode, UsageError
from app.manual import TOPICS, markdown, rendered, summary

if TYPE_CHECKING:
    from pathlib import Path

PAGER = """\
#!/bin/sh
echo "paged with LESS=$LESS"
exec cat
"""
BOLD = "\x1b[1m"


def printed(*words: str) -> str:
    result = CliRunner().invoke(rankdeck, ["help", *words], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == ExitCode.WELL
    return result.stdout


def test_without_a_topic_each_is_listed_in_a_line() -> None:
    lines = printed().splitlines()

    assert [line.split()[0] for line in lines[2:-2]] == list(TOPICS)
    assert all(summary(topic) in line for topic, line in zip(TOPICS, lines[2:-2], strict=True))
    assert lines[-2:] == ["", "rankdeck --help lists the commands."]
    assert max(map(len, lines)) < 80


def test_every_file_is_a_topic_and_its_heading_names_it() -> None:
    names = {path.name for path in (files("app") / "help").iterdir()}

    assert names == {f"{topic}.md" for topic in TOPICS}
    for topic in TOPICS:
        heading = printed(topic).splitlines()[0]
        assert heading.lower().replace(" ", "-").startswith(f"{topic}:")
        assert len(summary(topic)) > 20


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_that_is_piped_has_no_escapes(topic: str) -> None:
    text = printed(topic)

    assert "\x1b" not in text
    its_options = f"\n\nThe command's options: rankdeck {topic} --help" if topic in COMMANDS else ""
    assert text.strip() == click.unstyle("\n".join(rendered(markdown(topic)))).strip() + its_options


@pytest.mark.parametrize("verb", sorted(COMMANDS.keys() - set(TOPICS)))
def test_of_a_command_its_options_are_printed(verb: str) -> None:
    text = printed(verb)

    assert text.startswith(f"Usage: rankdeck {verb}")
    assert "--help" in text


@pytest.mark.parametrize(
    ("typed", "near"), [("verdict", "verdicts"), ("exit-code", "exit-codes"), ("instal", "install"), ("zzz", "")]
)
def test_what_is_no_topic_is_refused_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        printed(typed)

    assert str(caught.value) == f"{typed} is no topic and no command" + (f"; the nearest is {near}" if near else "")
    assert caught.value.hint == "rankdeck help lists the topics"


def test_marks_become_what_a_terminal_shows() -> None:
    table = "| `x` | y |\n|---|---|\n| `long` | [z](https://a.b) |\n"
    page = f"# A: b\n\n<!-- c -->\n{table}\n**no** `--json`,\nsee [ssh](ssh.md)\n\n- one\n  two\n- three\n"

    lines = [click.unstyle(line) for line in rendered(f"{page}\n```toml\n[a]  # `b`\n\n# x\n```\n")]

    assert (
        "\n".join(lines)
        == """\
A: b

x     y
long  z (https://a.b)

no --json, see rankdeck help ssh

- one two
- three

  [a]  # `b`

  # x
"""
    )
    assert next(rendered(page)) == click.style("A: b", bold=True)
    assert max(map(len, rendered("- " + "word " * 50))) < 80


def test_it_waits_for_nothing_that_trains_or_paints() -> None:
    heavy = "('numpy', 'zmq', 'textual', 'asyncio', 'paramiko')"
    proof = f"""
import sys
from app.cli.main import rankdeck
rankdeck.main(["help", "verdicts"], standalone_mode=False)
sys.exit(" ".join(m for m in sys.modules if m in {heavy}) or 0)
"""

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Verdicts: ")


def shown_on_a_terminal(tmp_path: Path, **environ: str) -> str:
    """Return what a terminal gets, with a pager that goes on by itself."""
    pager = tmp_path / "less"
    pager.write_text(PAGER)
    pager.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name not in {"LESS", "NO_COLOR", "PAGER"}}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    master, slave = os.openpty()
    argv = [sys.executable, "-P", "-m", "app", "help", "verdicts"]
    with subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env={**variables, **environ}) as command:
        os.close(slave)
        pieces = []
        with contextlib.suppress(OSError):  # where nobody has the other end open any more
            while piece := os.read(master, 65536):
                pieces.append(piece)
        os.close(master)
    assert command.returncode == ExitCode.WELL
    return b"".join(pieces).decode()


def test_on_a_terminal_a_pager_shows_it_with_bold_headings(tmp_path: Path) -> None:
    text = shown_on_a_terminal(tmp_path)

    assert text.startswith("paged with LESS=-FRX\r\n")
    assert f"{BOLD}Verdicts: each with its sentence" in text
    assert f"{BOLD}frozen" in text


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_who_wants_no_escapes_gets_none(variable: dict[str, str], tmp_path: Path) -> None:
    text = shown_on_a_terminal(tmp_path, **variable)

    assert "Verdicts: each with its sentence" in text
    assert "\x1b" not in text


def test_run_is_shown_without_the_dashes_that_it_does_not_need() -> None:
    pages = [*map(markdown, TOPICS), FIRST_LINES]

    shown = [line.strip() for page in pages for line in page.splitlines() if line.strip().startswith("rankdeck run ")]
    assert len(shown) > 9
    assert [line for line in shown if " -- " in line] == []
