"""The console's rows: `app.view.view` makes them of the model, for the screen, the printed lines and `--json` alike.

Every string in a row is clean (`app.text`): it may be written to a terminal as it is. Rows that appear in JSON carry
units in their field names; a value that is not known is None, never a made-up zero.

`Figure` is a figure of a job at one moment, over all its ranks, GPUs or nodes; the charts show its course.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from app.diagnosis.causes import Cause, RankState, Severity
from app.text import step_text
from ddpcore.wire import Phase

SCHEMA = 1
"""The `"schema"` of every JSON object this package prints."""
OLD_S = 2.0
"""Seconds after which the report of a rank or a node is shown as old."""
OLD_GPU_S = 5.0
"""Seconds after which the figures of a GPU are old; its node then reports the driver as silent."""


SEVERITY_TEXTS = {
    Severity.OK: "OK",
    Severity.QUIET: "INFO",
    Severity.WARNING: "WARNING",
    Severity.CRITICAL: "CRITICAL",
}
"""Names of severities on the screen and in printed lines."""


class Headline(msgspec.Struct, frozen=True):
    """The first line of every view: the worst verdict in a sentence, or the state of the job and its nodes."""

    severity: Severity
    text: str


class RootCauseRow(msgspec.Struct, frozen=True):
    """Why a job failed."""

    rank: int | None
    """Rank that failed; None for a launcher."""
    node: str
    end: str
    """End of its process: `exited with code 1`, `was killed by SIGKILL`."""
    exception: str
    """Exception that caused everything else; empty when there is none."""
    outer: str
    """Exception that ended the rank, where it differs."""
    where: str
    """`file.py:line in function`."""
    traceback: list[str]
    """Lines of the traceback."""
    is_consequence: bool
    """Whether it only lost another rank or was asked to end, for an unknown reason."""
    text: str
    """A sentence."""


class JobRow(msgspec.Struct, frozen=True):
    """A job over all its nodes."""

    job_id: str
    attempt: int
    state: str
    """prepared, starting, running, restarting, stopping, succeeded, failed, stopped or lost; ended: not known how."""
    severity: Severity
    world_size: int
    num_nodes: int
    step: int | None
    """Lowest step of any rank, all as of one moment."""
    is_step_least: bool
    """Whether the ranks at that step may have made more since their last reports."""
    is_step_counted: bool
    """Whether `step` counts the optimizers' steps in this attempt: the program reports none."""
    epoch: int | None
    loss: float | None
    """Mean over the ranks that report one."""
    loss_step: int | None
    """Lowest step of these losses; None where it is not known."""
    steps_per_s: float | None
    last_step: int | None
    """Step after which training ends; it and the next four fields are known only with the engine."""
    remaining_s: float | None
    """Seconds until then, at the present rate."""
    goodput_frac: float | None
    """Time spent in steps that count, divided by all time since the first attempt began."""
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    allow_faults: bool
    """Whether faults may be injected into its ranks."""
    is_adopted: bool
    """Whether another launcher has started it: then it can be stopped and killed, not restarted."""
    exit_code: int | None
    detail: str
    notes: list[str]
    """Sentences about what limits the view of the ranks, or slows them down."""
    root_cause: RootCauseRow | None
    """Reason of the failure; None until a rank has failed."""

    @property
    def step_text(self) -> str:
        """Step to show: `384`, `384+` where its ranks may have come further; empty where it is not known."""
        return step_text(self.step, is_least=self.is_step_least)


class OtherJobRow(msgspec.Struct, frozen=True):
    """A job on the same nodes that is not shown."""

    job_id: str
    attempt: int
    state: str
    severity: Severity
    cause: Cause | None
    """Cause of its worst verdict; None without a verdict."""
    culprits: list[int]
    is_concurrent: bool
    """Whether it still runs, or failed after the shown job was started."""
    text: str
    """`job b, frozen rank 2`."""


class NodeRow(msgspec.Struct, frozen=True):
    """A node."""

    node: str
    hostname: str
    state: str
    """connecting, up, stale, lost, or down where its agent was stopped."""
    severity: Severity
    ranks: str
    """Ranks of the node, as `0-1` or `0,3-5`."""
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
    """Bytes used in /dev/shm."""
    shm_total_bytes: int | None
    disk_free_bytes: int | None
    """Free bytes of the file system that holds the agent's directory."""
    disk_total_bytes: int | None
    nic_rx_bytes_hz: float | None
    nic_tx_bytes_hz: float | None
    gpu_watch: str
    """starting, watching, absent or silent; empty before the first report."""
    gpu_detail: str
    """Reason why current GPU figures are missing."""
    age_s: float | None
    """Seconds since its last report."""
    trouble: str = ""
    """Reason why the console cannot reach it, where known; empty while it can."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are out of date."""
        return self.state in {"stale", "lost", "down"}


class RankRow(msgspec.Struct, frozen=True):
    """A rank."""

    rank: int
    node: str
    local_rank: int | None
    pid: int | None
    state: RankState
    severity: Severity
    step: int | None
    """Its step at the moment of which all living ranks' steps are known; its last one once it has ended."""
    is_step_least: bool
    """Whether it may have come further: it does not report, or ended without a last report."""
    epoch: int | None
    loss: float | None
    loss_step: int | None
    """Step of its loss."""
    phase: str
    phase_s: float | None
    group: str
    op: str
    label: str
    seq: int | None
    """Number of the last collective of `group` that it called."""
    waiting_s: float | None
    """Seconds that it has waited in that collective; None when it does not wait."""
    wait_frac: float | None
    """Share of the recent seconds it spent waiting, 0..1: the straggler waits least."""
    quiet_s: float | None
    """Seconds for which it has printed nothing."""
    cpu_cores: float | None
    """Number of cores that its process keeps busy."""
    metrics: dict[str, float | None]
    """Latest values that the job's patterns found in its lines."""
    rss_bytes: int | None
    pss_bytes: int | None
    """Resident memory with shared pages split among their users."""
    gpu: int | None
    """Index of its home GPU, as nvidia-smi counts."""
    gpu_used_bytes: int | None
    """Bytes that it holds on that GPU, as NVML reports."""
    torch_allocated_bytes: int | None
    """Bytes in tensors, in torch's allocator on that GPU; the next two are all its bytes and the peak in tensors."""
    torch_reserved_bytes: int | None
    torch_peak_bytes: int | None
    age_s: float | None
    """Seconds since its report."""
    where: str
    """`file.py:line in function`."""
    detail: str
    """End of the rank, or its anomaly, as text."""

    @property
    def step_text(self) -> str:
        """Step to show: `384`, `384+` where it may have come further; empty where it is not known."""
        return step_text(self.step, is_least=self.is_step_least)

    @property
    def places(self) -> tuple[str, ...]:
        """Its place and its detail, as far as they are known.

        The end of an ended rank comes first: it distinguishes the culprit from victims, which all stood at one line.
        """
        parts = (self.detail, self.where) if self.state is RankState.EXITED else (self.where, self.detail)
        return tuple(filter(None, parts))

    @property
    def phase_text(self) -> str:
        """Phase to show; empty where no phase of a training step is known."""
        return "" if self.phase == Phase.OTHER else self.phase

    @property
    def is_old(self) -> bool:
        """Whether its figures are neither current nor its final ones."""
        return self.age_s is not None and self.age_s > OLD_S and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self.state in {RankState.DONE, RankState.STOPPED, RankState.ENDED, RankState.EXITED}


class MemoryGrowthRow(msgspec.Struct, frozen=True):
    """The growth of memory, now or before the rank ended."""

    rank: int
    """Rank that reaches its limit first; the next six fields are of this rank."""
    limit: str
    """machine, cgroup, address_space, data or gpu."""
    rate_bytes_per_min: float
    held_bytes: int
    limit_bytes: int
    used_bytes: int
    """Bytes used of the limit, by every process that counts towards it."""
    remaining_s: float
    """Seconds until the limit is reached at this rate, together with other ranks that share it."""
    growing_s: float
    """Seconds for which it has grown steadily."""


class EndRow(msgspec.Struct, frozen=True):
    """What ended a rank, beside its own words; empty or None where it is not known."""

    gpu: int | None
    """Index of the GPU that brought the end about."""
    gpu_state: str
    xids: list[int]
    """Its Xid errors, the gravest first."""
    blame: str
    """Whose fault the first one is: hardware, driver, program, fabric."""
    action: str
    """NVIDIA's first advice: fix_program, restart_job, reset_gpu, reboot_node, check_links, check_power."""
    memory_limit_bytes: int | None
    cgroup: str
    disk: str
    """Where the full file system is mounted."""
    disk_limit: str
    """space, inodes or quota."""
    sender: str
    """Who sent the signal: rankdeck, oomd."""


class SignalRow(msgspec.Struct, frozen=True):
    """A signal of a rank, its GPU or its host beside that of its peers."""

    signal: str
    unit: str
    """fraction, hz, celsius, watts, count, per_s, bytes_per_s or bits_per_s."""
    value: float
    peers: float | None
    """Median of the peers: other ranks of the job, or other hosts for a host's signal; None without other hosts."""
    before: float | None
    """Value before its last lasting change."""
    since_s: float | None
    """Seconds since that change began."""
    is_worse: bool
    """Whether it stands out from the peers' in the direction that harms."""


class BecauseRow(msgspec.Struct, frozen=True):
    """A cause of slowness and its evidence."""

    signal: str
    unit: str
    """As in a `SignalRow`."""
    ranks: list[int]
    """Culprits that it holds for."""
    gpu: int | None
    """Index of the GPU of the first of them, as nvidia-smi counts."""
    value: float
    """Value of the first of them."""
    peers: float
    before: float | None
    since_s: float | None
    """Seconds since it began; None where that is not known."""
    confidence: str
    """likely or possible."""
    support: list[SignalRow]
    """Other signals that agree."""
    text: str
    """A clause: `its GPU 3 runs at 1,230 MHz, its peers' at 1,980 MHz (slowed by heat for 4 min, 88 C)`."""
    event: str
    """What has begun, as an event: `GPU 3 of gpu2: slowed by heat; rank 3 is slow`."""


class VerdictRow(msgspec.Struct, frozen=True):
    """A verdict: the cause, the culprits and the ranks that wait."""

    cause: Cause
    culprits: list[int]
    waiting: list[int]
    """Ranks that wait for the culprits; empty while none waits."""
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
    """Next step for the user, as text."""
    memory: MemoryGrowthRow | None = None
    """Growth of memory, for memory_growth, and for oom or a SIGKILL after growth."""
    end: EndRow | None = None
    """What the node knows of the end, for exited and oom."""
    because: list[BecauseRow] = []
    """Causes of a straggler's slowness, the best first."""
    num_signals_compared: int | None = None
    """Signals of a straggler that were compared with its peers'. 0 where its agent takes none; None for other verdicts,
    and before enough was compared."""
    differing: list[SignalRow] = []
    """Those of them that stand out, causes and what follows from slowness included."""


class HolderRow(msgspec.Struct, frozen=True):
    """A process that holds memory on a GPU."""

    pid: int
    rank: int | None
    """Rank of the process; None when it is not of this job."""
    used_bytes: int | None
    is_foreign: bool
    """True for a rank that should not be on this GPU."""


class XidRow(msgspec.Struct, frozen=True):
    """An error that the driver has logged for a GPU."""

    code: int
    times: int
    age_s: float
    """Seconds since the last time."""


class GpuRow(msgspec.Struct, frozen=True):
    """A GPU."""

    node: str
    gpu: int
    """Index, as nvidia-smi counts."""
    name: str
    uuid: str
    state: str
    """ok, lost, reset_required, unreadable, or silent: its figures are old."""
    severity: Severity
    ranks: list[int]
    """Ranks of the job that have it as their home GPU."""
    busy_frac: float | None
    """Share of the last second in which any kernel ran."""
    memory_busy_frac: float | None
    memory_used_bytes: int | None
    """Bytes used by all processes, as NVML reports."""
    memory_total_bytes: int | None
    torch_allocated_bytes: int | None
    """Bytes in tensors of the job's ranks, as torch reports."""
    torch_reserved_bytes: int | None
    """Bytes in torch's allocators of the job's ranks, used or free."""
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
    """Driver errors, the latest first."""
    holders: list[HolderRow]
    """Processes that hold memory, the largest first."""
    detail: str
    """Anomalies of the GPU, as text."""
    age_s: float
    """Seconds since its figures were read."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are out of date."""
        return self.age_s > OLD_GPU_S


class Finding(msgspec.Struct, frozen=True):
    """A problem with GPUs or memory that needs attention."""

    severity: Severity
    text: str
    hint: str
    """Next step for the user."""


class Progress(msgspec.Struct, frozen=True):
    """The progress of the job since it began."""

    steps: int | None
    """Fewest steps that any rank has done in this attempt."""
    loss_first: float | None
    """Mean over the ranks that report one."""
    loss_last: float | None


METRIC_PREFIX = "metric "
"""Prefix of the key of a figure that the job's patterns find in the ranks' lines."""


class FigureKey(StrEnum):
    """What a figure measures; a metric's key is `METRIC_PREFIX` and its name."""

    LOSS = "loss"
    STEP_RATE = "step_rate"
    """Steps a second."""
    WAIT_FRAC = "wait_share"
    """Share of the recent seconds that a rank spent waiting."""
    GPU_USE = "gpu_use"
    """Share of the last second in which any kernel ran, by GPU."""
    GPU_MEMORY = "gpu_memory"
    """Bytes used by all processes, by GPU."""
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
    """Mean; NaN or infinite when one of the values is."""
    low: float | None = None
    """Lowest of the finite values, `high` the highest; None with a single value."""
    high: float | None = None
    low_who: str = ""
    """Owner of the lowest value, clean: `rank 2`, `GPU 3 of node-7`, `node-7`; the first of equals."""
    high_who: str = ""
