"""A real Slurm for tests: slurmd on hosts of `tests.support.hosts`, slurmctld on a login host.

All hosts share root's home, and SSH leads from each to each. There is no accounting and no systemd. Source:
slurm.conf(5); measured with Debian's 22.05.8: slurmd looks for a cgroup plug-in whatever tracks processes, and each
host needs a root of its own in the freezer.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from types import TracebackType

    from tests.support.hosts import Host

NEEDS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
FREEZER = Path("/sys/fs/cgroup/freezer")
LOGIN = "login"
SOCKET = "/run/munge/munge.socket"
UP_S = 60.0
COMMAND_S = 120.0
KILL_WAIT_S = 25
USER_ID = 1500


def require_slurm() -> None:
    """Skip a test where there can be no Slurm; where CI promises it, fail it."""
    require_hosts()
    missing = sorted({package for program, package in NEEDS.items() if shutil.which(program, path=PATH) is None})
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(f"CI has no Slurm for this test: {reason}")
        pytest.skip(reason)


class SlurmCluster:
    """Some nodes and a login host; the `with` block leaves nothing behind.

    Attributes:
        nodes: Names of the nodes.
        user: Who uses it.
        home: That user's home, on all hosts.
        signals_only_tasks: Whether Slurm sends its signals to the tasks of a step alone, not to all their processes.
    """

    def __init__(self, num_nodes: int = 2, *, proctrack: str = "", cpus: int = 4) -> None:
        can_freeze = os.access(FREEZER / "cgroup.procs", os.W_OK)
        self.nodes = [f"h{number + 1}" for number in range(num_nodes)]
        self.network = Network(*self.nodes, LOGIN)
        self.user, self.home = "root", self.network.directory / "shared"
        self._proctrack = proctrack or ("cgroup" if can_freeze else "linuxproc")
        self.signals_only_tasks = self._proctrack == "cgroup"
        self._cpus = cpus
        self._freezer = FREEZER / self.network.name

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_groups)
            undo.enter_context(self.network)
            self._write_files()
            for host in self.network.hosts.values():
                self._start(host)
            until(lambda: set(self.states().values()) == {"idle"}, UP_S, "all nodes are idle")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def add_user(self) -> SlurmCluster:
        """Return this cluster as a user without rights sees it, whose home all hosts share."""
        for directory in (
            self.network.directory,
            self.network.directory / "slurm",
            self.network.directory / "slurm/etc",
        ):
            directory.chmod(0o755)
        other = copy.copy(self)
        other.home, other.user = self.network.directory / "alice", "alice"
        shutil.copytree(self.home / ".ssh", other.home / ".ssh")
        for host in self.network.hosts.values():
            host.open_python_to_users()
            with (host.directory / "passwd").open("a") as users:
                users.write(f"alice:x:{USER_ID}:{USER_ID}::{other.home}:/bin/bash\n")
        for path in (other.home, *other.home.rglob("*")):
            shutil.chown(path, USER_ID, USER_ID)
        return other

    def argv(self, host: str, *words: str) -> list[str]:
        """Return what runs a command in the shared home, as a login to a host does."""
        environment = {"HOME": str(self.home), "USER": self.user, "PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        variables = [f"{name}={value}" for name, value in environment.items()]
        as_user = ("setpriv", "--clear-groups", f"--reuid={USER_ID}", f"--regid={USER_ID}")
        rights = () if self.user == "root" else as_user
        return [*self.network[host].inside(), *rights, "env", "-i", "-C", str(self.home), *variables, *words]

    def boot(self, name: str) -> None:
        """Start a host after a power cut, and Slurm's daemon on it."""
        self.network[name].boot()
        self._start(self.network[name])

    def start(self, *words: str, host: str = LOGIN) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            self.argv(host, *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *words: str, host: str = LOGIN, codes: tuple[int, ...] = (0,)) -> str:
        """Return what a command says, on standard output and error."""
        process = self.start(*words, host=host)
        stdout, stderr = process.communicate(timeout=COMMAND_S)
        assert process.returncode in codes, f"{' '.join(words)}: {process.returncode}\n{stdout}{stderr}"
        assert "Traceback" not in stderr
        return stdout + stderr

    def rankdeck(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """Return what `rankdeck` says on the login host."""
        return self.run(sys.executable, "-P", "-m", "app", *words, codes=codes)

    def submit(self, script: str, *options: str) -> str:
        """Return the id of a batch job; its output is in JOBID.out of the shared home."""
        (self.home / "batch.sh").write_text(f"#!/bin/bash\n{script}\n")
        return self.run("sbatch", "--parsable", "--output=%j.out", *options, "batch.sh").strip()

    def output(self, job_id: str) -> str:
        """Return what a batch job has said so far."""
        path = self.home / f"{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job_id: str) -> str:
        """Return the state of a job: RUNNING, CANCELLED."""
        found = re.search(r"JobState=(\S+)", self.run("scontrol", "show", "job", job_id))
        return found[1] if found else ""

    def states(self) -> dict[str, str]:
        """Return the state of each node; a star at its end: it does not answer."""
        process = self.start("sinfo", "-h", "-N", "-o", "%N %t")
        rows = process.communicate(timeout=COMMAND_S)[0].splitlines()
        return {name: state for name, _, state in (row.partition(" ") for row in rows)}

    @cached_property
    def _conf(self) -> str:
        directory = self.network.directory / "slurm"
        lines = [
            f"ClusterName={self.network.name}",
            f"SlurmctldHost={LOGIN}({self.network[LOGIN].address})",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={SOCKET}"),
            *(f"ProctrackType=proctrack/{self._proctrack}", "TaskPlugin=task/none", "MpiDefault=none"),
            *("JobAcctGatherType=jobacct_gather/none", "AccountingStorageType=accounting_storage/none"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SchedulerType=sched/backfill"),
            "SchedulerParameters=batch_sched_delay=0,bf_interval=5,sched_min_interval=100000",
            *("SlurmdParameters=config_overrides", "ReturnToService=2", f"KillWait={KILL_WAIT_S}", "SlurmdTimeout=15"),
            *("MessageTimeout=5", "InactiveLimit=0", "Waittime=0", "MinJobAge=600", "UnkillableStepTimeout=60"),
            *(f"StateSaveLocation={directory}/ctld", f"SlurmdSpoolDir={directory}/spool-%n"),
            *(f"SlurmctldPidFile={directory}/ctld.pid", f"SlurmdPidFile={directory}/%n.pid"),
            *(f"SlurmctldLogFile={directory}/ctld.log", f"SlurmdLogFile={directory}/%n.log"),
            *(
                f"NodeName={name} NodeAddr={self.network[name].address} CPUs={self._cpus} RealMemory=4000 State=UNKNOWN"
                for name in self.nodes
            ),
            f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP",
            # Its jobs end those of the other partition, by SIGTERM at once and SIGKILL after `KillWait`.
            "PreemptType=preempt/partition_prio",
            "PreemptMode=CANCEL",
            f"PartitionName=urgent Nodes={','.join(self.nodes)} PriorityTier=10 PreemptMode=OFF State=UP",
        ]
        return "\n".join(lines) + "\n"

    def _write_files(self) -> None:
        directory = self.network.directory / "slurm"
        for path in (directory / "etc", directory / "ctld", self.home / ".ssh"):
            path.mkdir(parents=True, mode=0o700)
        (directory / "etc/slurm.conf").write_text(self._conf)
        (directory / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o400)
        shutil.copy(self.network.key, self.home / ".ssh/id_ed25519")
        hosts = self.network.hosts.values()
        known = [(host, (host.directory / "host_key.pub").read_text().split()[:2]) for host in hosts]
        lines = [f"{host.name},{host.address} {' '.join(key)}" for host, key in known]
        (self.home / ".ssh/known_hosts").write_text("\n".join(lines) + "\n")
        addresses = "".join(f"{host.address} {host.name}\n" for host in hosts)
        for host in hosts:  # both are mounted in the host: written in place
            (host.directory / "etc_hosts").write_text("127.0.0.1 localhost\n" + addresses)
            users = (host.directory / "passwd").read_text()
            (host.directory / "passwd").write_text(users.replace(f":root:{host.home}:", f":root:{self.home}:"))

    def _start(self, host: Host) -> None:
        """Start munged and Slurm's daemon on a host that has booted."""
        directory = self.network.directory / "slurm"
        script = f"mkdir -p /etc/slurm /run/munge && chmod 755 /run/munge && mount --bind {directory}/etc /etc/slurm"
        if self._proctrack == "cgroup":
            own = self._freezer / host.name
            own.mkdir(parents=True, exist_ok=True)
            script += (
                " && mkdir -p /run/fz && mount -t cgroup -o freezer fz /run/fz && mount -t tmpfs tmpfs /sys/fs/cgroup"
                f" && mkdir {FREEZER} && mount --bind /run/fz/{self.network.name}/{host.name} {FREEZER}"
                " && umount /run/fz"
            )
        munged = f"munged --socket={SOCKET} --key-file={directory}/munge.key --num-threads=2 --force"
        files = {"log-file": "munged.log", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        munged += "".join(f" --{option}={directory}/{host.name}.{name}" for option, name in files.items())
        daemon = "slurmctld" if host.name == LOGIN else f"slurmd -N {host.name}"
        host.exec("env", f"PATH={PATH}", "bash", "-c", f"umask 022; {script} && {munged} && {daemon}")

    def _remove_groups(self) -> None:
        if not self._freezer.exists():
            return
        groups = [path for path in self._freezer.rglob("*") if path.is_dir()]
        for group in sorted([self._freezer, *groups], key=lambda path: -len(path.parts)):
            until(lambda: not (group / "cgroup.procs").read_text().strip(), UP_S, f"{group} is empty")  # noqa: B023
            group.rmdir()
