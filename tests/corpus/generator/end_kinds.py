"""What ends a rank, and what has nothing to do with its end: a function for each kind, and the stage that they play on.

A cause is put where the agent reads it: Xid errors and lost GPUs into the sampler's figures, kills and full disks into
the files of the host (`SimKernel`), Slurm's reason into what scontrol prints. The other ranks follow as victims.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGHUP, SIGKILL, SIGTERM, SIGXCPU, SIGXFSZ
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from agent.node_state.gpu_sample import GpuProcess
from agent.wire.jobs import JobState
from agent.wire.machine import GpuCondition
from app.diagnosis.causes import Cause, Severity
from app.slurm.client import why_ending
from tests.corpus.generator.causes import PROGRAM
from tests.corpus.generator.choices import Seeded
from tests.support.sim import STOP_S, SimCluster
from tests.support.sim_gpus import give_gpus
from tests.support.sim_kernel import LAYOUTS, SimKernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from app.view.rows import VerdictRow

LOOK_S = 0.2
HOUR_S = 3600.0
TIMEOUT_S = 12.0
"""Of the process group, for ranks that hang."""
HANG_S = 60.0
SLURM_JOB = "4711"

CUDA = "torch.AcceleratorError: CUDA error: unspecified launch failure"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
NVLINK = "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: "
    "unspecified launch failure"
)
OWN_ERRORS = ("KeyError: 'labels'", "ValueError: boom", "AssertionError: loss is nan", "FileNotFoundError: 'a.pt'")
NO_SPACE = "OSError: [Errno 28] No space left on device"
NO_QUOTA = "OSError: [Errno 122] Disk quota exceeded"
LOADER = "RuntimeError: DataLoader worker (pid 4812) is killed by signal: Killed."
POSITION = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
SCONTROL = "JobId=4711 JobState={state} Reason={reason} Dependency=(null) PreemptTime={preempted} Nice=0"


class KnownXid(NamedTuple):
    """An error as NVIDIA's documents describe it, and what a console is to make of it."""

    code: int
    text: str
    hint: str
    error: str


RESET = "nvidia-smi --gpu-reset -i {gpu}"
CHECKED = "compute-sanitizer"
XIDS = (
    KnownXid(13, "a kernel raised an exception", CHECKED, CUDA),
    KnownXid(31, "a kernel touched memory that it must not", CHECKED, ILLEGAL),
    KnownXid(43, "a program's channel was stopped", CHECKED, CUDA),
    KnownXid(64, "a faulty row of memory could not be replaced", RESET, ECC),
    KnownXid(74, "NVLink error", "nvidia-smi nvlink", NVLINK),
    KnownXid(94, "contained memory error", "restart the job", ECC),
    KnownXid(999, "Xid 999 ", "NVIDIA's catalog", CUDA),
)
LASTING = (
    KnownXid(48, "double-bit memory error", RESET, ECC),
    KnownXid(62, "its microcontroller halted", RESET, CUDA),
    KnownXid(79, "it has fallen off the bus", "drain {node} and reboot it", CUDA),
    KnownXid(95, "uncontained memory error", RESET, ECC),
    KnownXid(119, "the GPU's own processor does not answer", "whether its driver is up to date", CUDA),
    KnownXid(120, "the GPU's own processor failed", "whether its driver is up to date", CUDA),
    KnownXid(140, "uncorrectable memory error", RESET, ECC),
)
"""Errors after which a GPU runs nothing."""
HARMLESS = (45, 63, 92, 154)


class Truth(NamedTuple):
    """What has ended a job."""

    ranks: tuple[int, ...] = ()
    """Ranks that must be named, and no others; none where nobody is to blame."""
    names: frozenset[str] = frozenset()
    """Facts that must be named, and no others, as `ends` reads them in a verdict."""
    text: str = ""
    hint: str = ""
    cause: Cause = Cause.EXITED
    slurm: str = ""
    """What Slurm must be shown to have done; nothing else is shown of it."""
    is_stopped: bool = False
    """The job was stopped at last: from then on no verdict stands."""


@dataclass(frozen=True)
class Run:
    """One run: what ends, where and when, and what is beside it."""

    seed: int
    name: str
    is_cause: bool
    shape: tuple[int, int]
    rank: int
    at_s: float
    has_nccl: bool
    drop: float
    delay_s: float
    beside: tuple[str, ...]


class Scene:
    """A job of GPUs that trains, its hosts, and the rank that something is about to happen to."""

    def __init__(self, run: Run, directory: Path) -> None:
        num_nodes, per_node = run.shape
        self.of, self.choices, self._directory = run, Seeded(run.seed + 1), directory
        self.sim = SimCluster(
            num_nodes,
            per_node,
            program=PROGRAM,
            seed=run.seed % 1000,
            drop=run.drop,
            delay_s=run.delay_s,
            hangs_on_death=run.has_nccl,
            timeout_s=TIMEOUT_S if run.has_nccl else float("inf"),
        )
        self.gpus = give_gpus(self.sim, num_spare=1)
        for number, gpus in enumerate(self.gpus):
            gpus.extra[per_node] = [GpuProcess(9000 + number, 2**30, name="another job")]
        # oomd knows cgroups of version 2 alone.
        self.layout = layout = self.choices.pick([one for one in LAYOUTS if one.is_v2 or run.name != "oomd"])
        self.kernels: list[SimKernel] = []
        for node in self.sim.nodes:
            (directory / node.name).mkdir()
            self.kernels.append(SimKernel(node, directory / node.name, layout))
        self.rank = self.sim.ranks[run.rank]
        self.node, self.gpu = divmod(run.rank, per_node)
        self.kernel = self.kernels[self.node]
        self.ended_s = self.sim.now_s
        self.seen: list[tuple[float, VerdictRow]] = []
        """Each verdict that was no quiet one, at each look."""
        self.slurm_says("RUNNING")

    def run(self, seconds: float) -> None:
        """Let time pass, and note what is named."""
        end_s = self.sim.now_s + seconds
        while self.sim.now_s < end_s - 1e-6:
            self.sim.run(min(LOOK_S, end_s - self.sim.now_s))
            for kernel in self.kernels:
                kernel.look(self.sim.now_s)
            if self.sim.alarming:
                rows = [row for row in self.sim.verdicts() if row.severity is not Severity.QUIET]
                self.seen += [(self.sim.now_s, row) for row in rows]

    def end(self, error: str = "", *, code: int | None = 1, signal: int | None = None) -> None:
        """End the rank."""
        self.rank.end = (None if signal else code, signal, error)
        self.ended_s = self.sim.now_s

    def log_xid(self, code: int, before_s: float = 0.0) -> None:
        """Let the driver log an error of the rank's GPU, now or some time ago."""
        self.gpus[self.node].fail(self.gpu, code, self.sim.now_s - before_s)

    def true(self, *names: str, text: str = "", hint: str = "") -> Truth:
        """Return that the rank ended of what has these names."""
        where = {"gpu": self.gpu, "node": f"demo-{self.node}"}
        cause = Cause.OOM if "oom" in names else Cause.EXITED
        return Truth((self.of.rank,), frozenset(names), text, hint.format(**where), cause)

    def slurm_says(self, state: str, reason: str = "None", preempted: str = "None") -> None:
        """Let scontrol print something of the job."""
        text = SCONTROL.format(state=state, reason=reason, preempted=preempted)
        path = self._directory / "scontrol"
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)

    def why_slurm_ends(self) -> str:
        """Return what the console would show of Slurm."""
        with patch.dict(os.environ, {"PATH": f"{self._directory}:{os.environ['PATH']}"}):
            return why_ending(SLURM_JOB)

    def stop(self, without: int | None = None) -> None:
        """Have all nodes stop the job, but for one, each a little later than the one before."""
        for node in self.sim.nodes:
            if node.node_rank != without:
                node.go(JobState.STOPPING, self.sim.now_s)
                self.run(self.choices.between(0, 3) / 10)
        self.run(STOP_S)
        self.ended_s = self.sim.now_s
        for node in self.sim.nodes:
            for rank in node.ranks if node.node_rank != without else ():
                rank.end = rank.end or (None, SIGTERM, "")


# What ends a rank.


def _xid(scene: Scene) -> Truth:
    known = scene.choices.pick((*XIDS, *LASTING))
    is_after = known in LASTING and scene.choices.between(0, 3) == 0
    if not is_after:
        scene.log_xid(known.code)
        scene.run(scene.choices.pick((0.3, 1.0, 4.0, 15.0)))
    if scene.choices.between(0, 3) == 0:
        scene.kernel.kill(is_of_job=True, is_at_limit=True)  # another process of its cgroup
    ends = [{"error": known.error}, {"error": WATCHDOG, "signal": SIGABRT}, {"signal": SIGABRT}]
    scene.end(**scene.choices.pick(ends))  # type: ignore[arg-type]
    if is_after:
        scene.run(scene.choices.pick((0.2, 1.0, 3.0)))
        scene.log_xid(known.code)
    if scene.choices.between(0, 1):
        scene.log_xid(45)  # the driver takes the process down
    return scene.true(f"gpu {scene.gpu}", f"xid {known.code}", text=known.text, hint=known.hint)


def _gpu_gone(scene: Scene) -> Truth:
    condition = scene.choices.pick((GpuCondition.LOST, GpuCondition.RESET_REQUIRED))
    if scene.choices.between(0, 1):
        scene.end(CUDA)
        scene.run(scene.choices.pick((0.0, 1.0, 3.0)))
    else:
        scene.end(signal=SIGABRT)
    scene.gpus[scene.node].change(scene.gpu, condition=condition)
    is_lost = condition is GpuCondition.LOST
    text, hint = ("is lost", "drain {node}") if is_lost else ("needs a reset", RESET)
    return scene.true(f"gpu {scene.gpu}", "lost" if is_lost else "reset", text=text, hint=hint)


def _hang(scene: Scene) -> Truth:
    """Let a rank hang on a broken GPU until its peers time out: their launcher ends it last."""
    known = scene.choices.pick(LASTING)
    scene.rank.is_blocked = True
    scene.log_xid(known.code)
    until_s = scene.sim.now_s + HANG_S
    while scene.rank.end is None and scene.sim.now_s < until_s:
        scene.run(LOOK_S)
    scene.ended_s = scene.sim.now_s
    return scene.true(f"gpu {scene.gpu}", f"xid {known.code}", text=known.text, hint=known.hint)


def _oom(scene: Scene) -> Truth:
    """Kill for memory at the limit of a cgroup: the rank, a loader worker of it, or all ranks of the node."""
    scene.kernel.kill(is_of_job=True, is_at_limit=True)
    way = scene.choices.between(0, 3)
    if way == 1:
        scene.run(scene.choices.pick((0.2, 1.0, 2.0)))
        scene.end(LOADER)
    else:
        scene.end(signal=SIGKILL)
    name = f"limit {scene.kernel.limited}"
    truth = scene.true("oom", name, text="at its limit of memory (8.0 GiB)", hint=scene.layout.hint)
    if way != 2:
        return truth
    own = scene.sim.nodes[scene.node].ranks  # memory.oom.group
    for rank in own:
        rank.end = (None, SIGKILL, "")
    return truth._replace(ranks=tuple(rank.rank for rank in own))


def _oom_of_machine(scene: Scene) -> Truth:
    scene.kernel.kill(is_of_job=True, is_at_limit=False)
    scene.end(signal=SIGKILL)
    return scene.true("oom", text="when the kernel was out of memory", hint="see the Memory view")


def _oomd(scene: Scene) -> Truth:
    scene.kernel.kill_by_oomd()
    scene.end(signal=SIGKILL)
    return scene.true("oom", "oomd", text=f"short in its cgroup {scene.kernel.limited}", hint="see the Memory view")


def _full_disk(scene: Scene) -> Truth:
    path = scene.choices.pick(("/scratch", "/home"))
    named = [f"{NO_SPACE}: '{path}/run/a.pt'"]
    unnamed = [] if path == "/home" else [NO_SPACE, POSITION, f"{NO_SPACE}: 'out/a.pt'"]
    scene.kernel.fill(path)
    scene.end(scene.choices.pick([*named, *unnamed]))
    return scene.true(f"full {path}", text=f"{path} is full (0 B of", hint=f"make room in {path} on {{node}}")


def _inodes(scene: Scene) -> Truth:
    scene.kernel.fill("/home", inodes_alone=True)
    scene.end(f"{NO_SPACE}: '/home/ada/a.pt'")
    return scene.true("inodes /home", text="/home has no inodes left", hint="remove small files in /home")


def _quota(scene: Scene) -> Truth:
    if scene.choices.between(0, 2) == 0:
        scene.end(NO_QUOTA)
        return scene.true(text="Disk quota exceeded", hint="see quota -s")
    scene.end(f"{NO_QUOTA}: '/home/ada/a.pt'")
    return scene.true("quota /home", text="the quota on /home is used up", hint="see quota -s")


def _shared_memory(scene: Scene) -> Truth:
    scene.kernel.fill("/dev/shm")
    bus_error = LOADER.replace("Killed", "Bus error")
    scene.end(**scene.choices.pick([{"signal": SIGBUS}, {"error": bus_error}]))  # type: ignore[arg-type]
    return scene.true("full /dev/shm", text="/dev/shm is full", hint="make room in /dev/shm")


def _sent(scene: Scene) -> Truth:
    number = scene.choices.pick((SIGKILL, SIGABRT))
    scene.kernel.sent[scene.of.rank] = number
    scene.end(signal=number)
    return scene.true("rankdeck", text="an operator had rankdeck send that signal", hint="the agent's audit log")


def _limit_signal(scene: Scene) -> Truth:
    number, hint = scene.choices.pick(((SIGXCPU, "ulimit -t"), (SIGXFSZ, "ulimit -f"), (SIGHUP, "tmux")))
    scene.end(signal=number)
    return scene.true(text=number.name, hint=hint)


def _slurm(scene: Scene) -> Truth:
    """Let Slurm end the job, as for a failed node: each agent has its signal, and stops the ranks."""
    ends = (
        ("its time limit is over", "TimeLimit", "None"),
        ("a job of higher priority has preempted it", "None", "2026-11-26T23:24:25"),
    )
    if len(scene.sim.nodes) == 1 or scene.choices.between(0, 1):
        text, reason, preempted = scene.choices.pick(ends)
        scene.slurm_says("COMPLETING", reason, preempted)
        scene.stop()
        return Truth(slurm=text)
    scene.sim.lose_node(scene.node)
    lost_s = scene.sim.now_s
    scene.run(scene.choices.between(8, 20))
    scene.slurm_says("COMPLETING", "NodeDown")
    scene.stop(without=scene.node)
    scene.ended_s = lost_s
    lost = tuple(rank.rank for rank in scene.sim.nodes[scene.node].ranks)
    return Truth(lost, text="has not reported", cause=Cause.NODE_LOST, slurm="a node has failed", is_stopped=True)


# What has nothing to do with a rank's end.


def _other_gpu(scene: Scene) -> None:
    spare = len(scene.sim.nodes[0].ranks)
    scene.gpus[scene.node].fail(spare, scene.choices.pick((31, 79, 119)), scene.sim.now_s)
    scene.gpus[scene.node].change(spare, condition=GpuCondition.LOST)
    other = scene.sim.ranks[scene.of.rank - 1]
    node, gpu = divmod(other.rank, spare)
    scene.gpus[node].fail(gpu, scene.choices.pick((13, 31, 94)), scene.sim.now_s)


def _old_xid(scene: Scene) -> None:
    scene.log_xid(scene.choices.pick((31, 48, 79, 119)), HOUR_S)


def _harmless_xid(scene: Scene) -> None:
    scene.log_xid(scene.choices.pick(HARMLESS))


def _kill_elsewhere(scene: Scene) -> None:
    scene.kernel.kill(is_of_job=False, is_at_limit=scene.choices.between(0, 1) == 1)


def _full_elsewhere(scene: Scene) -> None:
    scene.kernel.fill("/data", inodes_alone=scene.choices.between(0, 1) == 1)


BESIDE: dict[str, Callable[[Scene], None]] = {
    "another GPU": _other_gpu,
    "an old Xid": _old_xid,
    "a harmless Xid": _harmless_xid,
    "a kill elsewhere": _kill_elsewhere,
    "a full disk elsewhere": _full_elsewhere,
}


def _ends_with(beside: str, *errors: str, text: str = "") -> Callable[[Scene], Truth]:
    """Return what lets something be beside a rank that ends of an error."""

    def strike(scene: Scene) -> Truth:
        BESIDE[beside](scene)
        scene.run(scene.choices.pick((0.3, 1.0, 2.0)))
        error = scene.choices.pick(errors)
        scene.end(error)
        return scene.true(text=text or error)

    return strike


def _unknown_kill(scene: Scene) -> Truth:
    """Let somebody send a signal, while the kernel kills in another cgroup, or rankdeck has sent another signal."""
    number, text = scene.choices.pick(((SIGKILL, "SIGKILL"), (SIGABRT, "SIGABRT")))
    if scene.choices.between(0, 1):
        _kill_elsewhere(scene)
        scene.run(scene.choices.pick((0.1, 0.5, 1.5)))
    else:
        scene.kernel.sent[scene.of.rank] = SIGTERM
    scene.end(signal=number)
    return scene.true(text=text, hint="somebody on {node}" if number == SIGKILL else "")


def _kill_beside(scene: Scene) -> Truth:
    """Let a process of the rank's own cgroup be killed, and the rank end of an error that has nothing to do with it."""
    if scene.layout.is_v2 and scene.choices.between(0, 1):
        scene.kernel.kill_by_oomd()
    else:
        scene.kernel.kill(is_of_job=True, is_at_limit=True)
    scene.run(scene.choices.pick((0.1, 1.0, 2.0)))
    error = scene.choices.pick(OWN_ERRORS)
    scene.end(error)
    return scene.true(text=error)


def _own_error_on_broken_gpu(scene: Scene) -> Truth:
    scene.log_xid(scene.choices.pick((31, 74, 94)))
    scene.run(scene.choices.pick((0.3, 2.0)))
    error = scene.choices.pick(OWN_ERRORS)
    scene.end(error)
    return scene.true(text=error)


def _stopped(scene: Scene) -> Truth:
    """Stop the job, as an operator or scancel does, with all that could be blamed beside it."""
    for loud in BESIDE.values():
        loud(scene)
    scene.log_xid(31)
    scene.kernel.kill(is_of_job=True, is_at_limit=True)
    scene.stop()
    return Truth()


ENDS: dict[str, Callable[[Scene], Truth]] = {
    "Xid": _xid,
    "GPU lost, or needs a reset": _gpu_gone,
    "hang on a broken GPU": _hang,
    "out of memory at a cgroup's limit": _oom,
    "machine out of memory": _oom_of_machine,
    "oomd": _oomd,
    "disk full": _full_disk,
    "no inodes left": _inodes,
    "quota used up": _quota,
    "shared memory full": _shared_memory,
    "signal sent by rankdeck": _sent,
    "limit of the shell, or a closed terminal": _limit_signal,
    "Slurm: time limit, preemption, node failure": _slurm,
}
OPPOSITES: dict[str, Callable[[Scene], Truth]] = {
    "Xid of a GPU of another rank or job": _ends_with("another GPU", CUDA, ILLEGAL, *OWN_ERRORS),
    "Xid of an hour ago": _ends_with("an old Xid", CUDA, ECC, *OWN_ERRORS),
    "Xid that harms nothing": _ends_with("a harmless Xid", CUDA, *OWN_ERRORS),
    "exception of its own, Xid of its GPU": _own_error_on_broken_gpu,
    "kill for memory in another cgroup": _ends_with("a kill elsewhere", LOADER, *OWN_ERRORS),
    "kill for memory in its cgroup, an exception of its own": _kill_beside,
    "disk full elsewhere": _ends_with("a full disk elsewhere", f"{NO_SPACE}: '/home/ada/a.pt'", *OWN_ERRORS),
    "signal whose sender is not known": _unknown_kill,
    "stopped, with all of these": _stopped,
}
NCCL_ALONE = frozenset({"hang on a broken GPU"})
