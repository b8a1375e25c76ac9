"""What the kernel of a simulated host shows to its agent: kills for want of memory, by cgroup, and its file systems.

    kernel = SimKernel(node, directory, LAYOUTS[0])
    kernel.kill(is_of_job=True, is_at_limit=True)
    kernel.fill("/scratch")

The agent's own code reads it: `CgroupKills`, `OomKills` and `find_full_disk` decide what a rank's end is reported with.
The calls of the system that need a mounted disk or extended attributes are answered here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import msgspec

from agent.logs.full_disk import Suspicion, find_full_disk, suspicion
from agent.processes.cgroups import Cgroup
from agent.processes.oom_kills import CgroupKills, OomKills, files_of
from agent.wire.ends import EndFacts, Sender
from agent.wire.machine import LimitKind, LimitReport

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.reports import ExitReport
    from tests.support.sim_node import SimNode
    from tests.support.sim_rank import SimRank

GIB = 2**30
BLOCK_BYTES = 4096
LOOK_S = 1.0
DISK_LOOK_S = 0.5
"""From an end until the agent has looked at the file systems."""
WORKDIR = "/scratch/run"
NUM_INODES = 10**6


class Layout(NamedTuple):
    """The cgroup of a job's ranks on a host, and the one above it, or itself, whose memory is limited."""

    leaf: str
    limited: str
    is_v2: bool
    hint: str
    """How its limit is raised."""


_POD = "kubepods.slice/kubepods-burstable.slice/pod7"
LAYOUTS = (
    Layout("slurm/uid_7/job_12/step_0", "slurm/uid_7/job_12", False, "give the Slurm job more with --mem"),
    Layout(
        "slurmstepd.scope/job_12/step_0/user", "slurmstepd.scope/job_12", True, "give the Slurm job more with --mem"
    ),
    Layout(f"{_POD}/cri.scope", _POD, True, "raise limits.memory of the pod"),
    Layout("docker/0f3c", "docker/0f3c", False, "give the container more memory"),
    Layout("user.slice/run-7.scope", "user.slice/run-7.scope", True, "raise MemoryMax of the unit"),
    Layout("ada/train", "ada", True, "raise the limit of that cgroup"),
)


class _Disk(NamedTuple):
    total_bytes: int
    free_bytes: int
    num_free_inodes: int


class SimKernel:
    """The files of one host, in a directory of their own.

    Attributes:
        sent: Signals that an operator had rankdeck send, by rank.
        oomd_kills: Kills by oomd, by directory of the cgroup.
    """

    def __init__(self, node: SimNode, directory: Path, layout: Layout) -> None:
        self._node, self._layout = node, layout
        self._root = directory / "cgroup"
        self._vmstat, self._mounts = directory / "vmstat", directory / "mountinfo"
        self._num_kills: dict[str, int] = {}
        self._num_hits: dict[str, int] = {}
        self._disks = {path: _Disk(500 * GIB, 100 * GIB, NUM_INODES) for path in ("/", "/scratch", "/home", "/data")}
        self._disks["/dev/shm"] = _Disk(64 * GIB, 60 * GIB, NUM_INODES)
        self._due: list[tuple[float, int, Suspicion]] = []
        self._looked_s = float("-inf")
        self.sent: dict[int, int] = {}
        self.oomd_kills: dict[Path, int] = {}
        levels = [self._cgroup(path) for path in _levels(layout.leaf)]
        self._limits = {self._cgroup(layout.limited).key: LimitReport(LimitKind.CGROUP, 8 * GIB, 8 * GIB - 2**20)}
        self._kills, self._machine = CgroupKills(), OomKills(self._vmstat)
        self._kills.follow(levels, [self._cgroup(layout.limited)])
        for level in levels:
            level.path.mkdir(parents=True, exist_ok=True)
        self._write()
        node.with_facts = self._with_facts

    @property
    def limited(self) -> str:
        """The cgroup with the limit, as a sentence has it: the last two of its names."""
        return "/".join(self._layout.limited.split("/")[-2:])

    def look(self, now_s: float) -> None:
        """Let the agent look, as it does once a second, and find the disks that it has been asked for."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            with patch("os.getxattr", self._getxattr):
                self._kills.look(now_s)
            self._machine.look(now_s)
        due = [one for one in self._due if one[0] <= now_s]
        self._due = [one for one in self._due if one[0] > now_s]
        for _, rank, sought in due:
            with patch("os.statvfs", self._statvfs):
                disk = find_full_disk(sought, WORKDIR, str(self._mounts))
            if disk is not None:
                self._node.find_disk(rank, disk, now_s)

    def kill(self, *, is_of_job: bool, is_at_limit: bool) -> None:
        """Count a process that the kernel killed: of the job, or of another cgroup beside the job's."""
        above, _, _ = self._layout.limited.rpartition("/")
        of = self._layout.leaf if is_of_job else f"{above}/other"
        levels = _levels(of)
        # Version 1 counts where the process was, version 2 above that, too.
        for level in levels if self._layout.is_v2 else levels[:1]:
            self._num_kills[level] = self._num_kills.get(level, 0) + 1
        self._num_kills["machine"] = self._num_kills.get("machine", 0) + 1
        if is_at_limit:
            hit = self._layout.limited if is_of_job else of
            self._num_hits[hit] = self._num_hits.get(hit, 0) + 3
        self._write()

    def kill_by_oomd(self) -> None:
        """Let oomd mark the cgroup with the limit: it kills before the kernel does."""
        path = self._root / self._layout.limited
        self.oomd_kills[path] = self.oomd_kills.get(path, 0) + 1

    def fill(self, path: str, *, inodes_alone: bool = False) -> None:
        """Fill a file system, or use up its inodes."""
        disk = self._disks[path]
        self._disks[path] = disk._replace(num_free_inodes=0) if inodes_alone else disk._replace(free_bytes=0)

    def _with_facts(self, rank: SimRank, end: ExitReport, now_s: float) -> ExitReport:
        """Add what the agent reads just after an end (`WorkerSampler._ended`, `Jobs._log_end`)."""
        if end.code == 0:
            return end
        with patch("os.getxattr", self._getxattr):
            killing = self._kills.killing(now_s, self._limits)
        facts = EndFacts() if killing is None else killing.facts
        if end.signal is not None and self.sent.get(rank.rank) == end.signal:
            facts = msgspec.structs.replace(facts, sender=Sender.RANKDECK)
        found = suspicion(end.error_text, end.signal)
        if found is not None:
            self._due.append((now_s + DISK_LOOK_S, rank.rank, found))
        num_kills = self._machine.recent(now_s) if killing is None else killing.num
        return msgspec.structs.replace(end, facts=facts, oom_kills=num_kills)

    def _cgroup(self, path: str) -> Cgroup:
        return Cgroup(self._root, self._root / path, self._layout.is_v2)

    def _write(self) -> None:
        for path in _levels(self._layout.leaf):
            cgroup, kills, hits = self._cgroup(path), self._num_kills.get(path, 0), self._num_hits.get(path, 0)
            key = f"{files_of(cgroup).hits_key.decode()} " if cgroup.is_v2 else ""
            (cgroup.path / files_of(cgroup).kills).write_text(f"low 0\noom_kill {kills}\n")
            (cgroup.path / files_of(cgroup).hits).write_text(f"{key}{hits}\n")
        self._vmstat.write_text(f"nr_free_pages 12\noom_kill {self._num_kills.get('machine', 0)}\n")
        lines = (f"36 35 98:0 / {path} rw,relatime - ext4 x rw\n" for path in self._disks)
        self._mounts.write_text("".join(lines))

    def _getxattr(self, path: Path, _name: str) -> bytes:
        if path not in self.oomd_kills:
            raise OSError
        return str(self.oomd_kills[path]).encode()

    def _statvfs(self, path: str) -> os.statvfs_result:
        disk = self._disks[path]
        blocks, free = disk.total_bytes // BLOCK_BYTES, disk.free_bytes // BLOCK_BYTES
        inodes = (NUM_INODES, disk.num_free_inodes, disk.num_free_inodes)
        return os.statvfs_result((BLOCK_BYTES, BLOCK_BYTES, blocks, free, free, *inodes, 0, 255))


def _levels(leaf: str) -> list[str]:
    """Return a cgroup and those above it, but for the root, whose counts the kernel does not show."""
    names = leaf.split("/")
    return ["/".join(names[:number]) for number in range(len(names), 0, -1)]
