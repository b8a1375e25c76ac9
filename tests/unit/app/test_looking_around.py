"""What `rankdeck` alone finds on this machine before it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from app.commands.ssh_hosts import known_hosts
from app.commands.start import kept_files, look_around, start_settings
from app.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("RANKDECK_SSH_CONFIG", raising=False)
    return tmp_path


def test_a_home_without_anything_is_no_error(home: Path) -> None:
    facts = look_around()

    assert (facts.hosts, facts.kept) == (None, ())
    assert (facts.home, facts.python, facts.config_file) == (str(home), sys.executable, "~/.ssh/config")
    assert facts.evidence_dir == str(home / ".local/state/rankdeck/evidence")


LAB = '[cluster]\nname = "lab"\n[[node]]\nhost = "gpu1"\n[job.gpt]\ncommand = ["train.py"]\n'


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "lab" / "src").mkdir(parents=True)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(home / "lab" / "src")
    return home / "lab" / "rankdeck.toml"


def test_the_inventory_of_the_directory_is_found_and_named_as_a_person_does(project: Path) -> None:
    project.write_text(LAB)
    facts = look_around()

    assert (facts.inventory.name, facts.hosts_of_cluster) == ("lab", ["gpu1"])
    assert [job.name for job in facts.inventory.jobs] == ["gpt"]
    assert (facts.inventory_file, facts.inventory_trouble) == ("~/lab/rankdeck.toml", "")
    assert (facts.settings, facts.has_no_files) == ((), False)


def test_without_files_there_is_no_inventory_and_what_is_chosen_is_told_so(project: Path) -> None:
    project.write_text(LAB)
    facts = look_around(["console.theme=light"], has_files=False)

    assert (facts.has_cluster, facts.inventory_file, facts.inventory_trouble) == (False, "", "")
    assert facts.settings == ("--no-config", "--set=console.theme=light")
    assert start_settings(facts, ["console.theme=light"]).theme == "light"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[node]]\nhost = "gpu1"\nhots = 1\n', "rankdeck.toml:3: hots: no such key of node"),
        ("[[node]\n", "rankdeck.toml:1: it is not TOML"),
        ('[console]\ntheme = 3\n[[node]]\nhost = "a b"\n', "rankdeck.toml:4: host: "),
    ],
)
def test_an_inventory_that_is_wrong_is_told_and_keeps_no_screen_from_opening(
    project: Path, text: str, said: str
) -> None:
    project.write_text(text)
    facts = look_around()

    assert said in facts.inventory_trouble
    assert not facts.has_cluster
    assert start_settings(facts, ()).theme == "deck"


def test_settings_that_are_wrong_are_refused_all_the_same(project: Path, home: Path) -> None:
    project.write_text(LAB + "[console]\ntheme = 3\n")
    with pytest.raises(UsageError, match=r"console\.theme: 3 is none of"):
        start_settings(look_around(), ())
    project.write_text('[[node]]\nhots = "gpu1"\n')
    with pytest.raises(UsageError, match=r"--set: console\.theme"):
        start_settings(look_around(), ["console.theme=3"])
    (home / ".config" / "rankdeck").mkdir(parents=True)
    (home / ".config" / "rankdeck" / "config.toml").write_text("[console]\ntheme = 3\n")
    with pytest.raises(UsageError, match=r"config\.toml:2: console\.theme"):
        start_settings(look_around(), ())


def test_a_directory_that_is_gone_has_no_inventory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()

    facts = look_around()
    monkeypatch.chdir(home)

    assert (facts.has_cluster, facts.inventory_file, facts.inventory_trouble) == (False, "", "")


def test_hosts_come_from_the_configuration_and_from_what_it_includes(home: Path) -> None:
    ssh = home / ".ssh"
    (ssh / "conf.d").mkdir(parents=True)
    (ssh / "config").write_text(f"Include conf.d/*\nInclude ~/more {home}/third\nHost own\n")
    (ssh / "conf.d" / "b").write_text("Host b\n")
    (ssh / "conf.d" / "a").write_text("Host a\n")
    (home / "more").write_text("Host more\n")
    (home / "third").write_bytes(b"Host third\nHost \xff\n")
    os.mkfifo(ssh / "conf.d" / "pipe")

    assert known_hosts(ssh / "config") == ("a", "b", "more", "third", "own")


def test_what_is_no_file_has_no_hosts(home: Path) -> None:
    assert known_hosts(home) is None
    os.mkfifo(home / "pipe")
    assert known_hosts(home / "pipe") is None


def test_evidence_is_listed_the_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for age_s, name in ((300, "old.zip"), (5, "new.zip"), (1, "note.txt")):
        (tmp_path / name).write_bytes(b"x" * age_s)
        at = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (at, at))
    (tmp_path / "link.zip").symlink_to(tmp_path / "new.zip")
    (tmp_path / "directory.zip").mkdir()

    found = kept_files(tmp_path)

    assert [file.path for file in found] == [str(tmp_path / "new.zip"), str(tmp_path / "old.zip")]
    assert [file.size_bytes for file in found] == [5, 300]
    assert kept_files(tmp_path / "missing") == []


def test_looking_for_torch_does_not_import_it() -> None:
    proof = "import sys; from app.commands.start import look_around; look_around(); sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
