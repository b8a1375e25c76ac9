"""Which signals explain why a rank is slow, and which only differ: a test for each trap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agent.wire.digest import NodeFrame
from agent.wire.machine import GpuFigures, GpuReport, GpusReport, JobRank, MigInstance
from agent.wire.reports import WIRE_VERSION, decode_node_report, encode_node_report
from agent.wire.signals import LEVELS, RATES, RATES_OF_HOST, RATES_OF_RANK, Reading, Signal
from app.diagnosis.because.candidates import Candidate, Slowness, candidates_of
from app.diagnosis.because.comparison import MAX_PEERS, Peers, RankSignals, sampled_ranks, signals_of, standing_out
from app.diagnosis.because.findings import Confidence
from app.diagnosis.because.signals import TRAITS, Scope
from app.model.cluster import Cluster
from app.model.job_model import JobModel
from app.view.because_text import amount_text
from ddpcore.wire import Phase
from tests.support.node_reports import job_status, node_report, worker_report

FRAME = NodeFrame(wire_version=WIRE_VERSION, node="n", epoch="e", report_seq=1, hostname="h", agent_pid=1, num_cpus=32)
NOW_S = 1000.0
NAMED_S = 990.0
USUAL = {
    Signal.GPU_CLOCK: 1.9e9,
    Signal.GPU_TEMPERATURE: 60.0,
    Signal.GPU_POWER_LIMIT: 700.0,
    Signal.PCIE_WIDTH: 16.0,
    Signal.CPU_WAIT: 0.02,
    Signal.GIL_WAIT: 0.1,
}
USUAL_OF_HOST = {Signal.CPU_OTHERS: 0.02, Signal.NIC_SPEED: 1e11, Signal.CPU_CLOCK: 3e9}
HOT = {Signal.GPU_THERMAL: 0.7, Signal.GPU_CLOCK: 1.3e9, Signal.GPU_TEMPERATURE: 88.0}


def rank(
    number: int, changes: dict[Signal, float] | None = None, *, since_s: float | None = 20.0, **fields: Any
) -> RankSignals:
    """Return a rank, four on each host, of which some signals changed `since_s` ago; None: they always were so."""
    of_rank = {signal: Reading(value) for signal, value in USUAL.items()}
    of_host = {signal: Reading(value) for signal, value in USUAL_OF_HOST.items()}
    for signal, value in (changes or {}).items():
        readings, usual = (of_host, USUAL_OF_HOST) if TRAITS[signal].scope is Scope.HOST else (of_rank, USUAL)
        before = usual.get(signal, 32.0 if signal is Signal.CPUS_ALLOWED else 0.0)
        readings[signal] = Reading(value) if since_s is None else Reading(value, before, since_s)
    facts: dict[str, Any] = {
        "rank": number,
        "node": f"gpu{number // 4}",
        "host": f"gpu{number // 4}",
        "of_rank": of_rank,
        "of_host": of_host,
        "unmeasured": frozenset(),
        "has_gpu": True,
        "num_cpus": 32,
        "work_frac": 0.6,
        "at_s": NOW_S,
        "known_s": 0.0,
        "gpu": number % 4,
        "has_instance": False,
        "nic": "eth0",
        "frame": FRAME,
    }
    return RankSignals(**(facts | fields))


PEERS = [rank(number) for number in range(1, 8)]


def found(
    own: dict[Signal, float],
    peers: list[RankSignals] | None = None,
    *,
    since_s: float | None = 20.0,
    work_frac: float = 1.0,
    known: tuple[Signal, ...] = (),
    **slowness: Any,
) -> dict[Signal, Candidate]:
    """Return the causes that rank 0 shows, which became slow when it was named, and costs the others 30 %."""
    slow = rank(0, own, since_s=since_s, work_frac=work_frac)
    facts: dict[str, Any] = {
        "phase": None,
        "cost_frac": 0.3,
        "earliest_s": NAMED_S,
        "latest_s": NAMED_S,
        "is_whole_host": False,
    }
    return candidates_of(slow, Peers([slow], PEERS if peers is None else peers), Slowness(**(facts | slowness)), known)


def confidence(candidates: dict[Signal, Candidate], signal: Signal) -> Confidence:
    return candidates[signal].because.confidence


def test_heat_takes_clock_and_temperature_as_its_evidence() -> None:
    (candidate,) = found(HOT).values()

    because = candidate.because
    assert (because.signal, because.confidence) == (Signal.GPU_THERMAL, Confidence.LIKELY)
    assert (because.ranks, because.node, because.gpu, because.since_s) == ((0,), "gpu0", 0, 20.0)
    assert [one.signal for one in because.support] == [Signal.GPU_CLOCK, Signal.GPU_TEMPERATURE]
    assert [one.peers for one in because.support] == [1.9e9, 60.0]


def test_what_all_ranks_have_is_no_cause() -> None:
    assert found(HOT, [rank(number, HOT) for number in range(1, 8)]) == {}
    assert found(HOT, [rank(1, HOT), *PEERS[1:]]) == {}, "one that keeps up with the same signal is enough"


def test_a_temperature_alone_is_no_cause() -> None:
    assert found({Signal.GPU_TEMPERATURE: 92.0}) == {}


def test_a_better_signal_is_no_cause() -> None:
    better = {Signal.GPU_CLOCK: 2.6e9, Signal.CPU_WAIT: 0.0, Signal.PCIE_WIDTH: 32.0, Signal.GPU_POWER_LIMIT: 900.0}
    assert found(better) == {}


def test_throttling_without_a_lower_clock_is_no_cause() -> None:
    assert found({Signal.GPU_THERMAL: 0.7}) == {}


def test_who_works_more_is_at_its_power_limit_more_and_a_little_slower() -> None:
    peers = [
        rank(number, {Signal.GPU_POWER_CAP: 0.3, Signal.GPU_CLOCK: 1.9e9}, work_frac=0.5) for number in range(1, 8)
    ]
    assert found({Signal.GPU_POWER_CAP: 0.6, Signal.GPU_CLOCK: 1.55e9}, peers) == {}
    assert set(found({Signal.GPU_CLOCK: 1.55e9}, peers)) == {Signal.GPU_CLOCK}, "not at its limit: it is set so"
    limited = {Signal.GPU_POWER_CAP: 0.9, Signal.GPU_CLOCK: 1.4e9, Signal.GPU_POWER_LIMIT: 400.0}
    assert set(found(limited, peers)) == {Signal.GPU_POWER_LIMIT}


def test_who_works_more_waits_more_for_a_cpu() -> None:
    peers = [rank(number, {Signal.CPU_WAIT: 0.1}, work_frac=0.4) for number in range(1, 8)]

    assert found({Signal.CPU_WAIT: 0.25}, peers) == {}
    assert set(found({Signal.CPU_WAIT: 0.5}, peers)) == {Signal.CPU_WAIT}


def test_who_works_little_does_not_stand_out_by_what_all_have() -> None:
    idle = rank(0, {Signal.CPU_WAIT: 0.2}, work_frac=0.2)
    peers = Peers([idle], [rank(number, {Signal.CPU_WAIT: 0.2}, work_frac=0.9) for number in range(1, 8)])

    compared = peers.compare(idle, Signal.CPU_WAIT)

    assert compared is not None
    assert (compared.value, compared.peers, compared.is_worse) == (0.2, 0.2, False)


def test_support_stands_out_beside_what_it_supports_alone() -> None:
    def marked(own: dict[Signal, float]) -> set[Signal]:
        slow = rank(0, own)
        return set(standing_out(Peers([slow], PEERS).all_of(slow)))

    assert marked({Signal.GPU_TEMPERATURE: 88.0}) == set(), "who works more is warmer"
    assert marked({Signal.GPU_TEMPERATURE: 88.0, Signal.GC_PAUSE: 0.5}) == {Signal.GC_PAUSE}
    assert marked(HOT) == set(HOT)


@pytest.mark.parametrize("work_frac", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("signal", [one for one in Signal if one is not Signal.GPU_ROW_REMAP])
def test_what_stands_out_has_another_figure_than_the_peers(signal: Signal, work_frac: float) -> None:
    usual = {**USUAL, **USUAL_OF_HOST}.get(signal, 0.0)
    num_marked = 0
    for step in range(40):
        value = usual + TRAITS[signal].least * step / 8 if not TRAITS[signal].is_less_worse else usual * (1 - step / 40)
        slow = rank(0, {signal: value}, work_frac=work_frac)
        one = Peers([slow], PEERS).compare(slow, signal)
        if one is not None and one.is_worse:
            num_marked += 1
            assert amount_text(signal, one.value) != amount_text(signal, one.peers)
    assert num_marked or TRAITS[signal].is_less_worse


def test_a_part_of_time_must_account_for_the_cost() -> None:
    assert found({Signal.GC_PAUSE: 0.15}, cost_frac=0.6) == {}
    assert confidence(found({Signal.GC_PAUSE: 0.22}, cost_frac=0.6), Signal.GC_PAUSE) is Confidence.POSSIBLE
    assert confidence(found({Signal.GC_PAUSE: 0.5}, cost_frac=0.6), Signal.GC_PAUSE) is Confidence.LIKELY


@pytest.mark.parametrize(
    ("wait", "cores", "peer_cores", "is_named"),
    [
        (0.45, 0.4, 0.38, True),
        (0.22, 0.7, 0.38, False),
        (0.55, 0.4, 0.2, False),
        (0.85, 0.12, 0.01, False),
        (0.55, 3.0, 3.2, True),
        (0.55, 0.0, 0.0, True),
    ],
    ids=["its CPU is taken", "crowded a little", "crowded", "very crowded", "threads", "not known"],
)
def test_waits_for_a_cpu_are_a_cause_where_the_rank_runs_no_longer_than_its_peers(
    wait: float, cores: float, peer_cores: float, is_named: bool
) -> None:
    peers = [rank(number, cores=peer_cores) for number in range(1, 8)]
    slow = rank(0, {Signal.CPU_WAIT: wait}, work_frac=1.0, cores=cores)
    slowness = Slowness(None, 0.6, NAMED_S, NAMED_S, is_whole_host=False)

    assert set(candidates_of(slow, Peers([slow], peers), slowness)) == ({Signal.CPU_WAIT} if is_named else set())


@pytest.mark.parametrize(
    ("wait", "cores", "peer_cores", "stands_out"),
    [(0.12, 0.56, 0.02, False), (0.19, 0.82, 0.01, False), (0.3, 0.4, 0.38, True), (0.12, 0.0, 0.0, True)],
    ids=["more Python", "a loop without end", "its CPU is taken", "not known"],
)
def test_waits_for_a_cpu_stand_out_where_the_rank_runs_no_longer_than_its_peers_or_they_are_a_cause(
    wait: float, cores: float, peer_cores: float, stands_out: bool
) -> None:
    peers = [rank(number, {Signal.CPU_WAIT: 0.0}, cores=peer_cores) for number in range(1, 8)]
    slow = rank(0, {Signal.CPU_WAIT: wait, Signal.CPU_PRESSURE: 0.6}, work_frac=1.0, cores=cores)
    among = Peers([slow], peers)
    compared, run_part = among.all_of(slow), among.run_part(slow)

    marked = {Signal.CPU_WAIT, Signal.CPU_PRESSURE}
    assert set(standing_out(compared, run_part)) == (marked if stands_out else set())
    assert set(standing_out(compared, run_part, [Signal.CPU_OTHERS])) == marked


def test_a_clock_must_account_for_the_cost() -> None:
    assert found({Signal.GPU_CLOCK: 1.6e9}, cost_frac=0.6) == {}
    assert set(found({Signal.GPU_CLOCK: 1.2e9}, cost_frac=0.6)) == {Signal.GPU_CLOCK}


@pytest.mark.parametrize(
    ("phase", "own", "is_named"),
    [
        (Phase.DATA, HOT, False),
        (Phase.BACKWARD, HOT, True),
        (Phase.DATA, {Signal.BLOCKED: 0.4}, True),
        (Phase.FORWARD, {Signal.BLOCKED: 0.4}, False),
        (Phase.DATA, {Signal.CPU_WAIT: 0.4}, True),
        (Phase.FORWARD, {Signal.CPU_WAIT: 0.4}, True),
    ],
)
def test_a_signal_counts_in_the_phases_that_it_may_lengthen(
    phase: Phase, own: dict[Signal, float], is_named: bool
) -> None:
    assert bool(found(own, phase=phase)) == is_named


@pytest.mark.parametrize(
    ("since_s", "is_named"),
    [(20.0, True), (45.0, True), (100.0, False), (2.0, False), (None, False)],
)
def test_a_cause_begins_about_when_the_rank_becomes_slow(since_s: float | None, is_named: bool) -> None:
    assert bool(found(HOT, since_s=since_s)) == is_named


def test_a_rank_that_was_slow_from_the_start_may_have_had_its_cause_as_long() -> None:
    heat = found(HOT, since_s=None, earliest_s=-math.inf)
    narrow = found({Signal.PCIE_WIDTH: 4.0}, since_s=None, earliest_s=-math.inf)

    assert confidence(heat, Signal.GPU_THERMAL) is Confidence.LIKELY, "it measures speed itself"
    assert confidence(narrow, Signal.PCIE_WIDTH) is Confidence.POSSIBLE
    assert found(HOT, since_s=1.0, earliest_s=-math.inf) == {}, "it began after the rank was slow"


def test_a_known_cause_stays_where_it_changes_again() -> None:
    assert set(found(HOT, since_s=1.0, known=(Signal.GPU_THERMAL,))) == {Signal.GPU_THERMAL}


def test_a_signal_that_was_like_the_others_while_the_rank_was_slow_began_later() -> None:
    slow = rank(0, HOT, since_s=None)
    slowness = Slowness(None, 0.3, -math.inf, NAMED_S, is_whole_host=False)
    peers = Peers([slow], PEERS)

    assert set(candidates_of(slow, peers, slowness)) == {Signal.GPU_THERMAL}
    assert candidates_of(slow, peers, slowness, well_s={Signal.GPU_THERMAL: 998.0, Signal.GPU_CLOCK: 998.0}) == {}


def test_load_of_others_on_a_host_needs_a_rank_that_waits_for_a_cpu() -> None:
    load = {Signal.CPU_OTHERS: 0.7}
    assert found(load) == {}, "its host-mates keep up"
    assert set(found(load | {Signal.CPU_PRESSURE: 0.6}, is_whole_host=True)) == {Signal.CPU_OTHERS}

    (candidate,) = found(load | {Signal.CPU_WAIT: 0.4}).values()
    assert candidate.because.signal is Signal.CPU_OTHERS
    assert Signal.CPU_WAIT in {one.signal for one in candidate.because.support}
    assert confidence({Signal.CPU_OTHERS: candidate}, Signal.CPU_OTHERS) is Confidence.LIKELY


def test_load_of_others_slows_a_whole_host_where_anything_waits_for_a_cpu() -> None:
    def named(own: dict[Signal, float], peers: list[RankSignals] = PEERS, **slowness: Any) -> Confidence | None:
        candidates = found(own, peers, is_whole_host=True, **slowness)
        assert set(candidates) <= {Signal.CPU_OTHERS}
        return confidence(candidates, Signal.CPU_OTHERS) if candidates else None

    load, waits = {Signal.CPU_OTHERS: 0.13}, {Signal.CPU_PRESSURE: 0.4}
    without_pressure = [rank(number, unmeasured={Signal.CPU_PRESSURE}) for number in range(1, 8)]
    stall: dict[str, Any] = {"cost_frac": None, "earliest_s": NOW_S - 20.0, "latest_s": NOW_S - 20.0}

    assert [named(load), named(load, phase=Phase.FORWARD)] == [None, None], "most CPUs idle"
    assert named(load, phase=Phase.DATA) is Confidence.POSSIBLE
    assert named(load | waits) is Confidence.LIKELY
    assert named(load, without_pressure) is Confidence.POSSIBLE
    assert named(load, without_pressure, phase=Phase.DATA) is Confidence.LIKELY
    for peers in (PEERS, without_pressure):
        assert named(load | waits, peers, phase=Phase.DATA, **stall) is None
    assert named({Signal.CPU_OTHERS: 0.9} | waits, phase=Phase.DATA, **stall) is Confidence.LIKELY
    assert set(found({Signal.CPU_STEAL: 0.3}, is_whole_host=True)) == {Signal.CPU_STEAL}


@pytest.mark.parametrize("signal", [Signal.CPU_WAIT, Signal.CPU_THROTTLED])
@pytest.mark.parametrize(
    ("part", "waited_s", "is_named"), [(0.54, 20.0, False), (0.95, 20.0, True), (0.85, 20.0, True), (0.85, 90.0, False)]
)
def test_a_rank_that_runs_in_a_stall_does_not_stand_for_want_of_a_cpu(
    signal: Signal, part: float, waited_s: float, *, is_named: bool
) -> None:
    stall: dict[str, Any] = {"cost_frac": None, "earliest_s": NOW_S - waited_s, "latest_s": NOW_S - waited_s}
    assert bool(found({signal: part}, phase=Phase.FORWARD, **stall)) is is_named


def test_load_on_the_only_host_is_evidence_for_a_rank_that_waits_for_a_cpu() -> None:
    beside = [rank(number, {Signal.CPU_OTHERS: 0.5}) for number in range(1, 4)]
    assert found({Signal.CPU_OTHERS: 0.5}, beside, is_whole_host=True) == {}

    (candidate,) = found({Signal.CPU_OTHERS: 0.5, Signal.CPU_WAIT: 0.4}, beside).values()
    assert candidate.because.signal is Signal.CPU_WAIT
    (load,) = candidate.because.support
    assert (load.signal, load.value, load.peers) == (Signal.CPU_OTHERS, 0.5, None)


@pytest.mark.parametrize("signal", [Signal.CPU_PRESSURE, Signal.GPU_TEMPERATURE])
def test_support_is_never_named(signal: Signal) -> None:
    assert found({signal: 99.0}, is_whole_host=True) == {}


@pytest.mark.parametrize("signal", [Signal.NIC_ERRORS, Signal.TCP_RETRANSMITS, Signal.NIC_DROPS])
def test_the_network_explains_a_whole_host_alone(signal: Signal) -> None:
    assert found({signal: 900.0}) == {}
    assert set(found({signal: 900.0}, is_whole_host=True)) == {signal}


@pytest.mark.parametrize(("since_s", "is_named"), [(80.0, True), (110.0, False)])
def test_a_lossy_link_holds_up_some_steps_only_and_so_a_rank_is_named_late(since_s: float, is_named: bool) -> None:
    lossy = {Signal.TCP_RETRANSMITS: 0.028}
    assert bool(found(lossy, since_s=since_s, is_whole_host=True)) == is_named


def test_swapping_takes_faults_blocks_and_pressure_as_its_evidence() -> None:
    swaps = {Signal.SWAPPED: 4e7, Signal.MAJOR_FAULTS: 900.0, Signal.BLOCKED: 0.4, Signal.IO_PRESSURE: 0.5}
    (candidate,) = found(swaps).values()

    assert candidate.because.signal is Signal.SWAPPED
    assert {one.signal for one in candidate.because.support} == swaps.keys() - {Signal.SWAPPED}


def test_a_thread_without_a_cpu_holds_the_interpreter_lock() -> None:
    assert set(found({Signal.CPU_WAIT: 0.4, Signal.GIL_WAIT: 0.6})) == {Signal.CPU_WAIT}
    assert confidence(found({Signal.GIL_WAIT: 0.6}), Signal.GIL_WAIT) is Confidence.POSSIBLE


def test_few_cpus_need_waits_for_a_cpu_a_change_or_slow_loading() -> None:
    few = {Signal.CPUS_ALLOWED: 2.0}
    always: dict[str, Any] = {"since_s": None, "earliest_s": -math.inf}
    assert found(few, **always) == {}
    assert set(found(few, phase=Phase.DATA, **always)) == {Signal.CPUS_ALLOWED}
    assert set(found(few)) == {Signal.CPUS_ALLOWED}
    assert set(found(few | {Signal.CPU_WAIT: 0.5}, **always)) == {Signal.CPUS_ALLOWED}


def test_two_causes_are_both_named_the_better_one_first() -> None:
    both = found(HOT | {Signal.GPU_OTHERS: 2.0})
    assert sorted(both, key=lambda signal: both[signal].weight) == [Signal.GPU_THERMAL, Signal.GPU_OTHERS]


def test_with_few_peers_nothing_is_likely() -> None:
    assert confidence(found(HOT, PEERS[:1]), Signal.GPU_THERMAL) is Confidence.POSSIBLE


def test_noise_among_the_peers_hides_a_difference() -> None:
    peers = [rank(number, {Signal.GC_PAUSE: 0.04 * number}) for number in range(1, 8)]
    assert found({Signal.GC_PAUSE: 0.35}, peers) == {}


def test_a_rank_that_stands_is_not_explained_by_what_makes_it_slower() -> None:
    stall: dict[str, Any] = {"cost_frac": None, "earliest_s": NOW_S - 20.0, "latest_s": NOW_S - 20.0}
    assert found(HOT, **stall) == {}
    assert found({Signal.BLOCKED: 0.3}, phase=Phase.DATA, **stall) == {}
    assert set(found({Signal.BLOCKED: 0.95}, phase=Phase.DATA, **stall)) == {Signal.BLOCKED}


def test_every_signal_has_a_trait_and_is_a_rate_or_a_level() -> None:
    assert set(TRAITS) == set(Signal) == RATES | LEVELS
    assert {rate for rate in RATES if TRAITS[rate].scope is Scope.HOST} == set(RATES_OF_HOST)
    assert len(RATES) == len(RATES_OF_HOST) + len(RATES_OF_RANK) == len(Signal) - len(LEVELS)


def test_a_rate_that_nobody_measures_is_not_0() -> None:
    waits = {Signal.IO_PRESSURE: 0.25}
    assert set(found(waits, is_whole_host=True, phase=Phase.DATA)) == {Signal.IO_PRESSURE}
    peers = [rank(number, unmeasured={Signal.IO_PRESSURE}) for number in range(1, 8)]
    assert found(waits, peers, is_whole_host=True, phase=Phase.DATA) == {}

    slow = rank(0, unmeasured={Signal.CPU_WAIT, Signal.GC_PAUSE, Signal.GPU_OTHERS})
    missing = Peers([rank(0)], PEERS).all_of(rank(0)).keys() - Peers([slow], PEERS).all_of(slow).keys()
    assert missing == {Signal.GC_PAUSE, Signal.GPU_OTHERS}, "a value that is there is known"


def test_reports_tell_what_nobody_measures() -> None:
    cluster = Cluster(["demo-0"])
    places = [1 << RATES_OF_RANK.index(Signal.GPU_OTHERS), 1 << RATES_OF_HOST.index(Signal.IO_PRESSURE)]
    worker = worker_report(0, unmeasured=places[0] | 1 << 60)
    report = node_report(1, [job_status()], [worker], signals={}, unmeasured=places[1])
    cluster.apply("demo-0", decode_node_report(encode_node_report(report)), NOW_S)

    found = signals_of(cluster, cluster.jobs["job"], 0)

    assert found is not None
    assert set(found.unmeasured) == {Signal.GPU_OTHERS, Signal.IO_PRESSURE}, "and of a later version nothing"


def test_a_large_job_is_compared_by_the_same_few_ranks() -> None:
    job = JobModel("job", 0, 16_384, 2048)
    job.node_of[:] = np.arange(16_384) // 8
    is_eligible = np.ones(16_384, np.bool_)
    is_eligible[803] = False

    sample = sampled_ranks(job, is_eligible, [803])
    assert len(sample) == len(set(sample)) <= MAX_PEERS
    assert {800, 801, 802, 804, 805, 806, 807} <= set(sample)
    assert len({number // 8 for number in sample}) > 10
    assert max(sample) > 14_000
    assert sampled_ranks(job, is_eligible, [803]) == sample
    assert sampled_ranks(job, is_eligible & (np.arange(16_384) < 20), [3]) == list(range(20)), "of a small one all"


@pytest.mark.parametrize("num_instances", [0, 2])
def test_of_a_gpu_in_mig_mode_a_rank_has_an_instance(num_instances: int) -> None:
    instances = [MigInstance(f"MIG-{number}") for number in range(num_instances)]
    gpu = GpuReport(GpuFigures(3, "GPU-3", mig_instances=instances), owners=[JobRank("job", 0)])
    cluster = Cluster(["demo-0"])
    report = node_report(1, [job_status()], [worker_report(0)], signals={}, gpus=GpusReport(gpus=[gpu]))
    cluster.apply("demo-0", report, NOW_S)

    found = signals_of(cluster, cluster.jobs["job"], 0)

    assert found is not None
    assert (found.gpu, found.has_instance) == (3, bool(num_instances))
