"""What `rankdeck` alone does: the console of the nearest cluster, else ten lines on what to type first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from app.cli import inventory_file
from app.cli.main import COMMANDS, rankdeck
from app.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

LAB = '[cluster]\nname = "lab"\n[[node]]\nhost = "gpu1"\n[job.gpt]\ncommand = ["train.py"]\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rankdeck.toml to be written, in the directory above this one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("RANKDECK_CONFIG", raising=False)
    (tmp_path / "lab" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "lab" / "src")
    return tmp_path / "lab" / "rankdeck.toml"


def said(*options: str) -> list[str]:
    """Return the lines that are printed where no console opens."""
    result = CliRunner().invoke(rankdeck, options, catch_exceptions=False, standalone_mode=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_without_a_cluster_ten_lines_say_what_to_type_first(project: Path) -> None:
    lines = said()

    assert len(lines) == 10
    assert max(map(len, lines)) < 80
    assert "no rankdeck.toml here, nor above" in lines[1]
    assert {verb for line in lines for verb in re.findall(r"^  rankdeck ([a-z]+)", line)} <= COMMANDS.keys()
    assert not project.exists()


@pytest.mark.parametrize("text", [LAB, '[cluster]\nrelay = "login1"\n'], ids=["hosts", "relay"])
def test_the_nearest_cluster_above_is_attached_to_with_the_settings_that_were_typed(project: Path, text: str) -> None:
    project.write_text(text)

    assert inventory_file.console_argv([]) == ("attach",)
    assert inventory_file.console_argv(["console.theme=light"]) == ("attach", "--set=console.theme=light")


def test_a_file_that_names_no_hosts_is_named(project: Path) -> None:
    project.write_text('[console]\ntheme = "light"\n')

    lines = said("--set", "console.theme=plain")

    assert len(lines) == 10
    assert f"{project} names no hosts" in lines[1]


def test_without_files_the_cluster_is_left_out_and_that_is_said(project: Path) -> None:
    project.write_text(LAB)

    assert "no rankdeck.toml: --no-config is set" in said("--no-config")[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[node]]\nhost = "gpu1"\nhots = 1\n', "rankdeck.toml:3: hots: no such key of node"),
        ("[[node]\n", "rankdeck.toml:1: it is not TOML"),
        (f"{LAB}[console]\ntheme = 3\n", "rankdeck.toml:8: console.theme: 3 is none of"),
    ],
)
def test_a_file_that_is_wrong_is_refused(project: Path, text: str, told: str) -> None:
    project.write_text(text)

    with pytest.raises(UsageError) as caught:
        said()

    assert told in str(caught.value)


def test_settings_that_are_wrong_are_refused_where_no_console_opens_too(project: Path) -> None:
    assert not project.exists()

    with pytest.raises(UsageError, match=r"--set: console\.theme"):
        said("--set", "console.theme=3")


def test_a_directory_that_is_gone_has_no_cluster(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = project.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    lines = said()
    monkeypatch.chdir(project.parent)

    assert "no rankdeck.toml here, nor above" in lines[1]
