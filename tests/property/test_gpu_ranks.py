"""Whatever NVML lists: every holder is told once, homes are single, and nobody is foreign alone or at home."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agent.node_state.gpu_ranks import RankProcess, gpu_reports
from agent.node_state.gpu_sample import SAMPLE_VERSION, GpuProcess, GpuSample, SampledGpu, decode_sample, encode_sample
from agent.node_state.gpu_signals import GpuSignals, computing_places
from agent.wire.machine import GpuFigures, GpuReport, JobRank
from agent.wire.signals import Signal

NUM_GPUS = 4
NUM_RANKS = 4

visible = st.sampled_from([None, "", "0", "3,2,1,0", "GPU-1", "GPU-", "7", "-1", "0,0", "nonsense", "MIG-x"])
processes = st.builds(
    GpuProcess,
    pid=st.integers(100, 105),
    used_bytes=st.none() | st.integers(0, 2**40),
    ancestors=st.lists(st.integers(98, 105), max_size=3),
    inner_pids=st.lists(st.integers(1, 3), max_size=2),
    job_id=st.sampled_from(["", "job", "other"]),
    rank=st.none() | st.integers(0, 5),
    visible_devices=visible,
)
machines = st.lists(st.lists(processes, max_size=4), min_size=1, max_size=NUM_GPUS)
workers = st.lists(
    st.builds(
        RankProcess,
        whose=st.integers(0, NUM_RANKS - 1).map(lambda rank: JobRank("job", rank)),
        local_rank=st.integers(0, NUM_RANKS - 1),
        pid=st.integers(100, 105),
        reported_pid=st.none() | st.integers(1, 3),
        torch_bytes=st.dictionaries(st.sampled_from(["GPU-0", "GPU-1", "GPU-9"]), st.integers(0, 2**40)),
    ),
    max_size=NUM_RANKS,
    unique_by=lambda worker: worker.whose,
)


@given(machines, workers, st.lists(st.sampled_from(["A", "B"]), min_size=NUM_GPUS, max_size=NUM_GPUS))
def test_each_rank_has_one_home_at_most_and_is_foreign_only_on_anothers(
    machine: list[list[GpuProcess]], ranks: list[RankProcess], names: list[str]
) -> None:
    gpus = [SampledGpu(GpuFigures(at, f"GPU-{at}", names[at]), found) for at, found in enumerate(machine)]

    reports = gpu_reports(gpus, ranks)

    known = {rank.whose for rank in ranks}
    homes = Counter(owner for report in reports for owner in report.owners)
    assert set(homes) <= known
    assert set(homes.values()) <= {1}
    for gpu, report in zip(gpus, reports, strict=True):
        assert sorted(holder.pid for holder in report.holders) == sorted(process.pid for process in gpu.processes)
        for holder in report.holders:
            assert holder.whose is None or holder.whose in known
            assert holder.whose is None or holder.whose in homes, "who holds memory is at home somewhere"
            if holder.is_foreign:
                assert holder.whose is not None
                assert report.owners
                assert holder.whose not in report.owners
    check_signals(reports)


def check_signals(reports: list[GpuReport]) -> None:
    """Assert that each rank computes on one GPU, and shares it with those who hold memory there."""
    places = computing_places(reports)
    assert places.keys() == {owner for report in reports for owner in report.owners}
    found = {(whose, signal): value for whose, signal, value in GpuSignals().values(reports, 0.0)}
    assert {whose for whose, _ in found} <= places.keys()
    for whose, place in places.items():
        pids = {holder.pid for holder in reports[place].holders}
        own = {holder.pid for holder in reports[place].holders if holder.whose == whose}
        num_others = found.get((whose, Signal.GPU_OTHERS))
        if own:
            assert num_others is not None
            assert len(pids - own) <= num_others <= len(pids)
        else:
            assert num_others is None
            assert all(holder.whose != whose for report in reports for holder in report.holders), "it is nowhere else"


@given(machines)
def test_a_sample_comes_back_from_its_datagram(machine: list[list[GpuProcess]]) -> None:
    sample = GpuSample(SAMPLE_VERSION, 1, gpus=[SampledGpu(GpuFigures(at), found) for at, found in enumerate(machine)])

    assert decode_sample(encode_sample(sample)) == sample
