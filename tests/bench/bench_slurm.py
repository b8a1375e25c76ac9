"""What a real Slurm's events leave of a job, and how soon a console shows the end: a row an event.

`python -m tests.bench.bench_slurm [--proctrack linuxproc] [--repeats 3]`, as root, with Slurm installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from tests.e2e.test_slurm import attached, checkpoints, nothing_is_left, training, until_printed
from tests.support.slurm import SlurmCluster
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

END_S = 180.0


def measured(
    cluster: SlurmCluster, options: tuple[str, ...], event: Callable[[str], object]
) -> tuple[float, float, bool]:
    """Return the seconds until a console shows the end and until nothing is left, and whether a checkpoint is new."""
    job_id = training(cluster, *options)
    console = attached(cluster, job_id)
    assert console.stderr is not None
    before = checkpoints(cluster)
    event(job_id)
    began_s = time.monotonic()
    while not any(text in (line := console.stderr.readline()) for text in ("stopped", "Slurm ends job")):
        if not line:
            break
    shown_s = time.monotonic() - began_s
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")
    left_s = time.monotonic() - began_s
    console.communicate(timeout=END_S)
    cluster.run("scancel", job_id)
    until(lambda: cluster.state(job_id) not in {"RUNNING", "COMPLETING"}, END_S, "Slurm has ended it")
    cluster.run("scontrol", "update", "NodeName=h2", "State=RESUME", codes=(0, 1))
    until(lambda: set(cluster.states().values()) == {"idle"}, END_S, "all nodes are idle")
    return shown_s, left_s, len(set(checkpoints(cluster)) - set(before)) == 1


def noticed(cluster: SlurmCluster) -> float:
    """Return the seconds until a console shows that Slurm drains a node of its job, which goes on."""
    job_id = training(cluster)
    console = attached(cluster, job_id)
    cluster.run("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=bad disk")
    began_s = time.monotonic()
    until_printed(console, "Slurm drains h2")
    shown_s = time.monotonic() - began_s
    cluster.run("scontrol", "update", "NodeName=h2", "State=RESUME")
    cluster.run("scancel", job_id)
    console.communicate(timeout=END_S)
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")
    return shown_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proctrack", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="Names of events")
    options = parser.parse_args()
    urgent = ("sbatch", "--nodes=2", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    down = ("scontrol", "update", "NodeName=h2", "State=DOWN", "Reason=broken")
    with SlurmCluster(proctrack=options.proctrack) as cluster:
        events: dict[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
            "scancel": ((), lambda job_id: cluster.run("scancel", job_id)),
            "scancel -s USR1": ((), lambda job_id: cluster.run("scancel", "-s", "USR1", job_id)),
            "requeue": ((), lambda job_id: cluster.run("scontrol", "requeue", job_id)),
            "time limit of 1 min": (("--time=1",), lambda _job_id: None),
            "preemption": ((), lambda _job_id: cluster.run(*urgent)),
            "node set down": (("--no-requeue",), lambda _job_id: cluster.run(*down)),
        }
        for name, (words, event) in events.items():
            if options.only and name not in options.only:
                continue
            rows = [measured(cluster, words, event) for _ in range(options.repeats)]
            shown_s, left_s = (statistics.median(row[column] for row in rows) for column in (0, 1))
            kept = sum(row[2] for row in rows)
            print(f"| {name} | {shown_s:.1f} s | {kept} of {len(rows)} | {left_s:.1f} s |", flush=True)
        if not options.only or "node drained" in options.only:
            shown_s = statistics.median(noticed(cluster) for _ in range(options.repeats))
            print(f"| node drained | {shown_s:.1f} s | - | the job goes on |", flush=True)


if __name__ == "__main__":
    main()
