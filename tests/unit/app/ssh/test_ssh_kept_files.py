"""What is read once for many hosts, and again when it is another."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from app.errors import HostKeyError
from app.ssh import config, way
from app.ssh.config import LocalUser, SshSettings, parse_settings, state_of
from app.ssh.keys import KeyLockedError, Keyring, KeyUnreadableError
from app.ssh.known_hosts import Verdict
from app.ssh.questions import Nobody

if TYPE_CHECKING:
    from pathlib import Path

ED = "ssh-ed25519"
KEY, OTHER = b"key-one", b"key-two"


def line(name: str, key: bytes) -> str:
    return f"{name} {ED} {base64.b64encode(key).decode()}\n"


def settings_of(known: Path, revoked: Path | None = None) -> SshSettings:
    printed = f"hostname gpu1\nport 22\nuser u\nuserknownhostsfile {known}\n"
    if revoked is not None:
        printed += f"revokedhostkeys {revoked}\n"
    return parse_settings("gpu1", printed, LocalUser("me", "/home/me"))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that were just written pass for old ones."""
    monkeypatch.setattr(config, "SETTLED_S", -1.0)


@pytest.mark.usefixtures("settled")
def test_known_hosts_are_read_once_and_again_after_any_change(tmp_path: Path) -> None:
    file, revoked = tmp_path / "known", tmp_path / "revoked"
    settings = settings_of(file, revoked)
    revoked.write_text("")
    assert way.known_hosts(settings).judge("gpu1", ED, KEY) is Verdict.UNKNOWN, "there is no such file yet"

    file.write_text(line("gpu1", KEY))
    first = way.known_hosts(settings)
    assert first.judge("gpu1", ED, KEY) is Verdict.KNOWN
    assert way.known_hosts(settings) is first

    file.write_text(line("gpu1", OTHER))
    assert way.known_hosts(settings).judge("gpu1", ED, KEY) is Verdict.CHANGED
    other = tmp_path / "other"
    other.write_text(line("gpu1", KEY))
    other.rename(file)
    assert way.known_hosts(settings).judge("gpu1", ED, KEY) is Verdict.KNOWN

    revoked.write_text(f"{ED} {base64.b64encode(KEY).decode()}\n")
    assert way.known_hosts(settings).judge("gpu1", ED, KEY) is Verdict.REVOKED
    revoked.unlink()
    with pytest.raises(HostKeyError, match="nothing was sent"):
        way.known_hosts(settings)
    file.unlink()
    revoked.write_text("")
    assert way.known_hosts(settings).judge("gpu1", ED, KEY) is Verdict.UNKNOWN


def test_a_file_that_was_just_written_is_read_again_since_a_change_might_not_show(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(line("gpu1", KEY))

    assert way.known_hosts(settings_of(file)) is not way.known_hosts(settings_of(file))
    assert not state_of(str(file)).is_settled
    assert state_of(str(file))._replace(changed_ns=time.time_ns() - 10**10).is_settled
    assert state_of(str(tmp_path / "none")).is_settled


@pytest.mark.usefixtures("settled")
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_key_is_read_once_and_again_when_the_file_is_another(tmp_path: Path) -> None:
    keyring, file = Keyring(Nobody()), tmp_path / "key"

    def write_key(passphrase: str = "") -> None:
        file.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", file], check=True)

    with pytest.raises(KeyUnreadableError):
        keyring.key_of(str(file))
    write_key()
    first = keyring.key_of(str(file))
    assert keyring.key_of(str(file)) is first

    write_key()
    assert keyring.key_of(str(file)) != first
    write_key("open sesame")
    with pytest.raises(KeyLockedError):
        keyring.key_of(str(file))
    file.unlink()
    with pytest.raises(KeyUnreadableError):
        keyring.key_of(str(file))
