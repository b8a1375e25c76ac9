"""SSH against a real sshd on a host of its own: what gets through, what is refused, and that nothing hangs."""

from __future__ import annotations

import base64
import shlex
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import paramiko
import pytest

from app.errors import ExitCode, HostKeyError, HostUnreachableError, SessionError, UsageError
from app.ssh.config import Destination
from app.ssh.connection import ForwardingRefusedError, HostConnection
from app.ssh.login import connect
from app.ssh.transport import ssh_errors_of
from app.ssh.tunnel import Tunnel
from app.ssh.way import resolve
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIVEN_UP_S = 60.0
"""Far above the limits that are set, for a machine with other work; far below what TCP and programs would take."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1") as network:
        yield network


@contextmanager
def connected(network: Network, host: str = "h1") -> Iterator[HostConnection]:
    connection = connect(host, str(network.ssh_config))
    try:
        yield connection
    finally:
        connection.close()


def test_arguments_arrive_as_they_are_and_the_exit_code_comes_back(network: Network) -> None:
    arguments = ["", "$HOME", "a'b\"c", "new\nline", "`id`", "\udcff", "*"]
    program = "import sys, os; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:]))); sys.exit(7)"

    with connected(network) as connection:
        done = connection.run([sys.executable, "-c", program, *arguments], 20)

    assert done.exit_code == 7
    assert done.stdout.split(b"\0") == [argument.encode(errors="surrogateescape") for argument in arguments]


def test_what_a_host_says_is_safe_to_show(network: Network) -> None:
    with connected(network) as connection:
        done = connection.run(["sh", "-c", "printf 'first\\n\\033]0;title\\007 last' >&2; exit 1"], 10)

    assert done.error_text == "\\x1b]0;title\\x07 last"


def test_a_program_that_fills_both_outputs_does_not_hang(network: Network) -> None:
    program = "import os\nfor _ in range(40):\n  os.write(2, b'e' * 65536); os.write(1, b'o' * 8192)"

    with connected(network) as connection:
        done = connection.run([sys.executable, "-c", program], 30)

    assert (done.exit_code, len(done.stdout)) == (0, 40 * 8192)


def test_a_program_that_does_not_end_is_given_up_in_time(network: Network) -> None:
    began_s = time.monotonic()

    with connected(network) as connection, pytest.raises(HostUnreachableError, match="does not answer in time"):
        connection.run(["sleep", "1000"], 0.5)

    assert time.monotonic() - began_s < GIVEN_UP_S


def test_a_socket_of_the_host_appears_here(network: Network, tmp_path: Path) -> None:
    far, near = network.directory / "far.sock", network.directory / "near.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(far))  # hosts share this machine's files
        listener.listen()
        threading.Thread(target=echo_reversed, args=(listener, 3), daemon=True).start()
        with connected(network) as connection:
            tunnel = Tunnel(near, lambda: connection.open_socket(str(far)))
            try:
                for line in (b"abc", b"x" * 1_000_000, b""):
                    with socket.socket(socket.AF_UNIX) as client:
                        client.settimeout(20)
                        client.connect(str(near))
                        client.sendall(line)
                        client.shutdown(socket.SHUT_WR)
                        assert read_all(client) == line[::-1]
            finally:
                tunnel.close()


def echo_reversed(listener: socket.socket, times: int) -> None:
    for _ in range(times):
        peer, _ = listener.accept()
        with peer:
            peer.sendall(read_all(peer)[::-1])


def read_all(stream: socket.socket) -> bytes:
    chunks = []
    while chunk := stream.recv(65_536):
        chunks.append(chunk)
    return b"".join(chunks)


def test_a_socket_that_is_not_there_is_refused_and_a_tunnel_to_it_hangs_up(network: Network) -> None:
    with connected(network) as connection:
        with pytest.raises(ForwardingRefusedError):
            connection.open_socket("/no/such.sock")
        near = network.directory / "near.sock"
        tunnel = Tunnel(near, lambda: connection.open_socket("/no/such.sock"))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(near))
            assert client.recv(1) == b""
        tunnel.close()


def test_an_unknown_host_is_refused_with_its_fingerprint_and_what_to_do(network: Network) -> None:
    network.known_hosts.write_text("")
    printed = subprocess.run(
        ["ssh-keygen", "-lf", str(network["h1"].directory / "host_key.pub")], capture_output=True, text=True, check=True
    )

    with pytest.raises(HostKeyError, match="not a known host") as caught:
        connect("h1", str(network.ssh_config))

    assert printed.stdout.split()[1] in str(caught.value)
    assert "ssh h1" in caught.value.hint
    assert caught.value.exit_code == ExitCode.UNREACHABLE


def test_a_changed_key_is_refused_loudly_and_nothing_is_sent(network: Network) -> None:
    host = network["h1"]
    host.change_host_key()

    with pytest.raises(HostKeyError, match="HAS CHANGED") as caught:
        connect("h1", str(network.ssh_config))

    assert f"{network.known_hosts}:1" in str(caught.value)
    assert "Accepted publickey" not in (host.directory / "sshd.log").read_text()
    command = caught.value.hint.rpartition(": ")[2]
    assert command.startswith("ssh-keygen -R ")
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    with pytest.raises(HostKeyError, match="is not a known host"):
        connect("h1", str(network.ssh_config))


def test_a_connection_that_ends_during_the_login_is_told_in_words() -> None:
    with pytest.raises(HostUnreachableError, match="ended during the login: the host may hang"), ssh_errors_of("h1"):
        raise paramiko.SSHException("No existing session")


def test_a_key_on_the_list_of_revoked_ones_is_refused(network: Network) -> None:
    listed = network.directory / "revoked"
    network.configure(f"Host *\n  RevokedHostKeys {listed}")

    with pytest.raises(HostKeyError, match=r"RevokedHostKeys .*No such file"):
        connect("h1", str(network.ssh_config))

    listed.write_text("# none yet\n")
    with connected(network) as connection:
        assert connection.is_alive

    listed.write_text((network["h1"].directory / "host_key.pub").read_text())
    with pytest.raises(HostKeyError, match="IS REVOKED"):
        connect("h1", str(network.ssh_config))

    listed.unlink()
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(listed)], check=True)
    with pytest.raises(HostKeyError, match="list the keys as text"):
        connect("h1", str(network.ssh_config))


def test_a_host_certificate_authority_is_said_not_to_be_enough(network: Network) -> None:
    known = network.known_hosts.read_text()
    network.known_hosts.write_text("@cert-authority * " + " ".join(known.split()[1:3]) + "\n")

    with pytest.raises(HostKeyError) as caught:
        connect("h1", str(network.ssh_config))

    assert "certificates are not supported" in caught.value.hint


@pytest.mark.fault(row=17)
def test_a_closed_port_refuses_at_once(network: Network) -> None:
    network["h1"].stop_sshd()

    with pytest.raises(HostUnreachableError, match="refuses connections") as caught:
        connect("h1", str(network.ssh_config))

    assert "sshd" in caught.value.hint


def test_a_black_hole_is_given_up_in_time(network: Network) -> None:
    network["h1"].pull_cable()
    began_s = time.monotonic()

    with pytest.raises(HostUnreachableError, match=r"does not answer|cannot connect"):
        connect("h1", str(network.ssh_config))

    assert time.monotonic() - began_s < GIVEN_UP_S


@pytest.mark.fault(row=16)
def test_a_port_that_accepts_and_says_nothing_is_given_up_in_time(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ssh.login.LOGIN_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        network.configure(f"Host mute\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}")

        with pytest.raises(HostUnreachableError, match="mute"):
            connect("mute", str(network.ssh_config))


def test_a_name_nobody_knows_is_an_error_of_one_line(network: Network) -> None:
    network.configure("Host nowhere\n  HostName no-such-host.invalid")

    with pytest.raises(HostUnreachableError, match=r"cannot connect to no-such-host\.invalid"):
        connect("nowhere", str(network.ssh_config))


def test_a_key_that_the_host_does_not_take_is_named(network: Network) -> None:
    (network["h1"].directory / "authorized_keys").write_text("")

    with pytest.raises(HostUnreachableError, match=r"takes none of our keys .*console_key") as caught:
        connect("h1", str(network.ssh_config))

    assert "ssh-copy-id" in caught.value.hint


def test_a_locked_key_is_left_to_ssh_agent(network: Network) -> None:
    network.lock_key("secret words")

    with pytest.raises(HostUnreachableError, match="was offered no key") as caught:
        connect("h1", str(network.ssh_config))

    assert caught.value.hint == f"ssh-add {network.key}"


def test_a_fido_key_is_passed_over(network: Network) -> None:
    """Its private half, as ssh-keygen writes it, is a name and a handle for the device."""

    def string(text: bytes) -> bytes:
        return len(text).to_bytes(4, "big") + text

    kind = string(b"sk-ssh-ed25519@openssh.com")
    public = kind + string(b"k" * 32) + string(b"ssh:")
    private = b"\x01\x02\x03\x04" * 2 + public + b"\x01" + string(b"handle") + string(b"") + string(b"test")
    private += bytes(range(1, 1 + -len(private) % 8))
    blob = b"openssh-key-v1\0" + string(b"none") * 2 + string(b"") + (1).to_bytes(4, "big")
    text = base64.encodebytes(blob + string(public) + string(private)).decode()
    fido = network.directory / "id_ed25519_sk"
    fido.write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{text}-----END OPENSSH PRIVATE KEY-----\n")
    fido.chmod(0o600)
    network.configure(f"Host *\n  IdentityFile {fido}")

    with connected(network) as connection:
        assert connection.is_alive


@pytest.mark.parametrize("named_by", ["the environment", "IdentityAgent", "a public file"])
def test_a_key_of_ssh_agent_opens_the_door(network: Network, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    door = network.directory / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(door)], stdout=subprocess.DEVNULL)
    try:
        until(lambda: listens(door), 20, "ssh-agent listens")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(door))
        subprocess.run(["ssh-add", "-q", str(network.key)], check=True)
        if named_by == "IdentityAgent":
            network.configure(f"Host *\n  IdentityAgent {door}")
            monkeypatch.delenv("SSH_AUTH_SOCK")
        if named_by == "a public file":
            network.configure(
                f"Host *\n  IdentityFile {network.key.with_suffix('.pub').rename(network.directory / 'half')}"
            )
        network.key.unlink()  # the public part beside it says which key is meant: IdentitiesOnly

        with connected(network) as connection:
            assert connection.run(["hostname"], 10).stdout == b"h1\n"
        network.configure("Host *\n  IdentityAgent none")
        with pytest.raises(HostUnreachableError, match="was offered no key"):
            connect("h1", str(network.ssh_config))
    finally:
        agent.terminate()
        agent.wait(10)


def listens(path: Path) -> bool:
    """Return whether somebody listens at a socket, which is there before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_host_behind_another_is_reached_through_it() -> None:
    require_hosts()
    with Network("bastion", "inner") as network:
        network.configure("Host inner\n  ProxyJump bastion")

        with connected(network, "inner") as connection:
            assert connection.run(["hostname"], 10).stdout == b"inner\n"
            error_text = connection.run(["sh", "-c", "echo $SSH_CONNECTION"], 10).stdout.decode()

        assert error_text.split()[0] == network["bastion"].address


def test_a_jump_host_that_leads_to_itself_is_an_error(network: Network) -> None:
    network.configure("Host *\n  ProxyJump other,h1")

    with pytest.raises(HostUnreachableError):
        connect("h1", str(network.ssh_config))


def test_a_lost_connection_is_noticed(network: Network) -> None:
    with connected(network) as connection:
        assert connection.is_alive
        network["h1"].drop_sessions()

        until(lambda: not connection.is_alive, 10, "the connection is seen to be lost")
        with pytest.raises(HostUnreachableError):
            connection.run(["true"], 5)


def test_a_connection_that_breaks_under_a_program_is_not_taken_for_its_end(network: Network) -> None:
    begun = network.directory / "begun"

    def break_it() -> None:
        until(begun.exists, 20, "it runs")
        network["h1"].drop_sessions()

    watch = threading.Thread(target=break_it)
    watch.start()

    with connected(network) as connection, pytest.raises(HostUnreachableError, match=r"broke while sh ran|SSH failed"):
        connection.run(["sh", "-c", f"touch {begun}; sleep 1000"], 60)
    watch.join()


def test_a_program_that_a_signal_ends_has_ended(network: Network) -> None:
    with connected(network) as connection:
        assert connection.run(["sh", "-c", "kill -9 $$"], 20).exit_code != 0
        assert connection.is_alive


def test_a_name_that_can_be_no_name_is_an_error_of_one_line(network: Network) -> None:
    network.configure(f"Host odd\n  HostName {'x' * 64}.lab")

    with pytest.raises(HostUnreachableError, match="is not a name of a host"):
        connect("odd", str(network.ssh_config))


def test_a_configuration_that_ssh_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("NoSuchKeyword yes\n")

    with pytest.raises(UsageError, match=r"(?i)nosuchkeyword"):
        resolve(Destination("h1"), str(tmp_path / "config"))


def test_without_ssh_what_is_plain_is_read_and_the_rest_refused(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", "/nonexistent")
        with connected(network) as connection:
            assert connection.run(["hostname"], 10).stdout == b"h1\n"
        network.configure("Match host h1\n  User nobody")
        with pytest.raises(SessionError, match=r"ssh is not installed, and .*ssh_config has match"):
            connect("h1", str(network.ssh_config))
        with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
            connect("h1", str(tmp_path / "nowhere"))


def test_what_is_no_host_never_reaches_ssh() -> None:
    with pytest.raises(UsageError):
        connect("-oProxyCommand=touch /tmp/owned")
