"""The test hosts themselves: reachable by OpenSSH, apart from each other, and gone without a trace."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from tests.support.hosts import Network, require_hosts


@pytest.fixture(autouse=True)
def hosts_are_possible() -> None:
    require_hosts()


def ssh(network: Network, host: str, command: str) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(network.ssh_config), "-o", "BatchMode=yes", host, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_hosts_are_reached_by_name_and_have_their_own_names_homes_and_addresses() -> None:
    with Network("h1", "h2") as network:
        said = {name: ssh(network, name, "hostname; echo $HOME; hostname -I").stdout.split() for name in ("h1", "h2")}

        assert said == {name: [name, str(host.home), host.address] for name, host in network.hosts.items()}


def test_a_changed_key_is_refused_by_openssh_and_a_stopped_sshd_refuses() -> None:
    with Network("h1") as network:
        network["h1"].change_host_key()
        assert "HOST IDENTIFICATION HAS CHANGED" in ssh(network, "h1", "true").stderr

        network["h1"].stop_sshd()
        assert "Connection refused" in ssh(network, "h1", "true").stderr


def test_nothing_of_a_network_is_left() -> None:
    with Network("h1") as network:
        host = network["h1"]
        ssh(network, "h1", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")

    assert not network.directory.exists()
    assert network.name not in psutil.net_if_addrs()
    assert f"{network.name}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(host.directory) in command] == []
