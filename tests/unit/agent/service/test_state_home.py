"""Where an agent lives when nobody says where."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import StateDirError
from agent.service.systemd import unit_text
from agent.state_dir import KEPT_SLURM_DIRS, StateDir, default_directory, remove_old_slurm_dirs
from tests.unit.agent.wire.test_slurm_step import STEP


def test_the_state_home_of_the_desktop_rules_is_honoured() -> None:
    assert default_directory({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "gpu1") == Path("/s/rankdeck/gpu1")


@pytest.mark.parametrize("state_home", ["", "relative/path"])
def test_without_one_it_is_below_the_home(state_home: str) -> None:
    environ = {"XDG_STATE_HOME": state_home, "HOME": "/h"}

    assert default_directory(environ, "gpu1") == Path("/h/.local/state/rankdeck/gpu1")


def test_hosts_that_share_a_home_do_not_share_a_directory() -> None:
    assert default_directory({"HOME": "/h"}, "gpu1") != default_directory({"HOME": "/h"}, "gpu2")


def test_an_agent_in_a_slurm_step_has_a_directory_for_that_job() -> None:
    assert default_directory({"HOME": "/h", **STEP}, "gpu1") == Path("/h/.local/state/rankdeck/gpu1-slurm-4711")


def test_of_earlier_slurm_jobs_the_latest_directories_stay_and_those_that_are_served(tmp_path: Path) -> None:
    names = [f"gpu1-slurm-{number}" for number in range(KEPT_SLURM_DIRS + 3)]
    for age, name in enumerate(reversed(names)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    others = ["gpu1", "gpu10-slurm-1", "gpu1-slurm-own", "relay-slurm-1"]
    for name in others:
        (tmp_path / name).mkdir()
    served = StateDir(tmp_path / names[0])
    served.path.chmod(0o700)
    served.open()
    os.utime(served.path, (1, 1))

    remove_old_slurm_dirs(tmp_path / "gpu1")
    assert len([*tmp_path.iterdir()]) == len(names) + len(others)
    remove_old_slurm_dirs(tmp_path / "gpu1-slurm-own")

    served.close(remove_all=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], *names[-KEPT_SLURM_DIRS:], *others])


@pytest.mark.parametrize(
    ("environ", "hostname", "words"),
    [
        ({"HOME": "/" + "h" * 90}, "gpu1", "the kernel takes 107"),
        ({}, "gpu1", "give --dir"),
        ({"HOME": "/h"}, "../gpu1", "give --dir"),
        ({"HOME": "/h"}, "", "give --dir"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(environ: dict[str, str], hostname: str, words: str) -> None:
    with pytest.raises(StateDirError, match=words) as caught:
        default_directory(environ, hostname)

    assert "\n" not in str(caught.value)


def test_an_unusual_state_home_goes_into_the_unit() -> None:
    text = unit_text("/opt/my env/50%/$python", {"XDG_STATE_HOME": "/data/a b"})

    parsed = configparser.RawConfigParser(strict=False)
    parsed.read_string(text)
    assert parsed["Service"]["ExecStart"] == '"/opt/my env/50%%/$$python" -P -m agent serve'
    assert parsed["Service"]["Environment"] == '"XDG_STATE_HOME=/data/a b"'


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_a_unit_has_one_command_whatever_the_interpreter_is_called(python: str) -> None:
    usual = len(unit_text("python", {}).split("\n"))

    assert len(unit_text(python, {}).split("\n")) == usual
