"""The console's rows: what `app.view.view` makes of the model, for the screen, the printed lines and `--json` alike.

Every string in a row is clean (`app.text`): it may be written to a terminal as it is. Rows with a public life in JSON
carry units in their field names; a value that is not known is None, never a made-up zero.

`Figure` is a figure of a job at one moment, over all its ranks, GPUs or nodes: what the charts show over time.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from app.diagnosis.causes import Cause, RankState, Severity

SCHEMA = 1
"""The `"schema"` of every JSON object this package prints."""
OLD_S = 2.0
"""What a rank or a node has said longer ago is no longer the present: it is shown as old."""
OLD_GPU_S = 5.0
"""The same of a GPU, from when on its node calls its driver silent."""


SEVERITY_TEXTS = {
    Severity.OK: "OK",
    Severity.QUIET: "INFO",
    Severity.WARNING: "WARNING",
    Severity.CRITICAL: "CRITICAL",
}
"""As the screen and the printed lines name them."""


class Headline(msgspec.Struct, frozen=True):
    """The first line of every view: the worst verdict in a sentence, or how things stand."""

    severity: Severity
    text: str


class RootCauseRow(msgspec.Struct, frozen=True):
    """Why a job failed."""

    rank: int | None
    """None is a launcher."""
    node: str
    end: str
    """How its process ended: `exited with code 1`, `was killed by SIGKILL`."""
    exception: str
    """The exception that everything else followed from; empty when there is none."""
    outer: str
    """The exception that ended the rank, where it was another one."""
    where: str
    """`file.py:line in function`."""
    traceback: list[str]
    """Its lines."""
    is_consequence: bool
    """It lost another rank, or was told to end, and nobody knows why."""
    text: str
    """A sentence."""


class JobRow(msgspec.Struct, frozen=True):
    """A job over all its nodes."""

    job_id: str
    attempt: int
    state: str
    """prepared, starting, running, restarting, stopping, succeeded, failed, stopped or lost."""
    severity: Severity
    world_size: int
    num_nodes: int
    step: int | None
    """The lowest step of any rank."""
    is_step_counted: bool
    """The program reports no steps: these are what its optimizers have done in this attempt."""
    epoch: int | None
    loss: float | None
    """Mean over the ranks that report one."""
    steps_per_s: float | None
    last_step: int | None
    """The step that training ends after; this and the next four are known of programs that use the engine."""
    remaining_s: float | None
    """Until then, at the present rate."""
    goodput_frac: float | None
    """Time in steps that count over all time since the first attempt began."""
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    allow_faults: bool
    """Harm may be done to its ranks on request."""
    exit_code: int | None
    detail: str
    notes: list[str]
    """What limits what can be seen of the ranks, or slows them down, in sentences."""
    root_cause: RootCauseRow | None
    """Once a rank has failed."""


class OtherJobRow(msgspec.Struct, frozen=True):
    """A job on the same nodes that is not the one that is shown."""

    job_id: str
    attempt: int
    state: str
    severity: Severity
    cause: Cause | None
    """Of its worst verdict; None while none stands."""
    culprits: list[int]
    is_concurrent: bool
    """It has not ended, or has failed after the job that is shown was started."""
    text: str
    """`job b, frozen rank 2`."""


class NodeRow(msgspec.Struct, frozen=True):
    """A node."""

    node: str
    hostname: str
    state: str
    """connecting, up, stale or lost."""
    severity: Severity
    ranks: str
    """Its ranks, as `0-1` or `0,3-5`."""
    num_running: int
    num_ranks: int
    cpu_frac: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    agent_rss_bytes: int | None
    load_1min: float | None
    swap_used_bytes: int | None
    swap_total_bytes: int | None
    shm_used_bytes: int | None
    """Of /dev/shm."""
    shm_total_bytes: int | None
    disk_free_bytes: int | None
    """Of the file system that holds the agent's directory."""
    disk_total_bytes: int | None
    nic_rx_bytes_hz: float | None
    nic_tx_bytes_hz: float | None
    gpu_watch: str
    """starting, watching, absent or silent; empty before the first report."""
    gpu_detail: str
    """Why there are no fresh figures of its GPUs."""
    age_s: float | None
    """Since its last report."""
    trouble: str = ""
    """Why it cannot be heard from here, as far as that is known; empty while nothing is in the way."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are no longer those of now."""
        return self.state in {"stale", "lost"}


class RankRow(msgspec.Struct, frozen=True):
    """A rank."""

    rank: int
    node: str
    local_rank: int | None
    pid: int | None
    state: RankState
    severity: Severity
    step: int | None
    epoch: int | None
    loss: float | None
    phase: str
    phase_s: float | None
    group: str
    op: str
    label: str
    seq: int | None
    """The last collective of `group` that it called."""
    waiting_s: float | None
    """How long it has been waiting in it; None when it does not wait."""
    wait_frac: float | None
    """Share of the recent seconds it spent waiting, 0..1: the straggler waits least."""
    quiet_s: float | None
    """How long it has printed nothing."""
    cpu_cores: float | None
    """Cores that its process keeps busy."""
    metrics: dict[str, float | None]
    """The newest values of what the job's patterns find in its lines."""
    rss_bytes: int | None
    pss_bytes: int | None
    """Resident memory with shared pages split among their users."""
    gpu: int | None
    """Index, as nvidia-smi counts, of the GPU it is at home on."""
    gpu_used_bytes: int | None
    """What NVML says that it holds there."""
    torch_allocated_bytes: int | None
    """What torch's allocator holds there: in tensors, and in all; and the highest of the first."""
    torch_reserved_bytes: int | None
    torch_peak_bytes: int | None
    age_s: float | None
    """Of its report."""
    where: str
    """`file.py:line in function`."""
    detail: str
    """How it ended, or what is odd about it, in words."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are neither those of now nor its last ones."""
        has_ended = self.state in {RankState.DONE, RankState.STOPPED, RankState.EXITED}
        return self.age_s is not None and self.age_s > OLD_S and not has_ended


class BarrierRow(msgspec.Struct, frozen=True):
    """A collective in which somebody waits now."""

    job: str
    attempt: int
    group: str
    seq: int
    op: str
    label: str
    waiting: list[int]
    missing: list[int]
    waited_s: float
    """The longest wait of its ranks."""
    where: str
    """Where the waiting ranks stand (the most common line)."""
    missing_where: str
    """Where the first missing rank stands."""
    severity: Severity
    text: str
    """A sentence: `ranks 0-1, 3 wait in all_reduce #57 for rank 2, 1.7 s`."""


class MemoryGrowthRow(msgspec.Struct, frozen=True):
    """How memory grows, or grew before the rank ended."""

    rank: int
    """The one that comes to its limit first; it and the next six are this rank's."""
    limit: str
    """machine, cgroup, address_space, data or gpu."""
    rate_bytes_per_min: float
    held_bytes: int
    limit_bytes: int
    used_bytes: int
    """Of the limit, by whomever it counts."""
    remaining_s: float
    """Until the limit is reached at this rate, together with other ranks that share it."""
    growing_s: float
    """How long it has grown so."""


class VerdictRow(msgspec.Struct, frozen=True):
    """A culprit, named."""

    cause: Cause
    culprits: list[int]
    waiting: list[int]
    """The ranks that wait for them; empty when nobody does yet."""
    node: str
    job: str
    attempt: int
    group: str
    seq: int | None
    op: str
    label: str
    waited_s: float
    where: str
    severity: Severity
    text: str
    hint: str
    """The next step, in words."""
    memory: MemoryGrowthRow | None = None
    """For memory_growth, and for oom and a SIGKILL where memory grew before."""


class HolderRow(msgspec.Struct, frozen=True):
    """A process that holds memory on a GPU."""

    pid: int
    rank: int | None
    """None for what is not of this job."""
    used_bytes: int | None
    is_foreign: bool
    """True for a rank that should not be here."""


class XidRow(msgspec.Struct, frozen=True):
    """An error that the driver has logged for a GPU."""

    code: int
    times: int
    age_s: float
    """Since the last time."""


class GpuRow(msgspec.Struct, frozen=True):
    """A GPU."""

    node: str
    gpu: int
    """As nvidia-smi counts."""
    name: str
    uuid: str
    state: str
    """ok, lost, reset_required, unreadable, or silent: its figures are old."""
    severity: Severity
    ranks: list[int]
    """Ranks of the job that are at home on it."""
    busy_frac: float | None
    """Share of the last second in which some kernel ran."""
    memory_busy_frac: float | None
    memory_used_bytes: int | None
    """By everybody, as NVML says."""
    memory_total_bytes: int | None
    torch_allocated_bytes: int | None
    """By the ranks of the job, as torch says: in tensors."""
    torch_reserved_bytes: int | None
    """In all."""
    temperature_celsius: float | None
    power_watts: float | None
    power_limit_watts: float | None
    sm_clock_hz: int | None
    sm_clock_max_hz: int | None
    memory_clock_hz: int | None
    throttle_reasons: list[str]
    ecc_corrected_errors: int | None
    ecc_uncorrected_errors: int | None
    xids: list[XidRow]
    """The newest first."""
    holders: list[HolderRow]
    """The largest first."""
    detail: str
    """What is odd about it, in words."""
    age_s: float
    """Of its figures."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are no longer those of now."""
        return self.age_s > OLD_GPU_S


class Finding(msgspec.Struct, frozen=True):
    """Something about GPUs that somebody should do something about."""

    severity: Severity
    text: str
    hint: str
    """What to do."""


class Progress(msgspec.Struct, frozen=True):
    """How far the job has come since it began."""

    steps: int | None
    """The fewest steps that any rank has done in this attempt."""
    loss_first: float | None
    """Mean over the ranks that report one."""
    loss_last: float | None


METRIC_PREFIX = "metric "
"""Before the name of a figure that a pattern of the job finds in the ranks' lines."""


class FigureKey(StrEnum):
    """What a figure is of; a metric's key is `METRIC_PREFIX` and its name."""

    LOSS = "loss"
    STEP_RATE = "step_rate"
    """Steps a second."""
    WAIT_FRAC = "wait_share"
    """Share of the last seconds that a rank spent waiting."""
    GPU_USE = "gpu_use"
    """Share of the last second in which some kernel ran, by GPU."""
    GPU_MEMORY = "gpu_memory"
    """Bytes held by everybody, by GPU."""
    CPU_CORES = "cpu_cores"
    """Cores that a rank's process keeps busy."""
    RANK_MEMORY = "rank_memory"
    """Resident bytes of a rank's process."""
    HOST_CPU = "host_cpu"
    """Busy share of all cores, by node."""


class Figure(msgspec.Struct, frozen=True):
    """A figure at one moment; None is not known, never a made-up zero."""

    key: str
    value: float | None
    """The mean; NaN or infinite where one of those it is over is."""
    low: float | None = None
    """The lowest and the highest of those that are finite; None where there is but one figure."""
    high: float | None = None
    low_who: str = ""
    """Whose it is, in clean words: `rank 2`, `GPU 3 of node-7`, `node-7`; the first of equals."""
    high_who: str = ""
