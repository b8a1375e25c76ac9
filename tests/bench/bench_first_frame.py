"""How long a user looks at nothing: from a command's start to the console's first frame, and what is shown until then.

    python -m tests.bench.bench_first_frame [--hosts 4] [--rounds 5]

Run as root where namespaces are. Each host is a network namespace with an sshd and an agent of its own, all on this
machine. A command runs on a pseudo-terminal of 120x35. Its times: until anything is printed, until the console's tabs
are there, until each host is named, and until the ranks' table is there; and the CPU time that the command took
until its tabs were there, which a busy machine does not lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil

from tests.support.demo_runs import DemoHouse
from tests.support.desk import Desk
from tests.support.hosts import Network, why_no_hosts

WAITS = "import signal, torch.distributed as dist\ndist.init_process_group('gloo')\nsignal.pause()\n"
PATIENCE_S = 60.0
CPU = "CPU to tabs"
SIGNS = {"tabs": r"1 Overview.*2 Ranks", "every host": "", "ranks": r"RANK +(NODE +)?STATE"}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    with DemoHouse() as house:
        script = house.directory / "wait.py"
        script.write_text(WAITS)
        line = ("run", "--nproc-per-node", "2", str(script))
        times = []
        for _ in range(wanted.rounds):
            times.append(timed(line, house.environment, house.directory, ()))
            house.start_command(sys.executable, "-P", "-m", "app", "down", "--kill-jobs").communicate()
        table("run, on this machine", times)
    if reason := why_no_hosts():
        sys.exit(reason)
    names = tuple(f"h{number}" for number in range(1, wanted.hosts + 1))
    with Network(*names) as network:
        desk = Desk(network)
        desk.at = ()
        try:
            over_hosts(desk, names, wanted.rounds)
        finally:
            desk.end()


def over_hosts(desk: Desk, names: tuple[str, ...], rounds: int) -> None:
    """Time the commands on a cluster: a start, and a console that comes later."""
    project = desk.directory = Path(tempfile.mkdtemp(dir=desk.network.directory))
    (project / "wait.py").write_text(WAITS)
    hosts = "".join(f'[[node]]\nhost = "{name}"\n' for name in names)
    (project / "rankdeck.toml").write_text(f'[cluster]\nworkdir = "{project}"\n{hosts}')
    run = ("run", "--nproc-per-node", "1", "wait.py")
    for what, line in (("run", run), ("attach", ("attach",)), ("rankdeck alone", ())):
        times = []
        for _ in range(rounds):
            times.append(timed(line, desk.environment, project, names))
            if line is run:
                desk.run("down", "--kill-jobs")
        table(f"{what}, {len(names)} hosts", times)
        if line is run:
            desk.run("run", "--detach", *run[1:])
    desk.run("down", "--kill-jobs")


def timed(
    line: tuple[str, ...], environment: dict[str, str], directory: Path, names: tuple[str, ...]
) -> dict[str, float]:
    """Run a command until the ranks are there, and leave; return when what was there."""
    began_s = time.monotonic()
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(directory)
        os.execve(
            sys.executable,
            [sys.executable, "-P", "-m", "app", *line],
            environment | {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 35, 120, 0, 0))
    printed = shown = ""
    times: dict[str, float] = {}
    try:
        while len(times) < len(SIGNS) + 2 and time.monotonic() < began_s + PATIENCE_S:
            if not select.select([terminal], [], [], 0.01)[0]:
                continue
            try:
                printed += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # it has ended
                break
            now_s = time.monotonic() - began_s
            shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed)
            times.setdefault("anything", now_s)
            for sign, pattern in SIGNS.items():
                if re.search(pattern, shown) if pattern else all(name in shown for name in names):
                    times.setdefault(sign, now_s)
            if "tabs" in times:
                times.setdefault(CPU, sum(psutil.Process(pid).cpu_times()[:2]))
        if len(times) <= len(SIGNS) + 1:
            print(shown[-2000:])
    finally:
        with contextlib.suppress(OSError):
            os.write(terminal, b"q")
            time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return times


def table(what: str, rounds: list[dict[str, float]]) -> None:
    """Print medians and the longest."""
    print(what)
    for sign in ("anything", *SIGNS, CPU):
        values = [times[sign] for times in rounds if sign in times]
        if values:
            median, longest = statistics.median(values), max(values)
            print(f"  {sign:<12} median {median:5.2f} s   longest {longest:5.2f} s   n={len(values)}")


if __name__ == "__main__":
    main()
