"""What is known of a key without its passphrase."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ssh.keys import public_part

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
@pytest.mark.parametrize("passphrase", ["", "open it"])
def test_a_public_part_is_in_three_places(tmp_path: Path, kind: str, passphrase: str) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(key)], check=True)
    name, blob = key.with_suffix(".pub").read_text().split()[:2]
    expected = (name, base64.b64decode(blob))

    assert public_part(str(key)) == expected
    half = key.with_suffix(".pub").rename(tmp_path / "half")
    assert public_part(str(key)) == expected
    assert public_part(str(half)) == expected


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_old_form_does_not_tell(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "open it", "-f", str(key)], check=True)
    key.with_suffix(".pub").unlink()

    assert public_part(str(key)) is None
    assert public_part(str(tmp_path / "nowhere")) is None


@given(st.binary(max_size=200), st.booleans())
def test_any_file_tells_or_does_not(content: bytes, is_private: bool) -> None:
    if is_private:
        content = b"-----BEGIN X-----\n" + base64.b64encode(b"openssh-key-v1\0" + content) + b"\n-----END X-----\n"
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        part = public_part(file.name)

    assert part is None or part.kind
