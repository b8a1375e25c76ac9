"""A rank without torch: makes twenty steps a second, and reports them as the probe does.

Writes `pid step` into `truth-ATTEMPT-RANK` of its working directory, which the test reads: whatever becomes of agents
and connections, that is what the training does. Ends well once there is a file `over`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

sys.path.append(os.environ["LIGHT_RANK_PACKAGES"])
import msgspec

STEP_S = 0.05
STEPS_A_REPORT = 5


def noise() -> str:
    """Return what does not become shorter where it is compressed."""
    return os.urandom(48).hex()


def main() -> None:
    rank = int(os.environ["RANK"])
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    truth = os.open(f"truth-{os.environ['RANKDECK_ATTEMPT']}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    facts = {
        "wire_version": 1,
        "rank": rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "pid": os.getpid(),
        "job_id": os.environ["RANKDECK_JOB_ID"],
        "attempt": int(os.environ["RANKDECK_ATTEMPT"]),
        "phase": "forward",
        "loss_first": 2.0,
    }
    num_lines = int(os.environ.get("LIGHT_RANK_LINES", "0"))
    step = 0
    while not os.path.exists("over"):  # noqa: PTH110 - without pathlib it starts in half the time
        step += 1
        os.pwrite(truth, f"{os.getpid()} {step:9d}\n".encode(), 0)
        if step % STEPS_A_REPORT == 0:
            group = {"group": "0", "enqueued_seq": step, "completed_seq": step, "op": "all_reduce"}
            now = {
                "report_seq": step // STEPS_A_REPORT,
                "step": step,
                "steps_done": step,
                "loss": 1.0 + 1.0 / step,
                "observed_s": step * STEP_S,
                "worked_s": [0.0, 0.0, 0.0, step * STEP_S],
                "groups": [group],
            }
            with contextlib.suppress(OSError):  # no agent now, or a full inbox
                inbox.sendto(msgspec.msgpack.encode({**facts, **now}), os.environ["RANKDECK_INBOX"])
        if step % 40 == 0:
            with contextlib.suppress(OSError):  # a full disk; the line is kept, and written when there is room
                print(f"step {step} loss {1.0 + 1.0 / step:.4f} attempt {facts['attempt']}", flush=True)
        for number in range(num_lines):
            print(f"line {number} of step {step}: {noise()}")
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
