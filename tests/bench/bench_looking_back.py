"""What it costs a console to look back: bytes, milliseconds of CPU time, and the longest piece of work, by fleet.

    python -m tests.bench.bench_looking_back [--quick]

Reports are those of `fleet_feeder`, eight ranks a node, every rank a little further each time, as an agent keeps and
packs them. CPU time is that of unpacking, decoding, folding in and looking; sockets are not in it.
"""

from __future__ import annotations

import sys
import time

from agent.wire.commands import PackedHistory
from agent.wire.relay import MAX_UNPACKED_BYTES, pack
from agent.wire.reports import decode_node_report, encode_node_report
from app.diagnosis.rank_facts import Thresholds
from app.recording.backfill import NodePast, Plan, looks, plan
from app.recording.playback import ReplayModel
from tests.bench.fleet_feeder import FedNode, node_names

FLEETS = (1, 16, 128, 512)
FLEETS_QUICK = (1, 16)
QUICK_S = 30.0
END_S = 10_000.0


def past_of(node: FedNode, wanted: Plan, num_bytes: list[int]) -> NodePast:
    """Return what a node remembers, in pieces as large as an agent's; adds to (unpacked, packed)."""
    past = NodePast(node.report.node, 2**40)
    frames: list[bytes] = []
    ages_s: list[float] = []
    num_reports = int(wanted.max_age_s / wanted.period_s)
    for turn in range(1, num_reports + 1):
        age_s = (num_reports - turn) * wanted.period_s
        frames.append(encode_node_report(decode_node_report(node.frame(turn, END_S - age_s))))
        ages_s.append(age_s)
        if sum(map(len, frames)) + len(frames[-1]) > MAX_UNPACKED_BYTES or turn == num_reports:
            packed = pack(frames)
            num_bytes[0] += sum(map(len, frames))
            num_bytes[1] += len(packed)
            past.add(PackedHistory(list(range(len(frames))), ages_s, [len(frame) for frame in frames], packed), END_S)
            frames, ages_s = [], []
    return past


def main() -> None:
    """Print a line for each fleet."""
    is_quick = "--quick" in sys.argv
    print("nodes  span s  reports     MB  packed MB  CPU s  ms a report  longest piece ms")
    for num_nodes in FLEETS_QUICK if is_quick else FLEETS:
        wanted = plan(num_nodes)
        assert wanted is not None
        if is_quick:
            wanted = wanted._replace(max_age_s=QUICK_S)
        num_bytes = [0, 0]
        names = node_names(num_nodes)
        pasts = [past_of(FedNode(index, num_nodes), wanted, num_bytes) for index in range(num_nodes)]
        for past, name in zip(pasts, names, strict=True):
            past.node = name
        replay = ReplayModel(names, Thresholds())
        begun_s, longest_s = time.thread_time(), 0.0
        last_s = begun_s
        for _ in looks(replay, [past.reports() for past in pasts], END_S):
            now_s = time.thread_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        spent_s = time.thread_time() - begun_s
        num_reports = num_nodes * int(wanted.max_age_s / wanted.period_s)
        assert replay.history.shown is not None
        whole_mb, packed_mb = (num / 1e6 for num in num_bytes)
        print(
            f"{num_nodes:5}  {wanted.max_age_s:6.0f}  {num_reports:7}  {whole_mb:5.1f}  {packed_mb:9.2f}"
            f"  {spent_s:5.1f}  {1e3 * spent_s / num_reports:11.3f}  {1e3 * longest_s:16.1f}"
        )


if __name__ == "__main__":
    main()
