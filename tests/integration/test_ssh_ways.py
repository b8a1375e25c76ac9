"""Ways to a host that lead through something: jump hosts, and programs of ~/.ssh/config."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import psutil
import pytest

from app.errors import HostKeyError, HostUnreachableError, UsageError
from app.ssh.config import Destination
from app.ssh.login import Logins, connect
from app.ssh.way import resolve
from tests.support.hosts import Network, require_hosts
from tests.support.people import LocalUser
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.ssh.connection import HostConnection

RELAY = """
import os, socket, subprocess, sys, threading
helper = subprocess.Popen(["sleep", "1000"])  # a program of its own, as some leave
print("connecting", file=sys.stderr, flush=True)
far = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while chunk := os.read(0, 65536):
        far.sendall(chunk)
    far.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while chunk := far.recv(65536):
    os.write(1, chunk)
"""
"""What `nc` does."""


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("bastion", "h1", "h2", sshd_options=getattr(request, "param", ())) as network:
        yield network


def relay_of(network: Network) -> str:
    """Return the beginning of a ProxyCommand."""
    program = network.directory / "relay.py"
    program.write_text(RELAY)
    return shlex.join([sys.executable, str(program)])


def name_of(connection: HostConnection) -> str:
    return connection.run(["hostname"], 20).stdout.decode().strip()


@pytest.mark.parametrize(
    ("network", "option", "is_compressed"),
    [
        ((), "Compression yes", True),
        ((), "Compression no", False),
        (("Compression no",), "Compression yes", False),
    ],
    indirect=["network"],
)
def test_a_connection_is_compressed_where_both_sides_want_it(
    network: Network, option: str, is_compressed: bool
) -> None:
    received = network.directory / "received"
    network.configure(f"Host h1\n  {option}\n  ProxyCommand {relay_of(network)} %h %p | tee {received}")
    with closing(connect("h1", str(network.ssh_config))) as connection:
        assert connection.run(["head", "-c", "900000", "/dev/zero"], 30).stdout == bytes(900_000)

    num_bytes = received.stat().st_size
    assert num_bytes < 100_000 if is_compressed else num_bytes > 900_000


def test_a_proxy_command_leads_to_the_host_and_ends_with_the_connection(network: Network) -> None:
    network.configure(f"Host h1\n  ProxyCommand {relay_of(network)} %h %p")
    with closing(connect("h1", str(network.ssh_config))) as connection:
        assert name_of(connection) == "h1"
        started = psutil.Process().children(recursive=True)
        relays = [process for process in started if "relay.py" in " ".join(process.cmdline())]
        helpers = [child for relay in relays for child in relay.children()]
        assert [helper.name() for helper in helpers] == ["sleep"]
        assert len(connection.run(["head", "-c", "900000", "/dev/zero"], 30).stdout) == 900_000

    until(lambda: not any(process.is_running() for process in relays), 10, "the program has ended")
    until(
        lambda: not any(process.is_running() and process.status() != "zombie" for process in helpers),
        10,
        "what it had started has ended, too",
    )


def test_a_proxy_command_is_told_names_port_and_user(network: Network) -> None:
    said = network.directory / "said"
    network.configure(
        f"Host h1\n  ProxyCommand echo %n %h %p %r %% > {shlex.quote(str(said))}; exec {relay_of(network)} %h %p",
    )
    # As ssh has it: the first command becomes the shell's own process.
    with pytest.raises(HostUnreachableError, match=r"ProxyCommand has ended \(exit code 0\): it printed nothing"):
        connect("h1", str(network.ssh_config))

    assert said.read_text().split() == ["h1", network["h1"].address, "22", "root", "%"]


def test_a_proxy_command_that_fails_is_told_in_its_own_words(network: Network) -> None:
    network.configure("Host h1\n  ProxyCommand sh -c 'echo first; printf \"no \\033[2Jway\\n\" >&2; exit 7' %h")

    with pytest.raises(HostUnreachableError, match=r"ProxyCommand has ended \(exit code 7\): no \\x1b\[2Jway"):
        connect("h1", str(network.ssh_config))


def test_a_proxy_command_that_says_nothing_is_given_up_and_killed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ssh.login.LOGIN_TIMEOUT_S", 0.3)
    deaf = network.directory / "deaf.sh"
    deaf.write_text("trap '' HUP TERM\necho $$ >deaf.pid\nsleep 1000\n")
    network.configure(f"Host h1\n  ConnectTimeout 5\n  ProxyCommand sh -c 'cd {network.directory}; . ./deaf.sh'")

    with pytest.raises(HostUnreachableError, match="h1"):
        connect("h1", str(network.ssh_config))

    assert not psutil.pid_exists(int((network.directory / "deaf.pid").read_text()))


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ("ProxyCommand touch {ran}; nc %h %z", UsageError, "has %z"),
        ("HostName $(touch${{IFS}}{ran})\n  ProxyCommand nc %h %p", UsageError, "is no plain name"),
        ("User -oProxyCommand=touch\n  ProxyCommand ssh %r", UsageError, "is no plain name"),
        ("ProxyUseFdpass yes\n  ProxyCommand touch {ran}", HostUnreachableError, "ProxyUseFdpass is not supported"),
    ],
)
def test_what_could_mean_something_to_a_shell_never_gets_there(
    network: Network, config: str, kind: type[Exception], words: str
) -> None:
    ran = network.directory / "ran"
    network.configure("Host h1\n  " + config.format(ran=ran))

    with pytest.raises(kind, match=words):
        connect("h1", str(network.ssh_config))

    assert not ran.exists()


def test_a_jump_host_may_have_a_proxy_command(network: Network) -> None:
    network.configure(f"Host h1\n  ProxyJump bastion\nHost bastion\n  ProxyCommand {relay_of(network)} %h %p")

    with closing(connect("h1", str(network.ssh_config))) as connection:
        assert name_of(connection) == "h1"
        address = connection.run(["sh", "-c", "echo $SSH_CONNECTION"], 20).stdout.decode().split()[0]

    assert address == network["bastion"].address


def test_several_jump_hosts_are_passed_in_their_order(network: Network) -> None:
    network.configure("Host h2\n  ProxyJump bastion,h1\nHost h1\n  ProxyCommand false")

    with closing(connect("h2", str(network.ssh_config))) as connection:
        assert name_of(connection) == "h2"
        address = connection.run(["sh", "-c", "echo $SSH_CONNECTION"], 20).stdout.decode().split()[0]

    assert address == network["h1"].address, "its own ProxyCommand is for who goes there straight"
    assert network["bastion"].num_logins() == 1


@pytest.mark.parametrize("network", [("MaxSessions 1",)], indirect=True)
def test_hosts_behind_the_same_jump_host_share_one_login_there(network: Network) -> None:
    network.configure("Host h1 h2\n  ProxyJump bastion")
    logins = Logins()
    made: list[HostConnection] = []

    def go(host: str) -> None:
        made.append(logins.connect(host, str(network.ssh_config)))

    threads = [threading.Thread(target=go, args=(host,)) for host in ("h1", "h2", "h1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(map(name_of, made)) == ["h1", "h1", "h2"]
    assert network["bastion"].num_logins() == 1
    for connection in made[:2]:
        connection.close()
        connection.close()  # twice is once
    assert name_of(made[2])
    made[2].close()

    with closing(logins.connect("h1", str(network.ssh_config))) as again:
        assert name_of(again) == "h1"
    assert network["bastion"].num_logins() == 2, "it had ended with the last that needed it"


@pytest.mark.fault(row=22)
def test_a_jump_host_that_was_lost_is_gone_to_again(network: Network) -> None:
    network.configure("Host h1 h2\n  ProxyJump bastion")
    logins = Logins()
    with closing(logins.connect("h1", str(network.ssh_config))) as lost:
        network["bastion"].drop_sessions()
        until(lambda: not lost.is_alive, 10, "the loss is noticed")

        with closing(logins.connect("h1", str(network.ssh_config))) as again:
            assert name_of(again) == "h1"


def test_who_waits_for_a_jump_host_hears_why_there_is_none(network: Network) -> None:
    network.configure("Host h1 h2\n  ProxyJump bastion")
    network.known_hosts.write_text("")
    local_user = LocalUser(["no"])
    logins = Logins(local_user)
    errors: list[HostKeyError] = []

    def go(host: str) -> None:
        try:
            logins.connect(host, str(network.ssh_config))
        except HostKeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(host,)) for host in ("h1", "h2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert ["bastion: " in str(error) for error in errors] == [True, True]
    assert len(local_user.asked) == 1


def test_a_jump_host_that_cannot_reach_the_host_says_so(network: Network) -> None:
    network["h1"].stop_sshd()
    network.configure("Host h1\n  ProxyJump bastion")

    with pytest.raises(HostUnreachableError, match=rf"bastion: it cannot reach {network['h1'].address} port 22: "):
        connect("h1", str(network.ssh_config))


def test_jump_hosts_that_lead_to_each_other_are_an_error_of_one_line(network: Network) -> None:
    network.configure("Host h1\n  ProxyJump bastion\nHost bastion\n  ProxyJump h2\nHost h2\n  ProxyJump bastion")

    with pytest.raises(HostUnreachableError, match="leads to the host itself"):
        connect("h1", str(network.ssh_config))


@pytest.mark.fault(row=22)
def test_dead_hosts_are_noticed_within_ten_seconds_whatever_lies_between(network: Network) -> None:
    """Cut off, cut off behind a jump host that lives, and with an sshd that stands still while its kernel answers."""
    network.configure(f"Host behind\n  HostName {network['h2'].address}\n  ProxyJump bastion")
    config = str(network.ssh_config)
    cut, behind, still = connect("h1", config), connect("behind", config), connect("bastion", config)
    bystander = connect("bastion", config)
    try:
        network["h1"].pull_cable()
        network["h2"].pull_cable()
        began_s = time.monotonic()
        until(lambda: not cut.is_alive and not behind.is_alive, 60, "two are seen to be dead")
        assert time.monotonic() - began_s < 30, "ten, and some for a machine with other work; TCP would take minutes"
        assert bystander.is_alive
        assert still.is_alive
        network["bastion"].freeze_sessions()
        until(lambda: not still.is_alive and not bystander.is_alive, 60, "sshd is seen to stand still")
    finally:
        for connection in (cut, behind, still, bystander):
            connection.close()


def test_what_only_ssh_knows_to_read_is_read(network: Network, tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host inner\n  HostName 10.9.8.7\n  Port 2200\n")
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path}/more\n"
        'Match host 10.9.8.7 exec "true"\n  User ada\n'
        'Match host 10.9.8.7 exec "false"\n  User nobody\n'
        f"Match originalhost inner\n  HostKeyAlias {network['h1'].address}\n  IdentitiesOnly yes\n"
    )

    settings = resolve(Destination("inner"), str(config))

    assert (settings.hostname, settings.port, settings.user) == ("10.9.8.7", 2200, "ada")
    assert settings.key_name == network["h1"].address
    assert settings.identities_only


def test_a_host_key_alias_is_the_name_that_a_key_is_known_by(network: Network) -> None:
    network.known_hosts.write_text(network.known_hosts.read_text().replace(network["h1"].address, "lab-one"))
    with pytest.raises(HostKeyError, match="is not a known host"):
        connect("h1", str(network.ssh_config))
    network.configure("Host h1\n  HostKeyAlias LAB-one")

    with closing(connect("h1", str(network.ssh_config))) as connection:
        assert name_of(connection) == "h1"
