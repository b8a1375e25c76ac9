"""What the sampler asks a GPU for seldom is dated late, but never so late that it is no cause any more."""

from __future__ import annotations

import pytest

from agent.machine.nvml import SELDOM_S, KeptAnswers
from agent.node_state.gpu_signals import GpuSignals
from agent.node_state.signals import SignalTracks
from agent.wire.machine import GpuFigures, GpuHolder, GpuReport, JobRank, NvLinks, PcieLink
from agent.wire.signals import Signal
from app.diagnosis.because.signals import TRAITS

ONSET_S, END_S = 100, 150
WHOSE = JobRank("gpt", 0)
LEVELS = (Signal.GPU_POWER_LIMIT, Signal.NVLINKS, Signal.GPU_ROW_REMAP)
COUNTERS = (Signal.PCIE_REPLAYS, Signal.NVLINK_ERRORS, Signal.GPU_ECC_CORRECTED)


class Gpu:
    """A GPU that is well until `ONSET_S`."""

    now_s = 0

    def figures(self, _handle: object) -> GpuFigures:
        is_well, bad_s = self.now_s < ONSET_S, max(0, self.now_s - ONSET_S)
        return GpuFigures(
            0,
            busy_frac=0.97,
            power_limit_watts=700.0 if is_well else 400.0,
            is_row_remap_pending=not is_well,
            nvlinks=NvLinks(18, 18 if is_well else 16, 50 * bad_s),
            pcie=PcieLink(replays=90 * bad_s),
            ecc_corrected_errors=20 * bad_s,
        )


def late_s(start_s: int, shift_s: int) -> dict[Signal, float]:
    """Return by how many seconds each change is dated late, of an agent and a sampler that began at some time."""
    gpu, kept, signals, tracks = Gpu(), KeptAnswers(shift_s), GpuSignals(), SignalTracks()
    found: dict[Signal, float] = {}
    for gpu.now_s in range(start_s, END_S):
        now_s = float(gpu.now_s)
        figures = kept.last(SELDOM_S, now_s, gpu.figures, None)
        for whose, signal, value in signals.values([GpuReport(figures, [WHOSE], [GpuHolder(100, whose=WHOSE)])], now_s):
            tracks.take(whose, signal, value, now_s)
        for name, reading in tracks.readings(WHOSE, now_s).items():
            if reading.since_s is not None:
                found.setdefault(Signal(name), now_s - reading.since_s - ONSET_S)
    return found


@pytest.mark.parametrize("start_s", range(0, 10, 3))
def test_a_change_is_dated_in_time_to_be_a_cause(start_s: int) -> None:
    runs = [late_s(start_s, shift_s) for shift_s in range(10)]

    for signal in (*LEVELS, *COUNTERS):
        lateness = [run[signal] for run in runs]
        assert max(lateness) <= TRAITS[signal].lag_s, (signal, lateness)
    assert max(run[signal] for run in runs for signal in LEVELS) > 5.0
