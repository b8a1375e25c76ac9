"""Stands between an agent and its console: every report that passes is sound, and false.

Run as `python lying_agent.py SOCKET AGENT_S_SOCKET`. Each report claims rank 0, in turns a part of the job that cannot
be, and of its host figures that no machine has.
"""

from __future__ import annotations

import sys

import msgspec
import zmq

from agent.wire.digest import encode_frame
from agent.wire.machine import HostReport
from agent.wire.relay import decode_merged, encode_merged
from agent.wire.reports import decode_node_report

NO_HOST = HostReport(load_1min=1e18, swap_used_bytes=2**63 - 1, disk_free_bytes=2**63 - 1, nic_rx_bytes_hz=1e18)


def lie(frame: bytes) -> bytes:
    report = decode_node_report(frame)
    parts = {"first_rank": 0} if report.report_seq % 2 else {"local_world_size": 2**62}
    told = msgspec.structs.replace(
        report,
        host=NO_HOST,
        cpu_frac=float("nan"),
        memory_total_bytes=1,
        memory_available_bytes=2**63 - 1,
        jobs=[msgspec.structs.replace(job, **parts) for job in report.jobs],
        workers=[msgspec.structs.replace(worker, rank=0, cpu_s=1e10) for worker in report.workers],
    )
    return encode_frame(told)


def main() -> None:
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.bind(f"ipc://{sys.argv[1]}")
    poller, agent_for, console_of = zmq.Poller(), {}, {}
    poller.register(front, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket is front:
                console, *parts = front.recv_multipart()
                if console not in agent_for:
                    agent_for[console] = agent = context.socket(zmq.DEALER)
                    console_of[agent] = console
                    agent.connect(f"ipc://{sys.argv[2]}")
                    poller.register(agent, zmq.POLLIN)
                agent_for[console].send_multipart(parts)
                continue
            merged = decode_merged(socket.recv())
            reports = [msgspec.structs.replace(one, frame=lie(one.frame)) for one in merged.reports]
            frame = encode_merged(msgspec.structs.replace(merged, reports=reports))
            front.send_multipart([console_of[socket], frame])


if __name__ == "__main__":
    main()
