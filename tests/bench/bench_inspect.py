"""What `rankdeck inspect` takes over many hosts by SSH: python -m tests.bench.bench_inspect [HOSTS [REPEATS]].

Run as root where namespaces are. One rank a host; rank 1 sleeps, the others wait for it. All hosts, their sshds and
ranks share this machine's cores with the console: seconds of CPU show the console's part.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from tests.support.desk import IMPORT_S, Desk, named
from tests.support.hosts import Network, why_no_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

REACHED_S = 120.0
PROGRAM = """
import os, sys, time
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
open(sys.argv[1] + str(dist.get_rank()), "w").close()
if dist.get_rank() == 1:
    time.sleep(3600)
dist.all_reduce(torch.ones(4))
"""


def main() -> None:
    """Print the figures."""
    if reason := why_no_hosts():
        sys.exit(reason)
    num_hosts, repeats = (int(text) for text in (*sys.argv[1:], "32", "5")[:2])
    with Network(*(f"h{number}" for number in range(num_hosts))) as network:
        desk = Desk(network)
        ranks = start(network)
        try:
            at = [network.directory / f"at{number}" for number in range(num_hosts)]
            until(lambda: all(path.exists() for path in at), IMPORT_S + 5 * num_hosts, "all ranks")
            # The job's connections fill the table of neighbours that all namespaces share: some are away at first.
            until(lambda: measure(desk, num_hosts), REACHED_S, "an inspection of all hosts")
            for _ in range(repeats):
                assert measure(desk, num_hosts)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            desk.end()


def start(network: Network) -> list[subprocess.Popen[bytes]]:
    script: Path = network.directory / "hangs.py"
    script.write_text(PROGRAM)
    job = {"WORLD_SIZE": str(len(network.hosts)), "MASTER_ADDR": network["h0"].address, "MASTER_PORT": "29500"}
    ranks = []
    for number, host in enumerate(network.hosts.values()):
        variables = [f"{name}={value}" for name, value in {**job, "RANK": str(number), "LOCAL_RANK": "0"}.items()]
        argv = (sys.executable, str(script), str(network.directory / "at"))
        ranks.append(host.start("env", *variables, *argv))
    return ranks


def measure(desk: Desk, num_hosts: int) -> bool:
    """Print what one inspection takes; return whether it has seen every host."""
    argv = desk.argv("inspect", "--json", *named(*desk.network.hosts))
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, env=desk.environment, cwd=desk.directory, capture_output=True, check=False, text=True)
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (job,) = json.loads(done.stdout)["jobs"]
    num_seen, load = len(job["ranks"]), os.getloadavg()[0]
    print(
        f"{num_seen} of {num_hosts} hosts: {took_s:.2f} s, {cpu_s:.2f} s of CPU in the console; load {load:.1f}",
        flush=True,
    )
    return num_seen == num_hosts and job["culprits"] == [1]


if __name__ == "__main__":
    main()
