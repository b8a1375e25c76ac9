"""What a cause of slowness is called: in a verdict's sentence, in its hint, in an event and in a table."""

from __future__ import annotations

from typing import Any

import pytest

from agent.wire.signals import Signal
from app.diagnosis.because.findings import Because, Compared, Comparison, Confidence
from app.diagnosis.causes import Cause
from app.diagnosis.verdicts import Verdict
from app.view.because_text import BRIEF, HINTS, MAX_LABEL, WORDINGS, because_rows, clause, event_text
from app.view.verdict_hints import hint
from app.view.verdict_text import MAX_TEXT, sentence

CLOCK = Compared(Signal.GPU_CLOCK, 1.23e9, 1.98e9, is_worse=True)
HEAT = Compared(Signal.GPU_TEMPERATURE, 88.0, 60.0, is_worse=True)


def because(signal: Signal, value: float, peers: float, **fields: Any) -> Because:
    facts: dict[str, Any] = {
        "ranks": (3,),
        "before": None,
        "since_s": None,
        "confidence": Confidence.LIKELY,
        "node": "gpu2",
        "gpu": 3,
        "nic": "eth0",
    }
    return Because(signal=signal, value=value, peers=peers, **(facts | fields))


def verdict(*causes: Because, **fields: Any) -> Verdict:
    facts: dict[str, Any] = {
        "culprits": (3,),
        "waiting": (0, 1, 2),
        "nodes": ("gpu2",),
        "job": "gpt",
        "attempt": 0,
        "cost_frac": 0.22,
        "wait_frac": 0.02,
        "because": causes,
        "comparison": Comparison(36, 7, 2),
    }
    return Verdict(cause=Cause.STRAGGLER, **(facts | fields))


HOT = because(Signal.GPU_THERMAL, 0.7, 0.0, since_s=240.0, support=(CLOCK, HEAT))
SLOW = "rank 3 on gpu2 is slow and costs the others about 22 % of the step time"

CLAUSES: list[tuple[Because, str]] = [
    (HOT, "its GPU 3 runs at 1,230 MHz, its peers' at 1,980 MHz (slowed by heat for 4 min, 88 C)"),
    (because(Signal.GPU_THERMAL, 0.7, 0.001), "its GPU 3 is slowed by heat 70 % of the time, its peers' 0.1 %"),
    (
        because(Signal.GPU_HW_SLOWDOWN, 0.7, 0.0, since_s=12.0),
        "its GPU 3 is slowed by its hardware 70 % of the time, its peers' 0 % (for 12 s)",
    ),
    (
        because(Signal.GPU_POWER_BRAKE, 0.7, 0.0, gpu=None, support=(CLOCK,)),
        "its GPU runs at 1,230 MHz, its peers' at 1,980 MHz (slowed by the power supply)",
    ),
    (
        because(Signal.GPU_POWER_LIMIT, 400.0, 700.0, support=(CLOCK,)),
        "its GPU 3 runs at 1,230 MHz, its peers' at 1,980 MHz (power limit 400 W, its peers' 700 W)",
    ),
    (
        because(Signal.GPU_POWER_CAP, 0.9, 0.1),
        "its GPU 3 is slowed by its power limit 90 % of the time, its peers' 10 %",
    ),
    (because(Signal.GPU_CLOCK, 1.23e9, 1.98e9), "its GPU 3 runs at 1,230 MHz, its peers' at 1,980 MHz"),
    (
        because(Signal.GPU_MEMORY_CLOCK, 1.6e9, 2.619e9),
        "the memory of its GPU 3 runs at 1,600 MHz, its peers' at 2,619 MHz",
    ),
    (because(Signal.GPU_OTHERS, 0.98, 0.0), "another process uses its GPU 3, its peers' have 0"),
    (
        because(Signal.GPU_OTHERS, 0.98, 0.0, has_instance=True),
        "another process uses its MIG instance of GPU 3, its peers' have 0",
    ),
    (because(Signal.GPU_OTHERS, 2.0, 0.0), "2 others use its GPU 3, its peers' have 0"),
    (because(Signal.PCIE_WIDTH, 4.0, 16.0), "the PCIe link of its GPU 3 has 4 lanes, its peers' 16"),
    (because(Signal.PCIE_GENERATION, 3.0, 5.0), "the PCIe link of its GPU 3 runs at generation 3, its peers' at 5"),
    (because(Signal.PCIE_REPLAYS, 40.0, 0.2), "the PCIe link of its GPU 3 repeats 40 packets/s, its peers' 0.2"),
    (because(Signal.NVLINKS, 12.0, 18.0), "its GPU 3 has 12 NVLinks, its peers' 18"),
    (because(Signal.NVLINK_ERRORS, 4.0, 0.0), "its GPU 3 has 4.0 NVLink errors/s, its peers' 0"),
    (because(Signal.GPU_ROW_REMAP, 1.0, 0.0), "a faulty memory row of its GPU 3 is not replaced yet, or cannot be"),
    (because(Signal.GPU_ECC_CORRECTED, 30.0, 0.0), "the memory of its GPU 3 has 30 corrected errors/s, its peers' 0"),
    (
        because(Signal.CPU_THROTTLED, 0.4, 0.0),
        "the CPU quota of its cgroup holds it 40 % of the time, its peers 0 %",
    ),
    (
        because(
            Signal.CPU_WAIT, 0.45, 0.02, since_s=9.0, support=(Compared(Signal.CPU_OTHERS, 0.13, None, is_worse=True),)
        ),
        "it waits 45 % of the time for a CPU, its peers 2 % (for 9.0 s, processes of no job use 13 % of the CPUs)",
    ),
    (because(Signal.CPUS_ALLOWED, 2.0, 32.0), "it may use 2 CPUs, its peers 32"),
    (because(Signal.FAR_FROM_GPU, 1.0, 0.0), "it runs on CPUs of another NUMA node than its GPU 3, its peers not"),
    (
        because(Signal.BLOCKED, 0.4, 0.01),
        "it waits 40 % of the time for a disk or file system, its peers 1.0 %",
    ),
    (because(Signal.MAJOR_FAULTS, 900.0, 3.0), "it fetches 900 pages/s from a disk, its peers 3.0"),
    (
        because(Signal.GC_PAUSE, 0.22, 0.02),
        "Python's garbage collection takes 22 % of its time, of its peers' 2 %",
    ),
    (because(Signal.GIL_WAIT, 0.7, 0.1), "Python's interpreter lock is held 70 % of its time, of its peers' 10 %"),
    (because(Signal.LOG_LINES, 1200.0, 1.0), "it prints 1,200 lines/s, its peers 1.0"),
    (because(Signal.CPU_OTHERS, 0.62, 0.03), "processes of no job use 62 % of the CPUs of gpu2, other hosts 3 %"),
    (because(Signal.CPU_STEAL, 0.3, 0.0), "the hypervisor takes 30 % of the CPUs of gpu2, other hosts 0 %"),
    (because(Signal.CPU_CLOCK, 1.2e9, 3.1e9), "the CPUs of gpu2 run at 1,200 MHz, other hosts at 3,100 MHz"),
    (
        because(Signal.MEMORY_PRESSURE, 0.3, 0.0),
        "tasks of gpu2 wait 30 % of the time for memory, other hosts 0 %",
    ),
    (because(Signal.SWAPPED, 40 * 2**20, 0.0), "gpu2 swaps 40 MiB/s, other hosts 0 B/s"),
    (because(Signal.IO_PRESSURE, 0.3, 0.0), "tasks of gpu2 wait 30 % of the time for a disk, other hosts 0 %"),
    (
        because(Signal.NIC_SPEED, 1e9, 1e11),
        "the network of gpu2 (eth0) runs at 1 Gbit/s, other hosts at 100 Gbit/s",
    ),
    (because(Signal.NIC_SPEED, 1e8, 1e11, nic=""), "the network of gpu2 runs at 100 Mbit/s, other hosts at 100 Gbit/s"),
    (because(Signal.NIC_ERRORS, 80.0, 0.0), "gpu2 (eth0) has 80 network errors/s, other hosts 0"),
    (because(Signal.NIC_DROPS, 900.0, 0.0), "gpu2 (eth0) drops 900 packets/s, other hosts 0"),
    (
        because(Signal.TCP_RETRANSMITS, 0.08, 0.001),
        "gpu2 (eth0) sends 8 % of its TCP segments again, other hosts 0.1 %",
    ),
]


@pytest.mark.parametrize(("cause", "text"), CLAUSES, ids=lambda one: one if isinstance(one, str) else one.signal)
def test_a_cause_reads_as_before(cause: Because, text: str) -> None:
    assert clause(cause, verdict(cause)) == text
    assert "{" not in hint(verdict(cause), None)


def test_every_signal_that_may_be_named_is_pinned() -> None:
    support = {Signal.GPU_TEMPERATURE, Signal.CPU_PRESSURE}
    assert {cause.signal for cause, _ in CLAUSES} == set(Signal) - support == set(HINTS)
    assert set(WORDINGS) == set(Signal)
    assert max(len(wording.label) for wording in WORDINGS.values()) <= MAX_LABEL
    assert set(BRIEF) <= set(Signal)


def test_a_cause_stands_before_what_it_explains() -> None:
    assert sentence(verdict(HOT)) == (
        f"{SLOW}: likely because its GPU 3 runs at 1,230 MHz, its peers' at 1,980 MHz (slowed by heat for 4 min, "
        "88 C); it waits 2 % of the time"
    )
    assert hint(verdict(HOT), None) == "check its cooling, or leave it out: rankdeck restart gpt --exclude gpu2"
    alone = verdict(HOT, comparison=Comparison(36, 3, 1))
    assert hint(alone, None) == "check its cooling", "a job of one host has no other"


def test_two_causes_are_both_there_with_how_sure_they_are() -> None:
    shared = because(Signal.GPU_OTHERS, 2.0, 0.0, confidence=Confidence.POSSIBLE)
    lanes = because(Signal.PCIE_WIDTH, 4.0, 16.0, confidence=Confidence.POSSIBLE)
    text = sentence(verdict(HOT, shared, lanes))

    assert "; possibly because 2 others use its GPU 3, its peers' have 0; the PCIe link of its GPU 3 has" in text
    assert len(text) < MAX_TEXT


def test_several_slow_ranks_name_whose_signals_are_shown() -> None:
    shown = sentence(verdict(because(Signal.GPU_CLOCK, 1.2e9, 2e9, ranks=(3, 5)), culprits=(3, 5)))
    assert "likely because rank 3's GPU 3 runs at 1,200 MHz, the others' at 2,000 MHz" in shown


def test_nothing_differs_is_an_answer() -> None:
    waiting = "; it waits 2 % of the time"
    none = "no cause found: none of 36 signals differs enough from its peers'"
    assert sentence(verdict()) == f"{SLOW}; {none}{waiting}"
    waits = Compared(Signal.CPU_WAIT, 0.5, 0.0, is_worse=True)
    one, three = Comparison(20, 3, 2, (waits,)), Comparison(20, 3, 2, (waits, HEAT, CLOCK))
    assert sentence(verdict(comparison=one)).endswith(
        f"; no cause found; 1 of 20 signals differs: waits for a CPU 50 % (peers 0 %){waiting}"
    )
    assert sentence(verdict(comparison=three)).endswith(
        "; 3 of 20 signals differ: waits for a CPU 50 % (peers 0 %), GPU temperature 88 C (peers 60 C), and 1 more"
        + waiting
    )
    assert "signals" not in sentence(verdict(HOT, comparison=one))
    nothing = verdict(comparison=Comparison(0, 3, 0))
    assert sentence(nothing).endswith(f"; why is not known: its agent takes no signals{waiting}")
    assert sentence(verdict(comparison=None)) == f"{SLOW}{waiting}"
    stalled = verdict(HOT, cost_frac=None, waited_s=12.0, op="all_reduce", seq=57)
    assert "for 12 s; likely because its GPU 3 runs" in sentence(stalled)


@pytest.mark.parametrize(
    ("cost_frac", "cores", "text"),
    [
        (0.8, (0.56, 0.02), "it uses 56 % of a CPU, its peers 2 %; "),
        (0.8, (0.012, 0.02), "it sleeps or waits: it uses 1 % of a CPU; "),
        (0.1, (0.05, 0.3), ""),
        (0.8, (0.3, 0.02), ""),
        (0.3, (0.9, 0.6), ""),
        (0.8, None, ""),
    ],
)
def test_the_cpu_of_a_slow_rank_is_shown_where_it_accounts_for_what_the_rank_costs(
    cost_frac: float, cores: tuple[float, float] | None, text: str
) -> None:
    compared = Comparison(18, 3, 2, cores=cores)
    shown = sentence(verdict(cost_frac=cost_frac, comparison=compared))
    assert f"of the step time; {text}no {'other ' * bool(text)}cause found: none of 18 signals" in shown


def test_an_event_names_what_has_begun_and_where() -> None:
    assert event_text(HOT) == "GPU 3 of gpu2: slowed by heat; rank 3 is slow"
    assert event_text(because(Signal.CPU_WAIT, 0.4, 0.0)) == "rank 3 on gpu2: waits for a CPU; rank 3 is slow"
    load = because(Signal.CPU_OTHERS, 0.4, 0.0, ranks=(2, 3))
    assert event_text(load) == "gpu2: processes of no job use its CPUs; ranks 2-3 are slow"


def test_a_row_has_value_peers_and_evidence() -> None:
    (row,) = because_rows(verdict(HOT))
    assert (row.signal, row.unit, row.value, row.peers, row.since_s) == ("gpu_thermal", "fraction", 0.7, 0.0, 240.0)
    assert (row.confidence, row.ranks, row.gpu) == ("likely", [3], 3)
    assert [(one.signal, one.unit, one.value, one.peers) for one in row.support] == [
        ("gpu_clock", "hz", 1.23e9, 1.98e9),
        ("gpu_temperature", "celsius", 88.0, 60.0),
    ]
