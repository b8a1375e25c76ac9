"""`rankdeck config`, and what any command says of settings that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from app.cli import hosts
from app.cli.config import config
from app.cli.main import rankdeck
from app.errors import ExitCode, UsageError
from app.tui.actions import ACTIONS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where a person's file is; there is none yet, and no project around."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rankdeck" / "config.toml"
    path.parent.mkdir()
    return path


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(config, arguments)


def test_it_lists_every_setting_with_its_value(user_file: Path) -> None:
    user_file.write_text('[console]\ntheme = "light"\n[keys]\nfreeze = ["z", "F6"]\n')
    words = [line.split() for line in asked().stdout.splitlines()]

    assert ["console.theme", "light"] in [line[:2] for line in words]
    assert ["keys.freeze", "z", "F6", "Freeze", "picture"] in words
    assert [line[0] for line in words if line[0].startswith("keys.")] == [f"keys.{action.name}" for action in ACTIONS]
    assert all(len(line) > 2 for line in words)


def test_it_shows_where_each_comes_from(user_file: Path) -> None:
    user_file.write_text('[console]\n\ntheme = "light"\n')
    printed = CliRunner(env={"RANKDECK_ASCII": "1"}).invoke(config, ["--show-origin", "--set", "thresholds.stall_s=20"])

    rows = {line.split()[0]: line.split()[1:] for line in printed.stdout.splitlines()}
    assert rows["console.theme"] == ["light", f"{user_file}:3"]
    assert rows["console.ascii"] == ["true", "RANKDECK_ASCII"]
    assert rows["thresholds.stall_s"] == ["20", "--set"]
    assert rows["thresholds.silent_s"] == ["2", "default"]


def test_it_lists_the_actions_with_their_keys(user_file: Path) -> None:
    user_file.write_text('[keys]\nhelp = "F3"\n')
    rows = asked("--keys").stdout.splitlines()

    assert [row.split()[0] for row in rows] == [action.name for action in ACTIONS]
    assert [row.split() for row in rows if row.startswith("help ")] == [["help", "F3", "Show", "every", "key."]]


def test_it_prints_the_same_as_one_object(user_file: Path) -> None:
    user_file.write_text('[console]\ntheme = "light"\n')
    told = json.loads(asked("--json").stdout)

    assert told["schema"] == 1
    assert told["files"] == [str(user_file)]
    (theme,) = [row for row in told["settings"] if row["name"] == "console.theme"]
    assert (theme["value"], theme["default"], theme["origin"], theme["line"]) == ("light", "deck", str(user_file), 2)
    (stall,) = [row for row in told["settings"] if row["name"] == "thresholds.stall_s"]
    assert (stall["value"], stall["origin"], stall["line"]) == (10.0, "default", None)


def test_check_says_all_that_is_wrong_and_else_that_all_is_well(user_file: Path) -> None:
    assert asked("--check").stdout == "the settings are well: no file\n"
    user_file.write_text("[console]\n")
    assert asked("--check").stdout == f"the settings are well: {user_file}\n"

    user_file.write_text('[console]\ntheme = "x"\nascii = "y"\n')
    printed = asked("--check")
    assert printed.exit_code == ExitCode.USAGE
    assert printed.stdout == ""
    assert [line.partition(": ")[2].partition(": ")[0] for line in printed.stderr.splitlines()] == [
        f"{user_file}:2",
        f"{user_file}:3",
    ]
    as_json = asked("--check", "--json")
    assert as_json.exit_code == ExitCode.USAGE
    assert len(json.loads(as_json.stdout)["troubles"]) == 2
    assert asked("--check", "--no-config").exit_code == ExitCode.WELL


@pytest.mark.parametrize(
    "command",
    [
        ["config"],
        ["demo", "--headless"],
        ["run", "--host", "gpu1", "--", "train.py"],
        ["attach", "--host", "gpu1"],
        ["status", "--host", "gpu1"],
        ["evidence", "demo", "--host", "gpu1"],
        ["replay", "x.zip"],
        ["serve", "--", "demo"],
    ],
)
def test_every_command_that_takes_settings_refuses_wrong_ones_before_it_does_anything(
    command: list[str], user_file: Path
) -> None:
    user_file.write_text("[console]\ntheme = 3\n")

    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(rankdeck, command, catch_exceptions=False, standalone_mode=False)

    assert str(caught.value) == f"{user_file}:2: console.theme: 3 is none of deck, light, contrast, ansi, plain"
    assert caught.value.hint == "--no-config goes on without the files"


def test_a_broken_file_is_one_line_and_no_config_goes_on_without_it(user_file: Path) -> None:
    user_file.write_text("[console]\ntheme = light\n")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "app", "replay", "nothing.zip", *options]
        path = os.pathsep.join(sys.path)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
        )

    refused, went_on = run(), run("--no-config")

    assert (refused.returncode, refused.stdout) == (ExitCode.USAGE, "")
    assert refused.stderr.startswith(f"rankdeck: {user_file}:2: it is not TOML: ")
    assert refused.stderr.endswith(" (--no-config goes on without the files)\n")
    assert refused.stderr.count("\n") == 1
    assert went_on.stderr.startswith(
        "rankdeck: nothing.zip cannot be read: No such file or directory (rankdeck evidence "
    )


def test_before_a_command_settings_are_refused_and_it_is_said_where_they_stand(user_file: Path) -> None:
    user_file.write_text("[console]\ntheme = 3\n")
    for options in (["--no-config"], ["--set", "console.theme=light"]):
        with pytest.raises(UsageError, match="--set and --no-config stand behind the command"):
            CliRunner().invoke(rankdeck, [*options, "attach"], catch_exceptions=False, standalone_mode=False)


def test_each_page_of_serve_gets_the_settings_that_serve_got(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    async def serve_nothing(argv: list[str], title: str, port: int) -> ExitCode:
        lines.append(" ".join(argv))
        return ExitCode.WELL

    monkeypatch.setattr(hosts, "_serve", serve_nothing)
    user_file.write_text("[console]\ntheme = 3\n")
    options = ["--no-config", "--set", "console.theme=light", "--", "attach", "--host", "gpu1"]

    printed = CliRunner().invoke(hosts.serve, options, catch_exceptions=False)

    assert printed.exit_code == ExitCode.WELL
    assert lines[0].endswith(" app attach --no-config --set=console.theme=light --read-only --host gpu1")


def test_the_check_finds_what_is_wrong_in_the_inventory_too(user_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rankdeck.toml").write_text(
        '[threshold]\nstall_s = 60\n[[nodes]]\nhost = "h1"\n[thresholds]\nstall_s = 0\n'
    )
    found = CliRunner().invoke(config, ["--check"])

    assert not user_file.exists()
    assert found.exit_code == ExitCode.USAGE
    assert [
        word for word in ("threshold: no such table", "nodes: no such table", "stall_s") if word not in found.stderr
    ] == []
    (tmp_path / "rankdeck.toml").write_text('[[node]]\nhost = "h1"\n')
    assert asked("--check").exit_code == ExitCode.WELL
