"""Finds the cgroups that a process is in, and reads how long their CPU quotas have held it.

Source: cgroups(7); Documentation/admin-guide/cgroup-v2.rst (cpu.max, cpu.stat), Documentation/scheduler/sched-bwc.rst
(cpu.cfs_quota_us, cpu.stat).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LEVELS = 16
"""Levels of cgroups above a process."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_MAX_PATH = 4096


class Cgroup(NamedTuple):
    """A cgroup that a process is in, or one above it."""

    root: Path
    """Where the file system of its hierarchy is mounted."""
    path: Path
    is_v2: bool

    @property
    def key(self) -> str:
        """Name that is the same for all processes."""
        return f"cgroup {self.path}"

    @property
    def name(self) -> str:
        """Its name in the hierarchy: `/slurm/uid_0/job_12`."""
        return f"/{self.path.relative_to(self.root)}"[:_MAX_PATH] if self.path != self.root else "/"


def read_membership(pid: int, proc: Path = PROC) -> str:
    """Return the cgroups of a process, as the kernel writes them.

    Raises:
        OSError: The process is gone.
    """
    return (proc / str(pid) / "cgroup").read_text()


def cgroups_of(membership: str, controller: str, cgroups: Path = CGROUPS) -> Iterator[Cgroup]:
    """Yield the directories from a process's cgroup up to the root that this machine shows, of its `membership`."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = cgroups if is_v2 else cgroups / controller
        inside = root / path.lstrip("/")
        if ".." in inside.parts or not inside.is_dir():
            inside = root  # a container that sees only its own part, under the name that it has outside
        for directory in [inside, *inside.parents][:MAX_LEVELS]:
            if directory.is_relative_to(root):
                yield Cgroup(root, directory, is_v2)


class Throttled(NamedTuple):
    """What the kernel has counted of a quota: its periods, those in which it held threads, and for how long.

    `held_s` is summed over the CPUs on which threads were held.
    """

    num_periods: int
    num_held: int
    held_s: float

    def part_since(self, before: Throttled, passed_s: float) -> float:
        """Return for what part of the time it held the cgroup at most, 0..1."""
        num_periods = self.num_periods - before.num_periods
        if num_periods <= 0 or passed_s <= 0.0:
            return 0.0
        of_periods = (self.num_held - before.num_held) / num_periods
        return max(0.0, min(of_periods, (self.held_s - before.held_s) / passed_s, 1.0))


def has_quota(cgroup: Cgroup) -> bool:
    """Return whether a cgroup's CPU time is limited."""
    try:
        text = (cgroup.path / ("cpu.max" if cgroup.is_v2 else "cpu.cfs_quota_us")).read_bytes()
    except OSError:
        return False
    quota = text.split()[:1]
    return bool(quota) and quota[0].isdigit()


def throttled(cgroup: Cgroup) -> Throttled | None:
    """Return what the kernel has counted of a cgroup's quota; None where it cannot be read."""
    try:
        lines = (cgroup.path / "cpu.stat").read_bytes().splitlines()
        counts = {key: int(value) for key, value in (line.split() for line in lines)}
        held_s = counts[b"throttled_usec"] / 1e6 if cgroup.is_v2 else counts[b"throttled_time"] / 1e9
        return Throttled(counts[b"nr_periods"], counts[b"nr_throttled"], held_s)
    except (OSError, ValueError, KeyError):
        return None
