"""The signals of a node: folds samples of ranks and of the host into readings.

Pure: there is no clock, `now_s` is given. What processes of no job take of the CPUs is what the machine has used beyond
the ranks and their child processes. What a rank's probe counts is compared with what the kernel shows at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.node_state.gpu_signals import GpuSignals, numa_nodes
from agent.node_state.signals import SignalTracks
from agent.wire.machine import JobRank
from agent.wire.signals import RATES_OF_HOST, RATES_OF_RANK, Signal
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.node_state.observations import HostSignals, RankSignals
    from agent.wire.machine import GpuReport
    from agent.wire.signals import Reading
    from ddpcore.wire import RankReport

REPORT_PERIOD_S = 1.0
"""Least time in seconds between two looks at what a probe has counted."""
BEGINNINGS = frozenset({Phase.STARTING, Phase.JOINING})
WARM_UP_S = 5.0
"""Seconds after the ranks have met whose samples are no base of what follows."""
HOST = "host"
"""Key of the host's signals."""


class _Probed(msgspec.Struct, frozen=True):
    """What a rank's probe had counted."""

    pid: int
    at_s: float
    gc_pause_s: float | None
    gil_held_s: float | None


class _Rank(msgspec.Struct):
    """What is known of a rank besides its readings."""

    sampled_s: float | None = None
    tree_cpu_s: float = 0.0
    starved: float = 0.0
    """Part of the last second for which it had no CPU, by the kernel or by a quota."""
    numa_nodes: frozenset[int] | None = None
    probed: _Probed | None = None
    met_s: float | None = None
    """When its program was first seen past its start."""
    has_begun: bool = False
    """True once it has warmed up."""
    is_spanning: bool = False
    """True while the next sample begins before that."""
    num_lines: int = 0
    """Lines printed since the last sample."""


class NodeSignals:
    """All signals of a node."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self.tracks = SignalTracks()
        """Keys: `JobRank` of ranks, `HOST`."""
        self._ranks: dict[JobRank, _Rank] = {}
        self._gpus = GpuSignals()
        self._host: HostSignals | None = None
        self._jobs_cpu_s = 0.0
        """CPU time of all ranks and their child processes since the host's last sample."""

    def take_rank(self, whose: JobRank, sample: RankSignals, now_s: float, *, is_followed: bool = True) -> None:
        """Take a sample of a rank's process; `is_followed`: what it prints is known."""
        rank = self._rank(whose)
        self._jobs_cpu_s += max(0.0, sample.tree_cpu_s - rank.tree_cpu_s)
        rank.tree_cpu_s, rank.numa_nodes = sample.tree_cpu_s, sample.numa_nodes
        values = sample.values
        rank.starved = values.get(Signal.CPU_WAIT, 0.0) + values.get(Signal.CPU_THROTTLED, 0.0)
        if is_followed and rank.sampled_s is not None and now_s > rank.sampled_s:
            values = values | {Signal.LOG_LINES: rank.num_lines / (now_s - rank.sampled_s)}
        for signal, value in values.items() if not rank.is_spanning else ():
            self.tracks.take(whose, signal, value, now_s)
        rank.num_lines, rank.sampled_s, rank.is_spanning = 0, now_s, False

    def take_report(self, report: RankReport, now_s: float) -> None:
        """Take what a rank's probe has counted."""
        whose = JobRank(report.job_id, report.rank)
        rank = self._rank(whose)
        if rank.met_s is None and report.phase not in BEGINNINGS:
            rank.met_s = now_s
        if not rank.has_begun and rank.met_s is not None and now_s - rank.met_s >= WARM_UP_S:
            # What a program does until its first steps is no measure of its training.
            rank.has_begun, rank.probed, rank.is_spanning = True, None, True
            self.tracks.forget(whose)
        before = rank.probed
        if before is not None and before.pid == report.pid and now_s - before.at_s < REPORT_PERIOD_S:
            return
        rank.probed = _Probed(report.pid, now_s, report.gc_pause_s, report.gil_held_s)
        if before is None or before.pid != report.pid:
            return
        passed_s = now_s - before.at_s
        if report.gc_pause_s is not None and before.gc_pause_s is not None:
            pause = max(0.0, report.gc_pause_s - before.gc_pause_s) / passed_s
            self.tracks.take(whose, Signal.GC_PAUSE, min(1.0, pause), now_s)
        if report.gil_held_s is not None and before.gil_held_s is not None:
            # Who has no CPU keeps the lock for longer.
            steal = self._host.values.get(Signal.CPU_STEAL, 0.0) if self._host is not None else 0.0
            held = max(0.0, report.gil_held_s - before.gil_held_s) / passed_s - rank.starved - steal
            self.tracks.take(whose, Signal.GIL_WAIT, min(1.0, max(0.0, held)), now_s)

    def interrupt(self, whose: JobRank) -> None:
        """Note that a rank is frozen: its probe waits for nothing else."""
        self._rank(whose).probed = None

    def note_lines(self, whose: JobRank, num_lines: int) -> None:
        """Note that a rank has printed lines."""
        self._rank(whose).num_lines += num_lines

    def take_gpus(self, gpus: Sequence[GpuReport], now_s: float) -> None:
        """Take what GPUs show of the ranks on them, and where the GPUs are."""
        for whose, numa_node in numa_nodes(gpus).items():
            nodes = self._rank(whose).numa_nodes
            if nodes is not None:
                self.tracks.take(whose, Signal.FAR_FROM_GPU, float(numa_node not in nodes), now_s)
        for whose, signal, value in self._gpus.values(gpus, now_s):
            self._rank(whose)
            self.tracks.take(whose, signal, value, now_s)

    def take_host(self, sample: HostSignals, now_s: float) -> None:
        """Take a sample of the host, after those of its ranks of the same second."""
        before, jobs_cpu_s = self._host, self._jobs_cpu_s
        self._host, self._jobs_cpu_s = sample, 0.0
        if before is not None and sample.nic != before.nic:
            self.tracks.forget(HOST, Signal.NIC_SPEED)  # another one's speed is no past of its own
        for signal, value in sample.values.items():
            self.tracks.take(HOST, signal, value, now_s)
        if before is not None and sample.all_cpu_s > before.all_cpu_s:
            own_cpu_s = jobs_cpu_s + sample.agent_cpu_s - before.agent_cpu_s
            others_cpu_s = max(0.0, sample.busy_cpu_s - before.busy_cpu_s - own_cpu_s)
            part = others_cpu_s / (sample.all_cpu_s - before.all_cpu_s)
            self.tracks.take(HOST, Signal.CPU_OTHERS, min(1.0, part), now_s)

    def of_rank(self, whose: JobRank, now_s: float) -> dict[str, Reading]:
        """Return the readings of a rank."""
        readings = self.tracks.readings(whose, now_s)
        cpus = readings.get(Signal.CPUS_ALLOWED)
        if cpus is not None and cpus.before is None and cpus.value > self._num_cpus - 0.5:
            del readings[Signal.CPUS_ALLOWED]  # all of them
        return readings

    def of_host(self, now_s: float) -> dict[str, Reading] | None:
        """Return the readings of the host; None before its first sample."""
        return None if self._host is None else self.tracks.readings(HOST, now_s)

    def unmeasured_of_rank(self, whose: JobRank, now_s: float) -> int:
        """Return which rates of a rank nobody measures, as an `Unmeasured`."""
        return self.tracks.unmeasured(whose, RATES_OF_RANK, now_s)

    def unmeasured_of_host(self, now_s: float) -> int:
        """Return which rates of the host nobody measures, as an `Unmeasured`; 0 before its first sample."""
        return 0 if self._host is None else self.tracks.unmeasured(HOST, RATES_OF_HOST, now_s)

    @property
    def nic(self) -> str:
        """Network interface that carries most; empty where none is known."""
        return "" if self._host is None else self._host.nic

    def forget(self, job_id: str, ranks: Iterable[int] | None = None) -> None:
        """Drop what is known of a job's ranks: all of them without `ranks`."""
        wanted = None if ranks is None else set(ranks)
        for whose in [key for key in self._ranks if key.job_id == job_id and (wanted is None or key.rank in wanted)]:
            del self._ranks[whose]
            self.tracks.forget(whose)

    def _rank(self, whose: JobRank) -> _Rank:
        found = self._ranks.get(whose)
        if found is None:
            found = self._ranks[whose] = _Rank()
        return found
