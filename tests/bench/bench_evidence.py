"""What evidence costs: memory of what a console has heard, size and time of a bundle, and how fast it plays again.

    python -m tests.bench.bench_evidence [--nodes 1 16 128]

Nodes of 8 ranks report five times a second for two minutes. `gzip` of the same frames is printed beside, for scale.
"""

from __future__ import annotations

import argparse
import gzip
import time
from typing import TYPE_CHECKING

from agent.wire.reports import WIRE_VERSION, ProcessState
from app.diagnosis.rank_facts import Thresholds
from app.recording.bundle import Evidence, encode_bundle, masked, recording_of
from app.recording.playback import Playback
from app.recording.recorder import MAX_AGE_S, MAX_BYTES, Past
from app.recording.records import FORMAT_VERSION, Opening, Record, ReportRecord, decode_recording
from tests.bench.bench_diagnosis import frames

if TYPE_CHECKING:
    from tests.bench.bench_diagnosis import StateOf

PERIOD_S = 0.2


def at_step(turn: int) -> StateOf:
    """Return ranks that all run, at a collective that has the number of the turn."""
    return lambda _: (ProcessState.RUNNING, turn, False)


def heard(num_nodes: int) -> tuple[list[Record], float, int]:
    """Return what a console keeps of two minutes, the microseconds that keeping a report takes, and all their bytes."""
    past, spent_s, num_reports, num_bytes = Past(), 0.0, 0, 0
    for turn in range(1, int(MAX_AGE_S / PERIOD_S)):
        for node, frame in enumerate(frames(num_nodes, turn, at_step(turn))):
            began_s = time.perf_counter()
            past.add(ReportRecord(turn * PERIOD_S, f"n{node}", frame))
            spent_s += time.perf_counter() - began_s
            num_reports, num_bytes = num_reports + 1, num_bytes + len(frame)
    return past.records(), spent_s / num_reports * 1e6, num_bytes


def measure(num_nodes: int) -> None:
    """Print the figures of a fleet."""
    records, add_us, all_bytes = heard(num_nodes)
    kept_bytes = sum(len(record.frame) for record in records if isinstance(record, ReportRecord))
    span_s = records[-1].at_s - records[0].at_s
    print(f"{num_nodes} nodes, {8 * num_nodes} ranks: {add_us:.1f} us to keep a report")
    print(f"  kept {kept_bytes / 2**20:.1f} of {all_bytes / 2**20:.1f} MiB (at most {MAX_BYTES >> 20}): {span_s:.0f} s")

    began_s = time.perf_counter()
    shown = [masked(record) for record in records]
    masked_s = time.perf_counter() - began_s
    opening = Opening(FORMAT_VERSION, WIRE_VERSION, "bench", "", [f"n{node}" for node in range(num_nodes)], "bench")
    began_s = time.perf_counter()
    bundle = encode_bundle(Evidence(opening, shown, {}, [], {}))
    packed_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    gzip.compress(b"".join(record.frame for record in records if isinstance(record, ReportRecord)), 6)
    gzip_s = time.perf_counter() - began_s
    times = f"masked in {masked_s:.2f} s, packed in {packed_s:.2f} s (gzip alone {gzip_s:.2f} s)"
    print(f"  bundle {len(bundle) / 1024:.0f} KiB: {times}")

    began_s = time.perf_counter()
    playback = Playback(decode_recording(recording_of(bundle)), Thresholds())
    opened_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    while not playback.is_over:
        playback.step(playback.length_s)
    played_s = time.perf_counter() - began_s
    print(f"  opened in {opened_s:.2f} s, played in {played_s:.2f} s: {span_s / played_s:.0f} times the real pace")


def main() -> None:
    """Measure fleets of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 16, 128])
    for num_nodes in parser.parse_args().nodes:
        measure(num_nodes)


if __name__ == "__main__":
    main()
