"""A host that hangs up while keys are offered: refused by its own words, or lost."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import paramiko
import pytest

from app.errors import LoginRefusedError
from app.ssh.authentication import authenticate
from app.ssh.config import SshSettings
from app.ssh.keys import Keyring
from app.ssh.questions import Nobody
from app.ssh.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20.0
MAX_TRIES = 2
TOO_MANY = (2, b"Too many\x1b authentication failures")


class Refusing(paramiko.ServerInterface):
    """Takes no key, and hangs up at the last attempt in place of an answer, as sshd does."""

    def __init__(self, stream: socket.socket, words: tuple[int, bytes] | None) -> None:
        self.num_tried = 0
        self._words = words
        self._stream = stream
        self.transport = paramiko.Transport(stream)
        self.transport.add_server_key(paramiko.ECDSAKey.generate())
        self.transport.start_server(event=threading.Event(), server=self)

    def get_allowed_auths(self, username: str) -> str:
        del username
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        del username, key
        self.num_tried += 1
        if self.num_tried == MAX_TRIES:
            if self._words is not None:
                farewell = paramiko.Message()
                farewell.add_byte(paramiko.common.cMSG_DISCONNECT)
                farewell.add_int(self._words[0])
                farewell.add_string(self._words[1])
                farewell.add_string("")
                self.transport._send_message(farewell)  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
        return paramiko.common.AUTH_FAILED


def settings(*files: Path) -> SshSettings:
    words = {name: "" for name, kind in SshSettings.__annotations__.items() if kind == "str"}
    flags = dict.fromkeys(("identities_only", "hands_over_socket", "hashes_known_hosts", "is_compressed"), False)
    others = {"known_hosts_files": (), "revoked_keys_files": (), "strictness": "ask", "connect_timeout_s": None}
    known = {"alias": "h1", "hostname": "host", "user": "me", "port": 22, "methods": ("publickey",), "num_prompts": 3}
    return SshSettings(**{**words, **flags, **others, **known, "identity_files": tuple(map(str, files))})  # type: ignore[arg-type]


@contextlib.contextmanager
def entering(words: tuple[int, bytes] | None) -> Iterator[tuple[Transport, Refusing]]:
    near, far = socket.socketpair()
    server = Refusing(far, words)
    with closing(server.transport), closing(Transport(near)) as client:
        client.start_client(timeout=WAIT_S)
        yield client, server


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"key{number}" for number in range(MAX_TRIES + 1)]
    for file in files:
        paramiko.ECDSAKey.generate().write_private_key_file(str(file))
    return files


@pytest.mark.parametrize("words", [TOO_MANY, (12, b"Too many connections"), None])
def test_a_login_that_ends_in_the_host_s_words_is_refused_and_one_that_is_lost_is_not(
    words: tuple[int, bytes] | None, keys: list[Path]
) -> None:
    is_refused = words is TOO_MANY
    with (
        entering(words) as (client, server),
        pytest.raises(LoginRefusedError if is_refused else paramiko.AuthenticationException) as caught,
    ):
        authenticate(client, settings(*keys), Keyring(Nobody()), asks=False)

    assert server.num_tried == MAX_TRIES
    if is_refused:
        assert str(caught.value).startswith(f"h1: me@host hangs up after {keys[0]}, {keys[1]}: Too many")
        assert str(caught.value).endswith(" authentication failures")
        assert "\x1b" not in str(caught.value)


def test_a_key_in_two_places_is_offered_once(keys: list[Path]) -> None:
    shutil.copy(keys[0], keys[1])

    with entering(TOO_MANY) as (client, server), pytest.raises(LoginRefusedError, match="takes none of our keys"):
        authenticate(client, settings(*keys[:2]), Keyring(Nobody()), asks=False)

    assert server.num_tried == 1
