"""A host that hangs up while keys are offered: refused by its own words, or lost. In which order keys are offered."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import paramiko
import pytest

from app.errors import HostUnreachableError, LoginRefusedError
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
        self.may_answer = threading.Event()
        self.may_answer.set()
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
        self.may_answer.wait(WAIT_S)
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


class Agent:
    """An ssh-agent; `keys` by their comments."""

    def __init__(self, door: Path, keys: dict[str, paramiko.PKey]) -> None:
        self.is_asked, self.may_sign = threading.Event(), threading.Event()
        self.may_sign.set()
        self._keys = keys
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(door))
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self.listener.accept()[0] as client:
            while head := client.recv(4):
                request = paramiko.Message(client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
                answer = paramiko.Message()
                if request.get_byte() == b"\x0b":
                    answer.add_byte(b"\x0c")
                    answer.add_int(len(self._keys))
                    for comment, key in self._keys.items():
                        answer.add_string(key.asbytes())
                        answer.add_string(comment)
                else:
                    self.is_asked.set()
                    self.may_sign.wait(WAIT_S)
                    blob, data = request.get_binary(), request.get_binary()
                    (signer,) = (key for key in self._keys.values() if key.asbytes() == blob)
                    answer.add_byte(b"\x0e")
                    answer.add_string(signer.sign_ssh_data(data).asbytes())
                with contextlib.suppress(OSError):  # nobody waits any more
                    client.sendall(len(answer.asbytes()).to_bytes(4, "big") + answer.asbytes())


@contextlib.contextmanager
def agent(folder: Path, *comments: str) -> Iterator[Agent]:
    keys: dict[str, paramiko.PKey] = {comment: paramiko.ECDSAKey.generate() for comment in comments}
    for comment, key in keys.items():
        (folder / f"{comment}.pub").write_text(f"{key.get_name()} {key.get_base64()} {comment}")
    daemon = Agent(folder / "agent", keys)
    with closing(daemon.listener):
        yield daemon
        daemon.may_sign.set()


@pytest.mark.parametrize(
    ("changes", "offered"), [({}, ["third", "first"]), ({"identities_only": True}, ["third", "second"])]
)
def test_keys_of_ssh_agent_that_a_file_names_are_offered_first_and_named_in_a_refusal(
    tmp_path: Path, changes: dict[str, bool], offered: list[str]
) -> None:
    files = [tmp_path / name for name in ("third", "missing", *(["second"] if changes else []))]
    wanted = msgspec.structs.replace(settings(*files), identity_agent=str(tmp_path / "agent"), **changes)

    with (
        agent(tmp_path, "first", "second", "third"),
        entering(TOO_MANY) as (client, _),
        pytest.raises(LoginRefusedError) as caught,
    ):
        authenticate(client, wanted, Keyring(Nobody()), asks=False)

    names = ", ".join(f"ecdsa-sha2-nistp256 {comment} of ssh-agent" for comment in offered)
    assert f"hangs up after {names}: Too many" in str(caught.value)


@pytest.mark.parametrize(
    ("late", "error", "text"),
    [
        ("user", LoginRefusedError, "takes none of our keys .*token of ssh-agent"),
        ("agent", HostUnreachableError, "token of ssh-agent has not signed in"),
        ("host", TimeoutError, None),
    ],
)
def test_a_user_has_time_to_touch_a_key_of_ssh_agent_and_the_host_has_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, error: type[Exception], text: str | None
) -> None:
    monkeypatch.setattr("app.ssh.authentication.ANSWER_WITHIN_S", 0.5 if late == "agent" else WAIT_S)
    wanted = msgspec.structs.replace(settings(), identity_agent=str(tmp_path / "agent"))

    with agent(tmp_path, "token") as daemon, entering(None) as (client, server):
        client.auth_timeout, began_s = 1.0, time.monotonic()
        if late == "host":
            server.may_answer.clear()
        else:
            daemon.may_sign.clear()
        if late == "user":
            threading.Timer(1.3, daemon.may_sign.set).start()
        with pytest.raises(error, match=text):
            authenticate(client, wanted, Keyring(Nobody()), asks=False)
        assert daemon.is_asked.is_set()
        assert time.monotonic() - began_s < WAIT_S / 2
        server.may_answer.set()
