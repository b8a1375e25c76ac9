"""What the README has a person type is what the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from app.cli import rankdeck

README = Path(__file__).parents[3] / "README.md"


def commands_of_the_first_cluster() -> list[str]:
    """Return the lines of the walk, without what is said of them."""
    section = re.search(r"<!-- cluster -->(.*?)<!-- /cluster -->", README.read_text(), re.DOTALL)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("rankdeck ")]
    return [re.split(r" {2,}", line)[0] for line in lines]


@pytest.mark.parametrize("line", commands_of_the_first_cluster())
def test_each_command_of_the_first_cluster_is_one(line: str) -> None:
    _, verb, *arguments = shlex.split(line)
    command = rankdeck.get_command(click.Context(rankdeck), verb)
    assert command is not None, verb
    assert command.make_context(verb, arguments) is not None


def test_the_walk_goes_from_nothing_to_nothing() -> None:
    verbs = [line.split()[1] for line in commands_of_the_first_cluster()]
    walk = ["init", "install", "doctor", "up", "run", "status", "attach", "stacks", "evidence", "stop", "restart"]
    assert verbs == [*walk, "restart", "down"]
