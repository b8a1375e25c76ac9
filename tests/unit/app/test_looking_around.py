"""What `rankdeck` alone finds on this machine before it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from app.commands.ssh_hosts import known_hosts
from app.commands.start import kept_files, look_around

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
