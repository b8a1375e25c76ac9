"""README and the topics of `rankdeck help`: short enough, their links lead somewhere, and their commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from agent.cli import cli as agent
from app.cli.main import rankdeck
from app.diagnosis.causes import Cause
from app.errors import ExitCode
from app.manual import TOPICS, markdown, rendered
from app.settings.schema import TABLE, key_settings
from app.tui.actions import ACTIONS
from ddpcore.checkpoint.cli import cli as checkpoints
from ddpcore.wire import FaultKind

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / "app" / "help" / f"{topic}.md" for topic in TOPICS)]
PROGRAMS = {"rankdeck": rankdeck, "python -P -m agent": agent, "python -m ddpcore.checkpoint": checkpoints}
TERMINAL_COLUMNS = 80


class Line(NamedTuple):
    """A command of a page."""

    page: str
    program: str
    arguments: str


def commands_of(page: Path) -> list[Line]:
    """Return the lines of a page's code that call one of our programs, without what is written beside them."""
    fences = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]
    commands = []
    for line in lines:
        for program in PROGRAMS:
            called = re.match(rf"(?:srun .*)?{re.escape(program)}(?: +|$)(.*)", line)
            if called and called[1]:
                typed = re.split(r" {2,}| > | &$", called[1])[0]
                commands.append(Line(page.name, program, typed))
    return commands


def verbs_in_text(page: Path) -> set[str]:
    """Return the verbs that are named in a page's sentences."""
    return set(re.findall(r"`rankdeck ([a-z]+)", page.read_text()))


def anchors_of(page: Path) -> set[str]:
    """Return how links name a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_has_at_most_12_kb_and_120_columns() -> None:
    assert README.stat().st_size <= 12 * 1024
    assert max(map(len, README.read_text().splitlines())) <= 120


@pytest.mark.parametrize("topic", PAGES[1:], ids=lambda page: page.stem)
def test_a_topic_has_at_most_6_kb_and_fits_a_terminal_without_marks(topic: Path) -> None:
    text = topic.read_text()
    lines = list(rendered(text))
    without_code = re.sub(r"^  .*$", "", "\n".join(lines), flags=re.MULTILINE)

    assert topic.stat().st_size <= 6 * 1024
    assert text.isascii(), "a terminal without UTF-8 shows it too"
    assert [line for line in lines if len(click.unstyle(line)) > TERMINAL_COLUMNS] == []
    assert re.findall(r"`|\*\*|\]\(|<!--", without_code) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors_of(linked), target


def test_readme_links_to_every_topic() -> None:
    text = README.read_text()
    assert [topic for topic in TOPICS if f"[{topic}](app/help/{topic}.md)" not in text] == []


@pytest.mark.parametrize("line", [line for page in PAGES for line in commands_of(page)], ids=" ".join)
def test_each_command_parses(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    group = PROGRAMS[line.program]
    words = ["gpt" if word == "JOB" else word for word in shlex.split(line.arguments)]
    command = group.get_command(click.Context(group), words[0])
    assert command is not None, words[0]
    assert command.make_context(words[0], words[1:]) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_that_a_sentence_names_is_there(page: Path) -> None:
    assert verbs_in_text(page) <= set(rankdeck.list_commands(click.Context(rankdeck)))


def test_most_pages_have_commands() -> None:
    assert sum(bool(commands_of(page)) for page in PAGES) >= 12


def rows_of(topic: str, heading: str) -> list[list[str]]:
    """Return the cells of a table of a topic, without marks."""
    _, _, table = markdown(topic).partition(f"| {heading} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_manual_has_every_setting_with_its_default() -> None:
    rows = rows_of("settings", "setting")
    assert [row[:2] for row in rows] == [[setting.name, setting.shown(setting.default)] for setting in TABLE]


def test_the_manual_has_every_action_with_its_keys() -> None:
    settings = key_settings(ACTIONS)
    expected = [[key.name.removeprefix("keys."), key.shown(key.default), key.sentence] for key in settings]
    assert rows_of("keys", "action") == expected


def test_the_manual_has_every_exit_code_and_fault() -> None:
    assert [int(code) for code, _ in rows_of("exit-codes", "code")] == [int(code) for code in ExitCode]
    assert [kind for kind, _ in rows_of("exit-codes", "kind")] == [str(kind) for kind in FaultKind]


def test_readme_names_every_verdict() -> None:
    table = README.read_text().partition("| what is wrong | verdict |")[2].partition("\n\n")[0]
    assert [cause for cause in Cause if not re.search(rf"\b{cause}\b", table)] == []


def cluster_verbs(page: Path) -> list[str]:
    section = page.read_text().partition("<!-- cluster -->")[2].partition("<!-- /cluster -->")[0]
    return re.findall(r"^rankdeck ([a-z]+)", section, re.MULTILINE)


def test_a_cluster_goes_from_nothing_to_nothing() -> None:
    walk = [
        "init",
        "install",
        "doctor",
        "up",
        "run",
        "status",
        "attach",
        "stacks",
        "evidence",
        "stop",
        "restart",
        "down",
    ]

    assert cluster_verbs(README) == ["init", "install", "doctor", "up", "run", "down"]
    assert list(dict.fromkeys(cluster_verbs(PAGES[1]))) == walk


def sentences_of(page: Path) -> list[str]:
    """Return the sentences outside code and tables; code within a sentence is one word."""
    prose = re.sub(r"^```.*?^```|^(?:[|#<!]|\*\w).*?$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]+\)", "]", re.sub(r"`[^`]+`", "CODE", prose))
    paragraphs = re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE)
    return [sentence for text in paragraphs for sentence in re.split(r"(?<=[.?!])\s+", " ".join(text.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_sentence_has_at_most_25_words(page: Path) -> None:
    assert [sentence for sentence in sentences_of(page) if len(sentence.split()) > 25] == []
