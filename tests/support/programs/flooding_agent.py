"""Stands in for an agent that has gone mad: whoever asks it for reports is flooded with what is none.

Run as `python flooding_agent.py SOCKET`; each console gets frames that are garbage, too long, of many parts, or reports
that nobody has asked for, as fast as it takes them.
"""

from __future__ import annotations

import sys

import zmq

from agent.wire.relay import MAX_MERGED_BYTES, Merged, MergedReport, encode_merged

UNASKED = encode_merged(Merged("r", 0, asked=9_999_999, reports=[MergedReport("here", 0, b"\xc1" * 1000)]))
FRAMES = ([b"\xc1" * 1000], [b""] * 50, [UNASKED], [encode_merged(Merged("r", 0, version=7))[:-1]])
TOO_LONG = [b"x" * (MAX_MERGED_BYTES + 1)]
BURST = 200


def main() -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, BURST)
    router.bind(f"ipc://{sys.argv[1]}")
    peers: dict[bytes, int] = {}
    while True:
        while router.poll(20):
            peer, *_ = router.recv_multipart()
            num = peers[peer] = peers.get(peer, -1) + 1
            if num == 0:
                router.send_multipart([peer, encode_merged(Merged("r", 0))])
        for peer, num in peers.items():
            for at in range(BURST):
                router.send_multipart([peer, *FRAMES[at % len(FRAMES)]])
            if num % 100 == 99:
                router.send_multipart([peer, *TOO_LONG])


if __name__ == "__main__":
    main()
