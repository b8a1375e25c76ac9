"""What following logs costs: one look at all files, and following beside `tail -F` and torchrun's --tee.

    python -m tests.bench.bench_logs [--megabytes-s 100] [--seconds 5] [--rounds 3] [--without-torchrun]

Three parts. A look: 16 files (8 ranks, 2 streams) grow together by a fifth of a second's worth, then one `LogTail.poll`
is timed: that is how long the agent's event loop stands still. A follower: a process that follows files which another
writes at a steady pace, its CPU time without its start and its peak memory, `LogTail` at its five looks a second beside
`tail -F`, at the full pace and at one where nothing is skipped. torchrun: a job that prints as fast as it can, once
through `--tee 3`, once into files that a follower reads: the CPU time of everything, without that of an empty job.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agent.logs.log_tail import LogTail

LINE = b"step 12345 loss 3.1415926 lr 0.0001 throughput 1234.5 tokens/s\n"
KINDS = {
    "ordinary lines": LINE,
    "one-letter lines": b"x\n",
    "CRLF lines": LINE.replace(b"\n", b"\r\n"),
    "progress bars": b"\r 10%|###       | 12/100" * 40 + b"\n",
    "binary": os.urandom(4096),
    "no line ends": b"x" * 4096,
}
NUM_RANKS = 8
POLL_S = 0.2
PRINTER = """
import os, sys, time
line = b"step 12345 loss 3.1415926 lr 0.0001 throughput 1234.5 tokens/s\\n"
block = line * 1000
for _ in range(int(sys.argv[1]) * 1_000_000 // len(block)):
    os.write(1, block)
"""


def look(megabytes_s: float) -> None:
    """Time single looks at 16 files that grow together."""
    print(f"\none look at {2 * NUM_RANKS} files, {megabytes_s:g} MB/s together, 30 looks each")
    for kind, piece in KINDS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            tail = LogTail()
            tail.follow("job", Path(directory), Path(directory), range(NUM_RANKS))
            paths = [Path(directory, f"rank-{r}.{s}.log") for r in range(NUM_RANKS) for s in ("stdout", "stderr")]
            num = max(1, round(megabytes_s * 1e6 * POLL_S / len(paths) / len(piece)))
            times, cpu_times = [], []
            for tick in range(30):
                for path in paths:
                    with path.open("wb" if tick % 5 == 0 else "ab") as file:
                        file.write(piece * num)
                began_s, cpu_s = time.perf_counter(), time.thread_time()
                tail.poll()
                times.append((time.perf_counter() - began_s) * 1e3)
                cpu_times.append((time.thread_time() - cpu_s) * 1e3)
            dropped = sum(loss.dropped_bytes for loss in tail.losses) / (30 * num * len(piece) * len(paths))
            tail.close()
        print(
            f"  {kind:18} median {statistics.median(times):5.1f} ms (CPU {statistics.median(cpu_times):4.1f}, worst "
            f"{max(cpu_times):4.1f}), "
            f"{tail.log_seq / 30:6.0f} lines a look, {dropped:4.0%} skipped and counted"
        )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tail = LogTail()
        tail.follow("job", Path(directory), Path(directory), range(NUM_RANKS))
        began_s = time.perf_counter()
        for _ in range(100):
            tail.poll()
        print(f"  {'nothing written':18} {(time.perf_counter() - began_s) * 10:5.2f} ms")


def follow(directory: str, seconds: float) -> None:
    """Follow files as the agent does, in a process of its own, and print its CPU time and memory."""
    tail = LogTail()
    tail.follow("job", Path(directory), Path(directory), range(NUM_RANKS))
    end_s, cpu_s = time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        tail.poll()
        time.sleep(max(0.0, POLL_S - (time.monotonic() - began_s)))
    print(time.process_time() - cpu_s, sum(loss.dropped_bytes for loss in tail.losses))
    tail.close()


def write_steadily(directory: str, megabytes_s: float, seconds: float) -> int:
    """Append to all files at a steady pace; return how many bytes."""
    paths = [Path(directory, f"rank-{r}.{s}.log") for r in range(NUM_RANKS) for s in ("stdout", "stderr")]
    files = [path.open("ab", buffering=0) for path in paths]
    block = LINE * max(1, round(megabytes_s * 1e6 / 50 / len(files) / len(LINE)))
    began_s, written = time.monotonic(), 0
    while (now_s := time.monotonic() - began_s) < seconds:
        while written < min(now_s, seconds) * megabytes_s * 1e6:
            for file in files:
                file.write(block)
                written += len(block)
        time.sleep(0.02)
    for file in files:
        file.close()
    return written


def cost_of(name: str, directory: str, megabytes_s: float, seconds: float) -> tuple[float, float, float]:
    """Run a follower beside a writer; return its CPU seconds a MB written, its peak in MB, and what it skipped."""
    paths = [f"{directory}/rank-{r}.{s}.log" for r in range(NUM_RANKS) for s in ("stdout", "stderr")]
    for path in paths:
        Path(path).touch()
    is_ours = name == "LogTail"
    ours = [sys.executable, "-m", "tests.bench.bench_logs", "--follow", directory, str(seconds + 2)]
    argv = ours if is_ours else ["tail", "-q", "-F", "-n", "+1", *paths]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile() as thrown_away:
        process = subprocess.Popen(argv, stdout=said if is_ours else subprocess.DEVNULL, stderr=thrown_away)
        time.sleep(0.7)  # for the follower's imports
        written = write_steadily(directory, megabytes_s, seconds)
        time.sleep(0.5)
        peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line)
        if not is_ours:
            process.terminate()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        said.seek(0)
        cpu_s, dropped = map(float, said.read().split()) if is_ours else (usage.ru_utime + usage.ru_stime, 0.0)
    return (cpu_s / (written / 1e6), int(peak.split()[1]) / 1e3, dropped / written)


def followers(megabytes_s: float, seconds: float, rounds: int) -> None:
    """Compare the agent's follower with `tail -F`."""
    print(f"\na follower of {2 * NUM_RANKS} files at {megabytes_s:g} MB/s for {seconds:g} s, {rounds} rounds in turn")
    figures: dict[str, list[tuple[float, float, float]]] = {"LogTail": [], "tail -F": []}
    for _ in range(rounds):
        for name, rows in figures.items():
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                rows.append(cost_of(name, directory, megabytes_s, seconds))
    for name, rows in figures.items():
        cpu, memory, skipped = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"  {name:8} {cpu * 1e3:6.2f} ms CPU a MB written, peak {memory:5.1f} MB, {skipped:4.0%} skipped")
    ratios = [ours[0] / peer[0] for ours, peer in zip(*figures.values(), strict=True)]
    print(f"  ratio of CPU time, LogTail / tail -F: median {statistics.median(ratios):.2f}, all {_listed(ratios)}")


def torchrun(megabytes: int, rounds: int) -> None:
    """Compare a job that prints through torchrun's --tee with one whose files are followed."""
    print(f"\na torchrun job of 2 ranks that print {megabytes} MB each, {rounds} rounds in turn")
    tees, followed = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        Path(directory, "printer.py").write_text(PRINTER)
        base = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir"]
        program = f"{directory}/printer.py"
        for number in range(rounds):
            quiet_s = _cpu_of([*base, f"{directory}/quiet{number}", "-r", "3", program, "0"])
            tees.append(_cpu_of([*base, f"{directory}/tee{number}", "--tee", "3", program, str(megabytes)]) - quiet_s)
            place = f"{directory}/file{number}"
            followed.append(_cpu_of([*base, place, "-r", "3", program, str(megabytes)], place) - quiet_s)
    print(f"  --tee 3 {statistics.median(tees):.2f} s CPU, {_listed(tees)}")
    print(f"  files with a follower beside {statistics.median(followed):.2f} s CPU, {_listed(followed)}")


def _cpu_of(argv: list[str], log_dir: str = "") -> float:
    """Return the CPU time of a command and its children; with a directory, of following its files meanwhile too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tail = LogTail()
    is_followed, follower_s = False, 0.0
    while process.poll() is None:
        found = sorted(Path(log_dir).glob("*/attempt_0/*/std*.log")) if log_dir and not is_followed else []
        if len(found) == 4:
            for path in found:
                os.link(path, Path(log_dir, f"rank-{path.parent.name}.{path.name}"))
            tail.follow("job", Path(log_dir), Path(log_dir), range(2))
            is_followed = True
        began_s = time.thread_time()
        tail.poll()
        follower_s += time.thread_time() - began_s
        time.sleep(POLL_S)
    tail.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime + follower_s


def _listed(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-torchrun", action="store_true")
    parser.add_argument("--follow", nargs=2, metavar=("DIR", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        follow(options.follow[0], float(options.follow[1]))
        return
    look(options.megabytes_s)
    for megabytes_s in (options.megabytes_s, 1.0):
        followers(megabytes_s, options.seconds, options.rounds)
    if not options.without_torchrun:
        torchrun(100, options.rounds)
    print(f"\npeak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
