"""Hosts for tests: network, process, mount, IPC and UTS namespaces of this machine, each with an sshd of its own.

A host shares this machine's files, but has its own name, address, home, /dev/shm and process tree; its sshd has its own
host key and takes one key, made for the test. The switch between them has a namespace of its own, since this machine's
network stack would go on hearing a host whose cable is pulled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from tests.support.poor_link import PoorLink
from tests.support.ranks import descendants, still_runs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

PASSWORD = "secret words"
"""Of root on each host, for those whose sshd takes passwords."""
_PASSWORD_HASH = "$6$rankdeck$tUuYp.n6MrpwolUPjX3d19n5T4TIuW6h4EKALmLEbSivj6S0rTwpb5TTtrzZUMTwQcGRGHD0wcMjsqqd58WY1/"
"""As `openssl passwd -6` prints it."""
BOOT_S = 60.0
END_S = 60.0
SSHD_NAMES = frozenset({"sshd", "sshd-session", "sshd-auth"})
"""A session is a process of its own name from OpenSSH 9.8, a login from 10.0."""
SSHD = "/usr/sbin/sshd"
"""Wants to be called by its whole path."""

_BOOT = r"""
set -e
hostname "$RD_NAME"
mount --make-rprivate /
mount --bind "$RD_DIR/passwd" /etc/passwd
mount --bind "$RD_DIR/shadow" /etc/shadow
mount --bind "$RD_DIR/etc_hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind "$RD_DIR/boot_id" /proc/sys/kernel/random/boot_id
mkdir -p /run/sshd
cd /
set +e
trap : TERM INT HUP
/usr/sbin/sshd -f "$RD_DIR/sshd_config" -E "$RD_DIR/sshd.log"
while :; do sleep 3600 & wait $!; done
"""
"""Process 1 of a host: collects what its parents leave, and is all that has to be killed."""

_SSHD_CONFIG = """
Port 22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile {directory}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
LogLevel VERBOSE
"""

_NO_FORWARDING = "AllowStreamLocalForwarding no\n"


@cache
def why_no_hosts() -> str:
    """Return why this machine can have none; empty if it can."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (iproute2, util-linux, openssh-client)"
    if not Path(SSHD).exists():
        return "sshd is not installed (openssh-server)"
    if os.geteuid() != 0:
        return "not root: namespaces and sshd want it"
    name = f"rdq{os.getpid()}"
    tried = _try("ip", "netns", "add", name)
    if tried:
        return tried
    try:
        return _try("ip", "-n", name, "link", "add", "b0", "type", "bridge") or _try(
            "unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "true"
        )
    finally:
        _try("ip", "netns", "del", name)


def require_hosts() -> None:
    """Skip a test where there can be no hosts; where CI promises them, fail it."""
    if reason := why_no_hosts():
        if os.environ.get("CI"):
            pytest.fail(f"CI has no hosts for this test: {reason}")
        pytest.skip(reason)


class Host:
    """A machine that SSH reaches."""

    def __init__(self, network: Network, name: str, number: int, sshd_options: Sequence[str]) -> None:
        self.name = name
        self.address = f"{network.subnet}.{10 + number}"
        self.directory = network.directory / name
        self.home = self.directory / "home"
        self._network = network
        self._netns = f"{network.name}-{name}"
        self._port = f"{network.name}{number}"
        self._number = number
        self.link: PoorLink | None = None
        """Of a network with poor links."""
        self._sshd_options = tuple(sshd_options)
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None

    def boot(self) -> None:
        """Start it, for the first time or after `cut_power`: then with what is on its disk."""
        if not self.home.exists():
            self.home.mkdir(mode=0o700, parents=True)
            self._write_files()
        (self.directory / "sshd.pid").unlink(missing_ok=True)
        (self.directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
        switch = self._network.switch
        _ip("netns", "add", self._netns)
        if self._network.has_poor_links:
            self.link = PoorLink(switch, self._port, self._netns, self.directory)
        else:
            _ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._netns)
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self._netns, "link", "set", "lo", "up")
        # The same after a boot: with another one it would not be found until the others forget the old one.
        _ip("-n", self._netns, "link", "set", "eth0", "address", f"02:83:00:00:00:{self._number:02x}")
        _ip("-n", self._netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._netns, "link", "set", "eth0", "up")
        with (self.directory / "boot.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._netns),
                    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-c", _BOOT),
                ],
                env={
                    "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
                    "RD_NAME": self.name,
                    "RD_DIR": str(self.directory),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # sshd writes its pid file after it listens.
        try:
            until(self._sshd_pid, BOOT_S, f"{self.name} boots")
        except AssertionError as error:
            raise AssertionError(f"{error}: {(self.directory / 'boot.log').read_text()}") from error
        (self._init,) = psutil.Process(self._unshare.pid).children()

    def exec(self, *argv: str) -> str:
        """Run something on the host, past its network, and return its output."""
        done = subprocess.run([*self.inside(), *argv], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start something on the host, past its network."""
        return subprocess.Popen([*self.inside(), *argv], stdin=subprocess.DEVNULL)

    def inside(self) -> tuple[str, ...]:
        """Return the words before a command that run it on the host."""
        assert self._init
        return ("nsenter", "-t", str(self._init.pid), "-n", "-m", "-u", "-p", "-i", "--")

    def processes(self) -> list[psutil.Process]:
        """What runs there besides init and sshd; nothing without power."""
        if self._init is None:
            return []
        found = []
        for process in descendants(self._init.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_init_waiting = process.ppid() == self._init.pid and process.name() == "sleep"
                if (
                    process.name() not in SSHD_NAMES
                    and not is_init_waiting
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def drop_sessions(self) -> None:
        """Kill every SSH connection; the listener goes on."""
        self._signal_sessions(signal.SIGKILL)

    def freeze_sessions(self) -> None:
        """Let every SSH connection stand still; the kernel goes on answering for them."""
        self._signal_sessions(signal.SIGSTOP)

    def sessions(self) -> list[psutil.Process]:
        """The processes of SSH connections, of those too that are not let in yet."""
        return self._sshds(are_listening=False)

    def _sshds(self, *, are_listening: bool) -> list[psutil.Process]:
        assert self._init
        found = []
        for process in descendants(self._init.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                listens = "[listener]" in " ".join(process.cmdline())
                if process.name() in SSHD_NAMES and listens is are_listening and still_runs(process):
                    found.append(process)
        return found

    def _signal_sessions(self, number: signal.Signals) -> None:
        for process in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def num_logins(self) -> int:
        """Return how many have been let in since it booted."""
        lines = (self.directory / "sshd.log").read_text().splitlines()
        return sum("Accepted " in line and " from " in line for line in lines)

    def change_host_key(self) -> None:
        """Do what a new installation does, or somebody in the middle."""
        for name in ("host_key", "host_key.pub"):
            (self.directory / name).unlink()
        _keygen(self.directory / "host_key")
        self.restart_sshd()

    def tell_sshd(self, *options: str, **variables: str) -> None:
        """Give sshd more options, once, and what runs in its sessions some variables."""
        set_env = " ".join(f"{name}={value}" for name, value in variables.items())
        config = self.directory / "sshd_config"
        config.write_text(config.read_text() + "\n".join([f"SetEnv {set_env}", *options]) + "\n")
        self.restart_sshd()

    def forbid_forwarding(self) -> None:
        """Let sshd forward no sockets from now on, and cut the connections."""
        config = self.directory / "sshd_config"
        config.write_text(_NO_FORWARDING + config.read_text())
        self.restart_sshd()
        self.drop_sessions()

    def allow_forwarding(self) -> None:
        """Undo `forbid_forwarding`; connections are cut again."""
        config = self.directory / "sshd_config"
        config.write_text(config.read_text().removeprefix(_NO_FORWARDING))
        self.restart_sshd()
        self.drop_sessions()

    def restart_sshd(self) -> None:
        """End the listener and start another."""
        self.stop_sshd()
        self.start_sshd()

    def start_sshd(self) -> None:
        """Start a listener where none is."""
        self.exec(SSHD, "-f", str(self.directory / "sshd_config"), "-E", str(self.directory / "sshd.log"))
        until(self._sshd_pid, BOOT_S, "sshd listens again")

    def stop_sshd(self) -> None:
        """End the listener: new connections are refused."""
        listeners = self._sshds(are_listening=True)
        self.exec("kill", self._sshd_pid())
        # Its file goes before it does: whoever looks for sessions just then finds none, for their parent is gone.
        until(lambda: not any(still_runs(process) for process in listeners), END_S, "sshd has ended")

    def _sshd_pid(self) -> str:
        """Return the listener's pid, as the host counts; empty while it is not there, or not written yet."""
        path = self.directory / "sshd.pid"
        return path.read_text().strip() if path.exists() else ""

    def pull_cable(self) -> None:
        """Let every packet vanish."""
        _ip("-n", self._network.switch, "link", "set", self._port, "nomaster")

    def lose_road_to(self, other: Host) -> None:
        """Let what this host sends to another one be refused at once, as by a missing route."""
        _ip("-n", self._netns, "route", "add", "unreachable", other.address)

    def plug_in_cable(self) -> None:
        """Undo `pull_cable`."""
        _ip("-n", self._network.switch, "link", "set", self._port, "master", "br0")

    @property
    def is_on(self) -> bool:
        """False after `cut_power`."""
        return self._init is not None

    def take_link_down(self) -> None:
        """Do what a pulled cable or a dead switch does: the host sees that there is no carrier."""
        _ip("-n", self._network.switch, "link", "set", self._port, "down")

    def bring_link_up(self) -> None:
        """Undo `take_link_down`."""
        _ip("-n", self._network.switch, "link", "set", self._port, "up")

    def freeze(self) -> None:
        """Let every process stand still; the kernel goes on answering for them."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._init
        # Twice: what was forked during the first look.
        for _ in range(2):
            for process in [self._init, *descendants(self._init.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def cut_power(self) -> None:
        """End the host as a power cut does: nobody gets a last word. `boot` starts it again."""
        self.pull_cable()
        self.end()

    def end(self) -> None:
        """Kill the host whole, and take away its network."""
        if self._init:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._init.send_signal(signal.SIGKILL)
        if self._unshare:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._unshare.wait(END_S)
            self._unshare.kill()
            self._unshare.wait()
        self._init = self._unshare = None
        if self.link is not None:
            self.link.close()
        _try("ip", "-n", self._network.switch, "link", "del", self._port)
        _try("ip", "netns", "del", self._netns)

    def open_python_to_users(self) -> None:
        """Let every user run this Python, which may lie in a home that is closed to others."""
        prefix = Path(sys.base_prefix)
        closed = next((path for path in reversed(prefix.parents) if not path.stat().st_mode & stat.S_IXOTH), None)
        if closed is None:
            return
        opened = self.directory / "opened"
        place = opened / prefix.relative_to(closed)
        place.mkdir(parents=True)
        self.exec("mount", "--bind", str(prefix), str(place))
        self.exec("mount", "--rbind", str(opened), str(closed))

    def _write_files(self) -> None:
        _keygen(self.directory / "host_key")
        shutil.copy(self._network.key.with_suffix(".pub"), self.directory / "authorized_keys")
        # The first value of sshd wins, as ssh's does.
        config = "\n".join(self._sshd_options) + _SSHD_CONFIG.format(directory=self.directory)
        (self.directory / "sshd_config").write_text(config)
        lines = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{self.home}:/bin/bash"
        users = [root if line.startswith("root:") else line for line in lines]
        (self.directory / "passwd").write_text("\n".join(users) + "\n")
        (self.directory / "shadow").write_text(f"root:{_PASSWORD_HASH}:19000:0:99999:7:::\n")
        (self.directory / "etc_hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")


class Network:
    """Some hosts, this machine among them as the console; the `with` block leaves nothing behind.

    Attributes:
        directory: Holds all files, in a short-named place.
        ssh_config: What a console's ~/.ssh/config would say; `ssh -F` and `RANKDECK_SSH_CONFIG` take it.
        known_hosts: The console's; holds the keys of all hosts.
    """

    def __init__(self, *names: str, sshd_options: Sequence[str] = (), has_poor_links: bool = False) -> None:
        """`has_poor_links`: what the links of the hosts carry can be delayed, lost and throttled (`Host.link`)."""
        self.has_poor_links = has_poor_links
        self.name = f"rd{os.getpid()}"
        self.switch = f"{self.name}-switch"
        self.directory = Path(tempfile.mkdtemp(prefix="rdh-", dir="/tmp"))
        self.subnet = _free_subnet()
        self.key = self.directory / "console_key"
        self.ssh_config = self.directory / "ssh_config"
        self.known_hosts = self.directory / "known_hosts"
        self.hosts = {name: Host(self, name, number, sshd_options) for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def trust_all(self) -> None:
        """Write every host's key where the console looks for it."""
        keys = {name: (host.directory / "host_key.pub").read_text().split()[:2] for name, host in self.hosts.items()}
        lines = [f"{self.hosts[name].address} {kind} {key}" for name, (kind, key) in keys.items()]
        self.known_hosts.write_text("\n".join(lines) + "\n")

    def configure(self, text: str) -> None:
        """Put something before everything else in the console's configuration: the first value of ssh wins."""
        self.ssh_config.write_text(text + "\n" + self.ssh_config.read_text())

    def lock_key(self, passphrase: str) -> None:
        """Give the console's key a passphrase."""
        change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(self.key)]
        subprocess.run(change, check=True, capture_output=True)

    def _boot(self) -> None:
        _keygen(self.key)
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        _ip("link", "add", self.name, "type", "veth", "peer", "name", "console", "netns", self.switch)
        _ip("-n", self.switch, "link", "set", "console", "master", "br0", "up")
        _ip("addr", "add", f"{self.subnet}.1/24", "dev", self.name)
        _ip("link", "set", self.name, "up")
        for host in self.hosts.values():
            host.boot()
        self.trust_all()
        self._write_ssh_config()

    def _end(self) -> None:
        for host in self.hosts.values():
            host.end()
        _try("ip", "link", "del", self.name)
        _try("ip", "netns", "del", self.switch)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write_ssh_config(self) -> None:
        lines = [f"Host {host.name}\n  HostName {host.address}" for host in self.hosts.values()]
        lines += [
            "Host *",
            "  User root",
            f"  IdentityFile {self.key}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  GlobalKnownHostsFile /dev/null",
            "  ConnectTimeout 3",
        ]
        self.ssh_config.write_text("\n".join(lines) + "\n")


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def _free_subnet() -> str:
    """Return the first three numbers of a network that this machine has no route to."""
    taken = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    first = os.getpid() % 250
    for offset in range(250):
        subnet = f"10.83.{(first + offset) % 250}"
        if f"{subnet}." not in taken:
            return subnet
    raise AssertionError("no free network below 10.83")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _try(*argv: str) -> str:
    """Run something that may fail; return what it said then."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return f"{' '.join(argv)}: {done.stderr.strip()}" if done.returncode else ""
