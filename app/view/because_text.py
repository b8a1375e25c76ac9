"""Causes of slowness as text: clauses of a verdict's sentence, hints, events, and figures with their units.

`because_parts` continues a sentence about slow ranks: `likely because its GPU 3 runs at 1,230 MHz, its peers' at
1,980 MHz (slowed by heat for 4 min, 88 C)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.wire.signals import Signal
from app.diagnosis.because.findings import Confidence
from app.diagnosis.because.signals import TRAITS, Scope
from app.text import UNKNOWN, bytes_text, clean_name, percent_text, ranks_text, seconds_text
from app.view.rows import BecauseRow, SignalRow

if TYPE_CHECKING:
    from app.diagnosis.because.findings import Because, Compared
    from app.diagnosis.verdicts import Verdict

FRACTION, HZ, CELSIUS, WATTS, COUNT = "fraction", "hz", "celsius", "watts", "count"
PER_S, BYTES_PER_S, BITS_PER_S = "per_s", "bytes_per_s", "bits_per_s"


class Wording(NamedTuple):
    """How a signal is named.

    Attributes:
        unit: Unit of its value.
        label: Its name in a table, at most `MAX_LABEL` characters.
        event: What has begun, after the name of its rank, GPU or host.
        clause: What differs, with its value and the peers'. `its` is the slow rank's, `other` the peers'.
    """

    unit: str
    label: str
    event: str
    clause: str


MAX_LABEL = 24
_LINK = "the PCIe link of {gpu}"

WORDINGS: dict[Signal, Wording] = {
    Signal.GPU_THERMAL: Wording(
        FRACTION, "GPU slowed by heat", "slowed by heat", "{gpu} is slowed by heat {value} of the time, {other} {peers}"
    ),
    Signal.GPU_HW_SLOWDOWN: Wording(
        FRACTION,
        "GPU hardware slowdown",
        "slowed by its hardware",
        "{gpu} is slowed by its hardware {value} of the time, {other} {peers}",
    ),
    Signal.GPU_POWER_BRAKE: Wording(
        FRACTION,
        "GPU power brake",
        "slowed by the power supply",
        "{gpu} is slowed by the power supply {value} of the time, {other} {peers}",
    ),
    Signal.GPU_POWER_LIMIT: Wording(
        WATTS, "GPU power limit", "a lower power limit", "{gpu} may draw {value}, {other} {peers}"
    ),
    Signal.GPU_POWER_CAP: Wording(
        FRACTION,
        "GPU at its power limit",
        "slowed by its power limit",
        "{gpu} is slowed by its power limit {value} of the time, {other} {peers}",
    ),
    Signal.GPU_CLOCK: Wording(HZ, "GPU clock", "a lower clock", "{gpu} runs at {value}, {other} at {peers}"),
    Signal.GPU_TEMPERATURE: Wording(CELSIUS, "GPU temperature", "hot", "{gpu} has {value}, {other} {peers}"),
    Signal.GPU_MEMORY_CLOCK: Wording(
        HZ, "GPU memory clock", "a lower memory clock", "the memory of {gpu} runs at {value}, {other} at {peers}"
    ),
    Signal.GPU_OTHERS: Wording(
        COUNT,
        "other processes on GPU",
        "used by another process",
        "{processes} {own_gpu}, {other} have {peers}",
    ),
    Signal.PCIE_WIDTH: Wording(
        COUNT, "PCIe lanes", "fewer PCIe lanes", f"{_LINK} has {{value}} lanes, {{other}} {{peers}}"
    ),
    Signal.PCIE_GENERATION: Wording(
        COUNT,
        "PCIe generation",
        "a slower PCIe link",
        f"{_LINK} runs at generation {{value}}, {{other}} at {{peers}}",
    ),
    Signal.PCIE_REPLAYS: Wording(
        PER_S, "PCIe replays", "errors of its PCIe link", f"{_LINK} repeats {{value}} packets/s, {{other}} {{peers}}"
    ),
    Signal.NVLINKS: Wording(COUNT, "NVLinks", "an NVLink is down", "{gpu} has {value} NVLinks, {other} {peers}"),
    Signal.NVLINK_ERRORS: Wording(
        PER_S, "NVLink errors", "errors of NVLinks", "{gpu} has {value} NVLink errors/s, {other} {peers}"
    ),
    Signal.GPU_ROW_REMAP: Wording(
        COUNT,
        "GPU rows to replace",
        "a faulty memory row",
        "a faulty memory row of {gpu} is not replaced yet, or cannot be",
    ),
    Signal.GPU_ECC_CORRECTED: Wording(
        PER_S,
        "GPU memory errors",
        "corrected memory errors",
        "the memory of {gpu} has {value} corrected errors/s, {other} {peers}",
    ),
    Signal.CPU_THROTTLED: Wording(
        FRACTION,
        "held by CPU quota",
        "held by a CPU quota",
        "the CPU quota of its cgroup holds {it} {value} of the time, {peer} {peers}",
    ),
    Signal.CPU_WAIT: Wording(
        FRACTION, "waits for a CPU", "waits for a CPU", "{it} waits {value} of the time for a CPU, {peer} {peers}"
    ),
    Signal.CPUS_ALLOWED: Wording(
        COUNT, "CPUs allowed", "bound to few CPUs", "{it} may use {value} CPUs, {peer} {peers}"
    ),
    Signal.FAR_FROM_GPU: Wording(
        COUNT,
        "CPUs far from its GPU",
        "bound to CPUs far from its GPU",
        "{it} runs on CPUs of another NUMA node than {gpu}, {peer} not",
    ),
    Signal.BLOCKED: Wording(
        FRACTION,
        "waits for a disk",
        "waits for a disk or file system",
        "{it} waits {value} of the time for a disk or file system, {peer} {peers}",
    ),
    Signal.MAJOR_FAULTS: Wording(
        PER_S,
        "page faults on disk",
        "memory comes from a disk",
        "{it} fetches {value} pages/s from a disk, {peer} {peers}",
    ),
    Signal.GC_PAUSE: Wording(
        FRACTION,
        "garbage collection",
        "long garbage collections",
        "Python's garbage collection takes {value} of its time, of {other} {peers}",
    ),
    Signal.GIL_WAIT: Wording(
        FRACTION,
        "interpreter lock held",
        "the interpreter lock is held",
        "Python's interpreter lock is held {value} of its time, of {other} {peers}",
    ),
    Signal.LOG_LINES: Wording(PER_S, "lines printed", "prints much", "{it} prints {value} lines/s, {peer} {peers}"),
    Signal.CPU_OTHERS: Wording(
        FRACTION,
        "CPUs used by others",
        "processes of no job use its CPUs",
        "processes of no job use {value} of the CPUs of {host}, {elsewhere} {peers}",
    ),
    Signal.CPU_STEAL: Wording(
        FRACTION,
        "CPUs stolen",
        "the hypervisor takes its CPUs",
        "the hypervisor takes {value} of the CPUs of {host}, {elsewhere} {peers}",
    ),
    Signal.CPU_PRESSURE: Wording(
        FRACTION,
        "CPU pressure",
        "CPU pressure",
        "tasks of {host} wait {value} of the time for CPUs, {elsewhere} {peers}",
    ),
    Signal.CPU_CLOCK: Wording(
        HZ, "CPU clock", "a lower CPU clock", "the CPUs of {host} run at {value}, {elsewhere} at {peers}"
    ),
    Signal.MEMORY_PRESSURE: Wording(
        FRACTION,
        "memory pressure",
        "tasks wait for memory",
        "tasks of {host} wait {value} of the time for memory, {elsewhere} {peers}",
    ),
    Signal.SWAPPED: Wording(BYTES_PER_S, "swapped", "memory is swapped", "{host} swaps {value}, {elsewhere} {peers}"),
    Signal.IO_PRESSURE: Wording(
        FRACTION,
        "disk pressure",
        "tasks wait for a disk",
        "tasks of {host} wait {value} of the time for a disk, {elsewhere} {peers}",
    ),
    Signal.NIC_SPEED: Wording(
        BITS_PER_S,
        "network speed",
        "a slower network",
        "the network of {host}{nic} runs at {value}, {elsewhere} at {peers}",
    ),
    Signal.NIC_ERRORS: Wording(
        PER_S, "network errors", "network errors", "{host}{nic} has {value} network errors/s, {elsewhere} {peers}"
    ),
    Signal.NIC_DROPS: Wording(
        PER_S, "packets dropped", "packets are dropped", "{host}{nic} drops {value} packets/s, {elsewhere} {peers}"
    ),
    Signal.TCP_RETRANSMITS: Wording(
        FRACTION,
        "TCP sent again",
        "TCP sends much again",
        "{host}{nic} sends {value} of its TCP segments again, {elsewhere} {peers}",
    ),
}
"""Wording of each signal."""

THROTTLED = {
    Signal.GPU_THERMAL: "slowed by heat",
    Signal.GPU_HW_SLOWDOWN: "slowed by its hardware",
    Signal.GPU_POWER_BRAKE: "slowed by the power supply",
    Signal.GPU_POWER_LIMIT: "power limit {value}, {other} {peers}",
    Signal.GPU_POWER_CAP: "slowed by its power limit",
}
"""Reason of a lower clock, beside both clocks."""
BRIEF = {
    Signal.GPU_TEMPERATURE: "{value}",
    Signal.GPU_POWER_CAP: "at that limit {value} of the time",
    Signal.CPU_WAIT: "it waits {value} of the time for a CPU",
    Signal.CPU_THROTTLED: "its CPU quota holds it {value} of the time",
    Signal.CPU_OTHERS: "processes of no job use {value} of the CPUs",
    Signal.CPU_STEAL: "the hypervisor takes {value} of the CPUs",
    Signal.CPUS_ALLOWED: "it may use {value} CPUs",
    Signal.MAJOR_FAULTS: "it fetches {value} pages/s from a disk",
    Signal.BLOCKED: "it waits {value} of the time for a disk",
    Signal.IO_PRESSURE: "disk pressure {value}",
    Signal.MEMORY_PRESSURE: "memory pressure {value}",
    Signal.SWAPPED: "the host swaps {value}",
}
"""Support of a cause, within brackets."""
MAX_BRIEF = 2
MAX_DIFFERING = 2
"""Limit of signals that differ and are no cause in a sentence."""
MORE_THAN_ONE = 1.5
"""Smoothed number of processes from which there are several."""


def amount_text(signal: Signal, value: float | None) -> str:
    """Return a value with its unit: `1,230 MHz`, `62 %`, `88 C`, `40 MiB/s`, `25 Gbit/s`."""
    if value is None:
        return UNKNOWN
    unit = WORDINGS[signal].unit
    if unit == FRACTION:
        return f"{100 * value:.1f} %" if 0.0005 <= value < 0.0195 else percent_text(value)
    if unit == HZ:
        return f"{value / 1e6:,.0f} MHz"
    if unit == CELSIUS:
        return f"{value:.0f} C"
    if unit == WATTS:
        return f"{value:,.0f} W"
    if unit == BYTES_PER_S:
        return f"{bytes_text(value)}/s"
    if unit == BITS_PER_S:
        return f"{value / 1e9:,.3g} Gbit/s" if value >= 1e9 else f"{value / 1e6:,.3g} Mbit/s"
    text = f"{value:.1f}" if 0.05 <= value < 9.95 else f"{value:,.0f}"
    return text.removesuffix(".0") if unit == COUNT else text


def because_parts(verdict: Verdict) -> list[str]:
    """Return the causes of a verdict as parts of its sentence, the best first; empty without any."""
    parts, before = [], None
    for because in verdict.because:
        word = "" if because.confidence is before else f"{LEADS[because.confidence]} because "
        before = because.confidence
        parts.append(f"{word}{clause(because, verdict)}")
    return parts


LEADS = {Confidence.LIKELY: "likely", Confidence.POSSIBLE: "possibly"}


def nothing_differs_text(verdict: Verdict) -> str:
    """Return that no cause was found, or looked for; empty before that is known, and where there is one.

    What differs and is no cause (it began at another time, or accounts for too little) is shown as a table shows it.
    """
    if verdict.comparison is None or verdict.because:
        return ""
    its = "its" if len(verdict.culprits) == 1 else "their"
    num_signals, differing = verdict.comparison.num_signals, verdict.comparison.differing
    if not num_signals:
        return f"why is not known: {its} agent takes no signals"
    cores = _cores_text(verdict)
    none = f"{cores}no other cause found" if cores else "no cause found"
    if not differing:
        return f"{none}: none of {num_signals} signals differs enough from {its} peers'"
    figures = ", ".join(
        f"{WORDINGS[one.signal].label} {amount_text(one.signal, one.value)}"
        f" (peers {amount_text(one.signal, one.peers)})"
        for one in differing[:MAX_DIFFERING]
    )
    more = f", and {len(differing) - MAX_DIFFERING} more" if len(differing) > MAX_DIFFERING else ""
    differ = "differs" if len(differing) == 1 else "differ"
    return f"{none}; {len(differing)} of {num_signals} signals {differ}: {figures}{more}"


MAX_SLEEPING = 0.1
"""Cores below which a rank sleeps or waits."""
SLEEPING_PART, RUNNING_PART = 0.25, 0.5
"""Parts of its cost: a rank sleeps that runs for less than the first, and works that runs for the second more."""


def _cores_text(verdict: Verdict) -> str:
    """Return `it uses 56 % of a CPU, its peers 2 %; `, or that it sleeps; empty where neither accounts for the cost."""
    compared = verdict.comparison
    if compared is None or compared.cores is None or verdict.cost_frac is None:
        return ""
    own, peers = compared.cores
    if own < min(MAX_SLEEPING, SLEEPING_PART * verdict.cost_frac):
        return f"it sleeps or waits: it uses {percent_text(own)} of a CPU; "
    if own - peers >= RUNNING_PART * verdict.cost_frac and own >= 2 * peers:
        return f"it uses {percent_text(own)} of a CPU, its peers {percent_text(peers)}; "
    return ""


def clause(because: Because, verdict: Verdict) -> str:
    """Return what differs, with its evidence in brackets."""
    is_one = len(verdict.culprits) == 1
    clock = next((one for one in because.support if one.signal is Signal.GPU_CLOCK), None)
    fields = _fields(because, is_one=is_one)
    details = []
    if because.signal in THROTTLED and clock is not None and clock.peers is not None:
        shown = {
            "value": amount_text(Signal.GPU_CLOCK, clock.value),
            "peers": amount_text(Signal.GPU_CLOCK, clock.peers),
        }
        text = WORDINGS[Signal.GPU_CLOCK].clause.format(**(fields | shown))
        details.append(THROTTLED[because.signal].format(**fields) + _for(because))
    else:
        text = WORDINGS[because.signal].clause.format(**fields)
        details += [_for(because).strip()] if because.since_s is not None else []
    details += _support(because)
    return f"{text} ({', '.join(details)})" if details else text


def _for(because: Because) -> str:
    return "" if because.since_s is None else f" for {seconds_text(because.since_s)}"


def _support(because: Because) -> list[str]:
    """Return the figures that agree, in brackets; a throttled clock is in the clause itself."""
    shown = [one for one in because.support if one.signal in BRIEF]
    return [BRIEF[one.signal].format(value=amount_text(one.signal, one.value)) for one in shown[:MAX_BRIEF]]


def _fields(because: Because, *, is_one: bool) -> dict[str, str]:
    whose = "its" if is_one else f"{ranks_text(because.ranks[:1])}'s"
    number = "" if because.gpu is None else f" {because.gpu}"
    return {
        "its": whose,
        "it": "it" if is_one else ranks_text(because.ranks[:1]),
        "gpu": f"{whose} GPU{number}",
        "own_gpu": f"{whose} MIG instance of GPU{number}" if because.has_instance else f"{whose} GPU{number}",
        "other": "its peers'" if is_one else "the others'",
        "peer": "its peers" if is_one else "the others",
        "host": clean_name(because.node),
        "elsewhere": "other hosts",
        "nic": f" ({clean_name(because.nic)})" if because.nic else "",
        "processes": "another process uses" if because.value < MORE_THAN_ONE else f"{because.value:.0f} others use",
        "value": amount_text(because.signal, because.value),
        "peers": amount_text(because.signal, because.peers),
    }


def subject_text(because: Because) -> str:
    """Return what a cause is about: `GPU 3 of gpu2`, `rank 3 on gpu2` or `gpu2`."""
    node, rank = clean_name(because.node), ranks_text(because.ranks[:1])
    scope = TRAITS[because.signal].scope
    if scope is Scope.HOST:
        return node
    if scope is Scope.GPU:
        return f"GPU of {rank} on {node}" if because.gpu is None else f"GPU {because.gpu} of {node}"
    return f"{rank} on {node}"


def event_text(because: Because) -> str:
    """Return that a cause began: `GPU 3 of gpu2: slowed by heat; rank 3 is slow`."""
    is_one = len(because.ranks) == 1
    return (
        f"{subject_text(because)}: {WORDINGS[because.signal].event}; "
        f"{ranks_text(because.ranks)} {'is' if is_one else 'are'} slow"
    )


HINTS: dict[Signal, str] = {
    Signal.GPU_THERMAL: "check its cooling",
    Signal.GPU_HW_SLOWDOWN: "check its cooling and power supply",
    Signal.GPU_POWER_BRAKE: "check the power supply of the host",
    Signal.GPU_POWER_LIMIT: "raise the limit: nvidia-smi -i {number} -pl WATTS",
    Signal.GPU_POWER_CAP: "compare its power limit with the others': nvidia-smi -q -d POWER",
    Signal.GPU_CLOCK: "see why: nvidia-smi -q -d PERFORMANCE,CLOCK",
    Signal.GPU_MEMORY_CLOCK: "see why: nvidia-smi -q -d PERFORMANCE,CLOCK",
    Signal.GPU_OTHERS: "the GPUs in the Memory view show who else uses it",
    Signal.PCIE_WIDTH: "reseat the card or its riser",
    Signal.PCIE_GENERATION: "check the link in the BIOS, or reseat the card",
    Signal.PCIE_REPLAYS: "reseat the card or its riser",
    Signal.NVLINKS: "see nvidia-smi nvlink --status",
    Signal.NVLINK_ERRORS: "see nvidia-smi nvlink -e",
    Signal.GPU_ROW_REMAP: "reset the GPU once the job is over; replace it if that fails",
    Signal.GPU_ECC_CORRECTED: "see nvidia-smi -q -d ECC; replace the GPU if they go on",
    Signal.CPU_THROTTLED: "raise the CPU limit of its container or cgroup (cpu.max)",
    Signal.CPU_WAIT: "see what else runs on its CPUs",
    Signal.CPUS_ALLOWED: "bind it to more CPUs (taskset, --cpus-per-task, OMP_NUM_THREADS)",
    Signal.FAR_FROM_GPU: "bind it to the NUMA node of its GPU (numactl)",
    Signal.CPU_OTHERS: "end or move what else runs there",
    Signal.CPU_STEAL: "ask for a host of its own, or fewer virtual machines on it",
    Signal.CPU_CLOCK: "check its cooling, and the CPUs' governor (cpupower frequency-info)",
    Signal.SWAPPED: "fewer loader workers or ranks there need less memory",
    Signal.MEMORY_PRESSURE: "fewer loader workers or ranks there need less memory",
    Signal.MAJOR_FAULTS: "its memory is short, or its files are mapped: see the Memory view",
    Signal.BLOCKED: "check the disk or file system that it reads from",
    Signal.IO_PRESSURE: "check the disk or file system that it reads from",
    Signal.GC_PAUSE: "collect garbage at fixed steps: gc.disable() and gc.collect(), or gc.freeze()",
    Signal.GIL_WAIT: "see which thread holds it (s): another thread or a C extension",
    Signal.LOG_LINES: "print less often, or from one rank",
    Signal.NIC_SPEED: "check cable, switch and the interface that is used (NCCL_SOCKET_IFNAME)",
    Signal.NIC_ERRORS: "check cable and switch",
    Signal.NIC_DROPS: "check the load of its network, and ring buffers (ethtool -S)",
    Signal.TCP_RETRANSMITS: "check cable and switch",
}
"""What to do about each cause; the host may also be left out."""


def because_hint(verdict: Verdict) -> str:
    """Return what to do about the best cause, and how to leave its host out where the job has others."""
    because = verdict.because[0]
    number = "N" if because.gpu is None else str(because.gpu)
    hint = HINTS[because.signal].format(number=number)
    is_of_machine = TRAITS[because.signal].scope is not Scope.RANK
    if not is_of_machine or verdict.comparison is None or verdict.comparison.num_hosts < 2:
        return hint
    job, node = clean_name(verdict.job), clean_name(because.node)
    return f"{hint}, or leave it out: rankdeck restart {job} --exclude {node}"


def because_rows(verdict: Verdict) -> list[BecauseRow]:
    """Return the causes of a verdict as rows."""
    return [
        BecauseRow(
            signal=because.signal.value,
            unit=WORDINGS[because.signal].unit,
            ranks=list(because.ranks),
            gpu=because.gpu if TRAITS[because.signal].scope is Scope.GPU else None,
            value=because.value,
            peers=because.peers,
            before=because.before,
            since_s=because.since_s,
            confidence=because.confidence.value,
            support=[signal_row(one, stands_out=one.is_worse) for one in because.support],
            text=clause(because, verdict),
            event=event_text(because),
        )
        for because in verdict.because
    ]


def differing_rows(verdict: Verdict) -> list[SignalRow]:
    """Return the signals that stand out of the first culprit that has any, as rows."""
    differing = () if verdict.comparison is None else verdict.comparison.differing
    return [signal_row(one, stands_out=True) for one in differing]


def signal_row(one: Compared, *, stands_out: bool) -> SignalRow:
    """Return a signal as a row."""
    unit = WORDINGS[one.signal].unit
    return SignalRow(one.signal.value, unit, one.value, one.peers, one.before, one.since_s, stands_out)


def signal_texts(row: SignalRow) -> tuple[str, str, str]:
    """Return the label of a signal, its value and the peers', as a table shows them."""
    signal = Signal(row.signal)
    return WORDINGS[signal].label, amount_text(signal, row.value), amount_text(signal, row.peers)
