"""The hosts that a person's configuration of ssh names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from app.cli.inventory_file import known_hosts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


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
