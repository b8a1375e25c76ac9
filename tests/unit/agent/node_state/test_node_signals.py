from __future__ import annotations

import msgspec
import pytest

from agent.node_state.node_signals import WARM_UP_S, NodeSignals
from agent.node_state.observations import HostSignals, RankSignals
from agent.node_state.signals import STALE_S
from agent.wire.machine import GpuFigures, GpuReport, JobRank
from agent.wire.signals import RATES_OF_HOST, RATES_OF_RANK, Reading, Signal, rates_in
from ddpcore.wire import WIRE_VERSION, Phase, RankReport

NUM_CPUS = 8
RANK = JobRank("train", 1)
REPORT = RankReport(WIRE_VERSION, 1, 1, 2, 101, "train", 0, 1, Phase.FORWARD, gc_pause_s=0.0, gil_held_s=0.0)


@pytest.fixture
def signals() -> NodeSignals:
    return NodeSignals(NUM_CPUS)


def rank_value(signals: NodeSignals, signal: Signal, now_s: float) -> float | None:
    reading = signals.of_rank(RANK, now_s).get(signal)
    return None if reading is None else reading.value


def test_what_ranks_and_the_agent_do_not_use_is_that_of_others(signals: NodeSignals) -> None:
    assert signals.of_host(0.0) is None
    # Each second of 8 CPUs: 4 busy, of which the rank's tree has 2.5 and the agent 0.5.
    for second in range(30):
        signals.take_rank(RANK, RankSignals({}, 1000.0 + 2.5 * second), second)
        signals.take_host(HostSignals({}, 4.0 * second, 8.0 * second, 0.5 * second, "eth0"), second)
    host = signals.of_host(30.0)

    assert host is not None
    assert host[Signal.CPU_OTHERS].value == pytest.approx(1 / 8, abs=1e-3)
    assert signals.nic == "eth0"


def test_the_speed_of_another_interface_is_no_past_of_the_one_that_carries_most(signals: NodeSignals) -> None:
    for second in range(60):
        nic, speed = ("eth0", 1e11) if second < 30 else ("eth1", 2.5e10)
        signals.take_host(HostSignals({Signal.NIC_SPEED: speed}, 0.0, 1.0, 0.0, nic), second)
    host = signals.of_host(60.0)

    assert host == {Signal.NIC_SPEED: Reading(2.5e10)}


def test_a_host_on_which_only_ranks_run_reports_no_others(signals: NodeSignals) -> None:
    for second in range(30):
        for rank in (0, 1):
            signals.take_rank(JobRank("train", rank), RankSignals({}, 2.0 * second), second)
        signals.take_host(HostSignals({Signal.CPU_STEAL: 0.0}, 4.0 * second, 8.0 * second, 0.0), second)

    assert signals.of_host(30.0) == {}


def test_a_rank_bound_to_few_cpus_is_reported_and_one_with_all_is_not(signals: NodeSignals) -> None:
    for second in range(30):
        signals.take_rank(RANK, RankSignals({Signal.CPUS_ALLOWED: NUM_CPUS}, 0.0), second)
    assert signals.of_rank(RANK, 30.0) == {}

    for second in range(30, 60):
        signals.take_rank(RANK, RankSignals({Signal.CPUS_ALLOWED: 2.0}, 0.0), second)
    (reading,) = signals.of_rank(RANK, 60.0).values()
    assert reading.value == pytest.approx(2.0, abs=0.1)
    assert reading.before == NUM_CPUS
    assert reading.since_s == pytest.approx(30.0, abs=2.0)


def test_collections_of_garbage_are_a_part_of_the_time(signals: NodeSignals) -> None:
    for number in range(100):
        report = msgspec.structs.replace(REPORT, gc_pause_s=0.1 * number * 0.25)
        signals.take_report(report, number * 0.25)
    assert rank_value(signals, Signal.GC_PAUSE, 25.0) == pytest.approx(0.1)

    # Another process of the rank counts from 0.
    for number in range(100, 200):
        signals.take_report(msgspec.structs.replace(REPORT, pid=102), number * 0.25)
    assert rank_value(signals, Signal.GC_PAUSE, 50.0) is None


def waits(signals: NodeSignals, wait_part: float, values: dict[Signal, float], steal: float = 0.0) -> float | None:
    signals.take_host(HostSignals({Signal.CPU_STEAL: steal}, 0.0, 1.0, 0.0), 0.0)
    for second in range(30):
        signals.take_rank(RANK, RankSignals(values, 0.0), second)
        signals.take_report(msgspec.structs.replace(REPORT, gil_held_s=wait_part * second), second)
    return rank_value(signals, Signal.GIL_WAIT, 30.0)


def test_a_wait_for_the_lock_counts_without_what_the_process_had_no_cpu_for(signals: NodeSignals) -> None:
    assert waits(signals, 0.6, {}) == pytest.approx(0.6)
    assert waits(NodeSignals(8), 0.6, {Signal.CPU_WAIT: 0.2, Signal.CPU_THROTTLED: 0.1}, 0.1) == pytest.approx(0.2)
    assert waits(NodeSignals(8), 0.6, {Signal.CPU_THROTTLED: 0.7}) is None


def test_a_rank_that_was_frozen_has_not_waited_for_the_lock(signals: NodeSignals) -> None:
    for second in range(60):
        if 20 <= second < 40:
            signals.interrupt(RANK)
        else:
            signals.take_report(msgspec.structs.replace(REPORT, gil_held_s=20.0 * (second >= 40)), second)

    assert rank_value(signals, Signal.GIL_WAIT, 60.0) is None


def test_a_probe_that_cannot_tell_waits_apart_reports_none(signals: NodeSignals) -> None:
    for second in range(30):
        signals.take_report(msgspec.structs.replace(REPORT, gil_held_s=None, gc_pause_s=0.5 * second), second)

    assert set(signals.of_rank(RANK, 30.0)) == {Signal.GC_PAUSE}


def test_printed_lines_are_a_rate(signals: NodeSignals) -> None:
    for tick in range(150):
        signals.note_lines(RANK, 10)
        if tick % 5 == 0:
            signals.take_rank(RANK, RankSignals({}, 0.0), tick / 5)
    assert rank_value(signals, Signal.LOG_LINES, 30.0) == pytest.approx(50.0, abs=0.1)

    for second in range(30, 60):
        signals.take_rank(RANK, RankSignals({}, 0.0), second)
    assert rank_value(signals, Signal.LOG_LINES, 60.0) is None


@pytest.mark.parametrize(("cpu_nodes", "gpu_node", "is_far"), [({0}, 1, True), ({0, 1}, 1, False), (None, 1, False)])
def test_a_rank_far_from_its_gpu(cpu_nodes: set[int] | None, gpu_node: int, *, is_far: bool) -> None:
    signals = NodeSignals(NUM_CPUS)
    gpu = GpuReport(GpuFigures(0, "GPU-0", numa_node=gpu_node), [RANK])
    for second in range(10):
        nodes = None if cpu_nodes is None else frozenset(cpu_nodes)
        signals.take_rank(RANK, RankSignals({}, 0.0, nodes), second)
        signals.take_gpus([gpu], second)

    assert rank_value(signals, Signal.FAR_FROM_GPU, 10.0) == (1.0 if is_far else None)


def test_the_ranks_of_a_job_are_forgotten(signals: NodeSignals) -> None:
    for second in range(10):
        for rank in (0, 1):
            signals.take_rank(JobRank("train", rank), RankSignals({Signal.CPU_WAIT: 0.5}, 0.0), second)
    signals.forget("train", [0])
    assert signals.of_rank(JobRank("train", 0), 10.0) == {}
    assert signals.of_rank(RANK, 10.0) != {}
    signals.forget("other")
    assert signals.of_rank(RANK, 10.0) != {}
    signals.forget("train")
    assert signals.of_rank(RANK, 10.0) == {}


def test_what_a_program_does_before_its_first_steps_is_no_base_of_its_training(signals: NodeSignals) -> None:
    for second in range(60):
        is_starting, is_held_up = second < 20, second > 45
        is_warming_up = second < 20 + WARM_UP_S
        counted = {Signal.CPU_WAIT: 0.9 if is_warming_up or is_held_up else 0.0}
        signals.take_rank(RANK, RankSignals(counted, 0.0), second)
        phase = Phase.STARTING if is_starting else Phase.FORWARD
        signals.take_report(msgspec.structs.replace(REPORT, phase=phase, gc_pause_s=min(second, 20)), second)
        if second == 29:
            assert signals.of_rank(RANK, second) == {}

    (reading,) = signals.of_rank(RANK, 59.0).values()
    assert reading.before == pytest.approx(0.0, abs=0.01)
    assert reading.since_s == pytest.approx(14.0, abs=1.1)


def test_what_no_kernel_and_no_probe_has_shown_of_late_is_unmeasured(signals: NodeSignals) -> None:
    assert signals.unmeasured_of_host(0.0) == 0, "nothing is sent of it"
    for second in range(10):
        signals.take_rank(RANK, RankSignals({Signal.BLOCKED: 0.0}, 0.0), second, is_followed=False)
        signals.take_report(REPORT, second)
        signals.take_host(HostSignals({Signal.SWAPPED: 0.0}, 0.0, 8.0 * second, 0.0), second)
    of_host, of_rank = {Signal.SWAPPED, Signal.CPU_OTHERS}, {Signal.BLOCKED, Signal.GC_PAUSE, Signal.GIL_WAIT}
    assert (signals.of_host(9.0), signals.of_rank(RANK, 9.0)) == ({}, {}), "they are 0"

    assert rates_in(signals.unmeasured_of_host(9.0), RATES_OF_HOST) == {*RATES_OF_HOST} - of_host
    assert rates_in(signals.unmeasured_of_rank(RANK, 9.0), RATES_OF_RANK) == {*RATES_OF_RANK} - of_rank
    assert rates_in(signals.unmeasured_of_rank(RANK, 10.0 + STALE_S), RATES_OF_RANK) == {*RATES_OF_RANK}


def test_a_rank_whose_output_is_not_followed_reports_no_lines(signals: NodeSignals) -> None:
    for second in range(30):
        signals.take_rank(RANK, RankSignals({}, 0.0), second, is_followed=False)

    assert Signal.LOG_LINES not in signals.tracks._tracks.get(RANK, {})


def test_signals_of_gpus_are_forgotten_with_their_rank(signals: NodeSignals) -> None:
    gpus = [GpuReport(GpuFigures(0, "GPU-0", temperature_celsius=61.0), [RANK])]

    def of_gpu() -> list[str]:
        signals.take_gpus(gpus, 1.0)
        return list(signals.of_rank(RANK, 1.0))

    assert of_gpu() == [Signal.GPU_TEMPERATURE]
    signals.forget(RANK.job_id)
    assert signals.of_rank(RANK, 1.0) == {}
    assert of_gpu() == [Signal.GPU_TEMPERATURE], "a new attempt has them too"
