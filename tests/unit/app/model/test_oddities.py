"""What limits what can be seen of ranks: said once, for the ranks it is true of."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.wire.digest import ANOMALIES, RECORDER_MISSING_BIT
from agent.wire.reports import epoch_of, is_step_counted, loss_of, step_of
from app.model.outside import LONG_QUIET_S, QUIET_FACTOR, UNPROBED_BIT, AnomalyRanks, Output, outside_text
from ddpcore.wire import Anomaly
from tests.support.node_reports import rank_report, worker_report


def bits_of(*anomalies: Anomaly) -> int:
    return sum(1 << ANOMALIES.index(anomaly) for anomaly in anomalies)


def test_each_oddity_is_said_once_with_its_ranks_and_taken_back() -> None:
    anomalies = AnomalyRanks()
    for rank in (0, 1, 3):
        anomalies.put(rank, bits_of(Anomaly.RECORDER_OFF, Anomaly.DEBUG_DETAIL))
    anomalies.put(2, RECORDER_MISSING_BIT)

    notes = list(anomalies.notes("").values())

    assert [note.partition(":")[0] for note in notes] == ["ranks 0-1, 3", "rank 2", "ranks 0-1, 3"]
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in notes[0]
    assert "no flight recorder" in notes[1]
    assert "switched off" in notes[2]
    assert len(anomalies.of_rank(0)) == 2
    for rank in range(4):
        anomalies.put(rank, 0)
    assert (anomalies.notes(""), anomalies.of_rank(0)) == ({}, [])


def test_ranks_without_a_probe_are_said_to_be_watched_from_outside_and_why() -> None:
    anomalies = AnomalyRanks()
    anomalies.put(0, UNPROBED_BIT)
    assert list(anomalies.notes("as asked").values()) == [
        "rank 0 has no probe (as asked): watched from outside, by process and output",
    ]
    anomalies.put(1, UNPROBED_BIT | bits_of(Anomaly.GROUPLESS))
    (note,) = anomalies.notes("").values()
    assert note.startswith("ranks 0-1 have no probe (torch not imported, or one that loads no probe)")
    assert anomalies.of_rank(0) == []


def test_what_a_rank_reports_or_counts_goes_before_what_it_prints() -> None:
    printed = {"loss": 1.5, "step": 120.0, "epoch": 3.0}
    silent, counted = rank_report(0), rank_report(0, step=7, is_step_counted=True)
    said = rank_report(0, step=9, loss=2.5, epoch=1)

    def told(worker_fields: dict[str, Any]) -> tuple[object, ...]:
        worker = worker_report(0, **worker_fields)
        return step_of(worker), loss_of(worker), epoch_of(worker), is_step_counted(worker)

    assert told({"metrics": printed}) == (120, 1.5, 3, False)
    assert told({"report": silent, "metrics": printed}) == (120, 1.5, 3, False)
    assert told({"report": counted, "metrics": printed}) == (7, 1.5, 3, True)
    assert told({"report": counted}) == (7, None, None, True)
    assert told({"report": said, "metrics": printed}) == (9, 2.5, 1, False)
    assert told({"metrics": {"step": float("nan"), "epoch": -1.0}}) == (None, None, None, False)
    assert told({"metrics": {"step": None}}) == (None, None, None, False)


def test_a_rank_watched_from_outside_is_told_by_its_output_and_its_cpu() -> None:
    assert outside_text(worker_report(0, seen_s=90.0, quiet_s=3.2, cpu_cores=0.94)) == (
        "watched from outside: printed 3.2 s ago, 0.9 cores busy"
    )
    assert outside_text(worker_report(0, seen_s=90.0, quiet_s=90.0)) == (
        "watched from outside: has printed nothing in 1 min 30 s, 0.0 cores busy"
    )
    assert outside_text(worker_report(0, cpu_cores=0.94), "python -I") == "no probe (python -I): 0.9 cores busy"
    assert "torch" in outside_text(worker_report(0), "")


def test_output_is_too_quiet_only_when_it_never_was_so_quiet_before() -> None:
    output = Output()
    assert not output.is_too_quiet(1e9)
    output.put(np.array([]))
    assert output.last_s is None, "it has not said a word yet"
    output.put(np.array([100.0, 50.0]))
    assert not output.is_too_quiet(1000.0 + LONG_QUIET_S), "nobody knows yet how often it speaks"

    output.put(np.array([200.0, 60.0]))

    assert not output.is_too_quiet(200.0 + QUIET_FACTOR * 100.0)
    assert output.is_too_quiet(201.0 + QUIET_FACTOR * 100.0)
