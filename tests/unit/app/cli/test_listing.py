"""What the verbs that print rows refuse, and what makes a shell complete them."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from app.cli.main import COMMANDS, rankdeck


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["logs", "--grep", "("], "unterminated subpattern"),
        (["logs", "--rank", "two"], "as in 0,3-5"),
        (["ranks", "--rank", "1 node=x"], "as in 0,3-5"),
        (["memory", "--rank", ""], "as in 0,3-5"),
        (["events", "--watch"], "--watch"),
        (["logs", "-n", "-1"], "-1"),
        (["completion", "tcsh"], "tcsh"),
        (["record"], "FILE"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_right(argv: list[str], words: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        rankdeck.main(argv, standalone_mode=False)

    assert words in caught.value.format_message()


@pytest.mark.parametrize("verb", ["ranks", "barriers", "memory", "events", "logs", "record", "completion", "status"])
def test_the_help_of_a_verb_has_an_example(verb: str) -> None:
    text = CliRunner().invoke(rankdeck, [verb, "--help"], catch_exceptions=False).stdout

    assert f"`rankdeck {verb}" in " ".join(text.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    printed = CliRunner().invoke(rankdeck, ["completion", shell], catch_exceptions=False).stdout

    assert f"_RANKDECK_COMPLETE={shell}_complete" in printed


@pytest.mark.parametrize(
    ("typed", "found"), [("rankdeck st", {"stacks", "start", "status", "stop"}), ("rankdeck logs --gr", {"--grep"})]
)
def test_commands_and_options_are_completed(typed: str, found: set[str]) -> None:
    environment = os.environ | {
        "_RANKDECK_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    program = "import sys; sys.argv[0] = 'rankdeck'; from app.cli.main import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert {line.partition(",")[2] for line in done.stdout.split()} == found
    assert found <= {*COMMANDS, "--grep"}
