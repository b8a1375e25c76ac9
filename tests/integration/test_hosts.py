"""The test hosts themselves: gone without a trace."""

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


def test_nothing_of_a_network_is_left() -> None:
    with Network("h1") as network:
        host = network["h1"]
        ssh(network, "h1", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")

    assert not network.directory.exists()
    assert network.name not in psutil.net_if_addrs()
    assert f"{network.name}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(host.directory) in command] == []
