"""Stands in for torchrun where no test is about it: takes its options, and starts ranks that import no torch.

A launch takes a tenth of a second. Run as `python -S light_launcher.py -m torch.distributed.run OPTIONS PROGRAM`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

FLAGS = {"--nnodes": "1", "--nproc-per-node": "1", "--node-rank": "0"}


def main() -> int:
    flags = dict(FLAGS)
    words = sys.argv[1:]
    for word, value in itertools.pairwise(words):
        if word in flags:
            flags[word] = value
    num_nodes, num_local, node_rank = (int(value) for value in flags.values())
    first = node_rank * num_local
    ranks = [start(first + at, at, num_nodes * num_local) for at in range(num_local)]

    def end(number: int, _frame: object) -> None:
        for process in ranks:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    codes: list[int] = []
    while len(codes) < num_local:
        codes = [code for process in ranks if (code := process.poll()) is not None]
        if any(codes):
            break
        time.sleep(0.05)
    for process in ranks:
        process.terminate()
    for process in ranks:
        process.wait()
    return int(any(codes))


def start(rank: int, local_rank: int, world_size: int) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    environ = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
    base = f"{os.environ['RANKDECK_LOG_DIR']}/rank-{rank}"
    program = os.path.join(os.path.dirname(__file__), "light_rank.py")  # noqa: PTH118, PTH120 - without pathlib
    with open(f"{base}.stdout.log", "ab") as out, open(f"{base}.stderr.log", "ab") as err:  # noqa: PTH123 - likewise
        return subprocess.Popen([sys.executable, "-S", program], env=environ, stdout=out, stderr=err)


if __name__ == "__main__":
    sys.exit(main())
