"""What the console costs and how fast it answers, beside a fleet that talks through the real codec and real sockets.

    python tests/bench/bench_console.py [--quick]

A feeder process publishes the reports of 2,048 nodes with 8 ranks each and answers for their log lines; the console is
a process of its own on a real PTY of 200x50, and keys are typed there. A key's time is from the write of the key to the
read of the paint that answers it. CPU is that of the console's process, all of its threads, as a share of one core.

Noise stands beside each figure: the p99 of keys at a program that only echoes, typed in turn with the others, and at
the top the longest that a loop which does nothing else was held up. Percentiles of few keys are near their maximum.
Peers, in the same run: Textual's DataTable and RichLog for the same ranks, and Textual's unpaced output.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.screen_link import Link, LocalUser, open_echo  # noqa: E402 - run by its path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SLOW = Link(bytes_s=1e6, round_trip_s=0.040)
TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
UNPACED = {"RANKDECK_PACING": "0", "RANKDECK_STOCK_STRIPS": "1"}
RIGHT, DOWN, UP, HOME, END = b"\x1b[C", b"\x1b[B", b"\x1b[A", b"\x1b[H", b"\x1b[F"
MEBI = 2**20


class Figures(NamedTuple):
    """One screen for a while."""

    key_ms: list[float]
    echo_ms: list[float]
    cpu_frac: float
    bytes_s: float


class Bench:
    """Runs parts and prints rows."""

    def __init__(self, *, is_quick: bool) -> None:
        self.num_keys = 25 if is_quick else 80
        self.is_quick = is_quick
        self._dice = random.Random(1)
        self._echo = open_echo()

    def watch(self, local_user: LocalUser, keys: list[tuple[bytes, str]]) -> Figures:
        """Type keys at odd moments, in turn with keys at the echo."""
        local_user.wait(1.0)
        began_s, cpu_s, num_bytes = time.monotonic(), local_user.cpu_s(), local_user.num_bytes
        key_ms, echo_ms = [], []
        for key, words in keys:
            key_ms.append(1e3 * local_user.key(key, words))
            local_user.wait(self._dice.uniform(0.03, 0.13))
            echo_ms.append(1e3 * self._echo.key(b"x", "x"))
            local_user.wait(self._dice.uniform(0.02, 0.1))
        spent_s = time.monotonic() - began_s
        return Figures(
            key_ms, echo_ms, (local_user.cpu_s() - cpu_s) / spent_s, (local_user.num_bytes - num_bytes) / spent_s
        )

    def walk(self, key: bytes) -> list[tuple[bytes, str]]:
        """Return a walk from rank 0 on: each key selects the next rank, whose number is painted."""
        return [(key, f" RANK {rank} ") for rank in range(1, self.num_keys + 1)]

    def scroll(self) -> list[tuple[bytes, str]]:
        """Return a walk away from the newest log line and back."""
        return [(UP, "End follows"), (END, "following")] * (self.num_keys // 2)

    def close(self) -> None:
        self._echo.close()


@contextmanager
def fleet(num_nodes: int, hz: int, *more: str) -> Iterator[str]:
    """Let a fleet talk; yields its directory."""
    directory = tempfile.mkdtemp(prefix="rdbench")
    argv = [
        sys.executable,
        "-m",
        "tests.bench.fleet_feeder",
        directory,
        "--nodes",
        str(num_nodes),
        "--hz",
        str(hz),
        *more,
    ]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **TERMINAL}
    ) as feeder:
        assert feeder.stdin is not None
        assert feeder.stdout is not None
        try:
            assert feeder.stdout.readline() == "ready\n"
            yield directory
        finally:
            feeder.stdin.close()
            print(f"  (fed {feeder.stdout.read().strip()})")
            shutil.rmtree(directory)


@contextmanager
def console(
    directory: str,
    num_nodes: int,
    module: str = "fleet_console",
    link: Link | None = None,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    has_relay: bool = False,
) -> Iterator[LocalUser]:
    """Open a console on a fleet and wait until the ranks are there."""
    argv = [sys.executable, "-m", f"tests.bench.{module}", directory, str(num_nodes), *(["relay"] * has_relay)]
    local_user = LocalUser(argv, {**TERMINAL, **environ}, link)
    try:
        local_user.until_painted("train.py:142", 60.0)
        local_user.wait(3.0)
        yield local_user
    finally:
        local_user.close()


def p(values: list[float], percent: int) -> float:
    """Return a percentile, never below the truth."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def row(name: str, found: Figures, goal: str = "") -> None:
    """Print a row of keys."""
    print(
        f"  {name:34} key p50 {p(found.key_ms, 50):6.1f}  p90 {p(found.key_ms, 90):6.1f}"
        f"  p99 {p(found.key_ms, 99):6.1f} ms  CPU {found.cpu_frac:5.1%}  {found.bytes_s / 1e3:6.1f} kB/s"
        f"   noise: echo p99 {p(found.echo_ms, 99):5.1f} ms{goal and '   goal: ' + goal}",
        flush=True,
    )


def spin(seconds: float) -> str:
    """Return how much a loop that does nothing else is held up."""
    longest_s, held_s, last_s = 0.0, 0.0, time.perf_counter()
    end_s = last_s + seconds
    while last_s < end_s:
        now_s = time.perf_counter()
        gap_s, last_s = now_s - last_s, now_s
        if gap_s > 0.001:
            held_s += gap_s
            longest_s = max(longest_s, gap_s)
    return f"a spinning loop was held up for {held_s / seconds:.0%} of {seconds:g} s, {1e3 * longest_s:.0f} ms at most"


def views(bench: Bench, num_nodes: int, hz: int, goal: str, *, has_relay: bool = False) -> None:
    """Measure the views of a fleet, whose reports come by a socket of each node, or in the frames of a relay."""
    road = "in a relay's frames" if has_relay else "by a socket of each node"
    print(f"\n{8 * num_nodes:,} ranks at {hz} reports/s {road}, 2,000 log lines/s")
    with (
        fleet(num_nodes, hz, *(["--relay"] * has_relay)) as directory,
        console(directory, num_nodes, has_relay=has_relay) as local_user,
    ):
        began_s, cpu_s, num_bytes = time.monotonic(), local_user.cpu_s(), local_user.num_bytes
        local_user.wait(5.0)
        spent_s = time.monotonic() - began_s
        cpu, bytes_s = (local_user.cpu_s() - cpu_s) / spent_s, (local_user.num_bytes - num_bytes) / spent_s
        print(f"  overview, no key: CPU {cpu:.1%}, {bytes_s / 1e3:.1f} kB/s")
        local_user.type(b"2")
        local_user.wait(1.0)
        local_user.type(HOME)
        row("ranks, grid", bench.watch(local_user, bench.walk(RIGHT)), goal)
        local_user.type(b"v")
        local_user.wait(1.0)
        local_user.type(HOME)
        row("ranks, table", bench.watch(local_user, bench.walk(DOWN)), goal)
        if hz == 2:
            local_user.type(log_key())
            row("logs", bench.watch(local_user, bench.scroll()), goal)
        rss, pss = local_user.memory_bytes()
        print(f"  memory: {rss / MEBI:.0f} MiB resident, {pss / MEBI:.0f} MiB PSS, log lines included")


def log_key() -> bytes:
    """Return the key of the logs."""
    from app.tui.actions import VIEW_NAMES  # noqa: PLC0415 - only here

    return str(VIEW_NAMES.index("logs") + 1).encode()


def slow_link(bench: Bench) -> None:
    """Measure keys over a slow link, as it is and without pacing."""
    num_nodes = 128
    print("\n1,024 ranks over a link of 1 MB/s and 40 ms round trip")
    for name, more in (("ranks, table", {}), ("ranks, table, Textual's own output", UNPACED)):
        with fleet(num_nodes, 2) as directory, console(directory, num_nodes, link=SLOW, environ=more) as local_user:
            local_user.type(b"2")
            local_user.wait(1.0)
            local_user.type(b"v")
            local_user.wait(1.0)
            local_user.type(HOME)
            row(name, bench.watch(local_user, bench.walk(DOWN)), "" if more else "p99 <= 130 ms")
            if not more:
                local_user.type(log_key())
                row("logs", bench.watch(local_user, bench.scroll()), "p99 <= 130 ms")


def stock(bench: Bench) -> None:
    """Measure Textual's own widgets beside ours."""
    num_nodes = 128
    print("\n1,024 ranks at 2 reports/s, 2,000 log lines/s, beside Textual's DataTable and RichLog")
    with fleet(num_nodes, 2) as directory:
        with console(directory, num_nodes) as local_user:
            local_user.type(b"2")
            local_user.wait(1.0)
            local_user.type(b"v")
            local_user.wait(1.0)
            local_user.type(HOME)
            ours = bench.watch(local_user, bench.walk(DOWN))
            row("ours", ours)
            rss, pss = local_user.memory_bytes()
            print(f"  memory: {rss / MEBI:.0f} MiB resident, {pss / MEBI:.0f} MiB PSS, log lines included")
        with console(directory, num_nodes, "stock_console") as local_user:
            theirs = bench.watch(local_user, bench.walk(DOWN)[: 10 if bench.is_quick else 25])
            row("DataTable and RichLog", theirs)
    cpu = theirs.cpu_frac / ours.cpu_frac
    keys = p(theirs.key_ms, 50) / p(ours.key_ms, 50)
    print(f"  stock / ours: CPU {cpu:.1f}, key p50 {keys:.1f}, key p99 {p(theirs.key_ms, 99) / p(ours.key_ms, 99):.1f}")


def first_paint(bench: Bench) -> None:
    """Measure from the start of `rankdeck demo` to its first paint, and what its process holds then."""
    print("\nfirst paint of `rankdeck demo`, from the start of its process")
    shown_ms, bare_ms, held = [], [], ""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed rankdeck is compiled
    subprocess.run([sys.executable, "-c", "import app.cli.run, app.tui.console"], check=True)
    for _ in range(3 if bench.is_quick else 7):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import textual.app"], check=True)
        bare_ms.append(1e3 * (time.monotonic() - began_s))
        local_user = LocalUser([sys.executable, "-m", "app", "demo"], TERMINAL)
        try:
            shown_ms.append(1e3 * (local_user.until_painted("rankdeck demo", 20.0) - local_user.begun_s))
            if not held:
                local_user.until_painted("steps/s", 60.0)
                local_user.wait(5.0)
                rss, pss = local_user.memory_bytes()
                maps = Path(f"/proc/{local_user.process.pid}/maps").read_text()
                ssh = "is" if "cryptography" in maps else "is not"
                held = (
                    f"{rss / MEBI:.0f} MiB resident, {pss / MEBI:.0f} MiB PSS, its job running; paramiko {ssh} loaded"
                )
        finally:
            local_user.close()
    print(f"  {min(shown_ms):.0f} ms at best, median {p(shown_ms, 50):.0f}, worst {max(shown_ms):.0f}   goal: 500 ms")
    print(f"   noise: a Python that only imports textual.app {min(bare_ms):.0f} to {max(bare_ms):.0f} ms")
    print(f"  memory: {held}   goal: 80 MB")


def log_lines() -> None:
    """Measure a million log lines."""
    print("\na million log lines", flush=True)
    subprocess.run([sys.executable, "-m", "tests.bench.million_lines"], check=True, env={**os.environ, **TERMINAL})


def main() -> None:
    """Measure all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer keys, and no fleet at 10 reports/s")
    parser.add_argument("--only", nargs="*", help="of: fleet, relay, fast-fleet, link, stock, start, logs")
    options = parser.parse_args()
    os.chdir(ROOT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {spin(2.0)}")
    bench = Bench(is_quick=options.quick)
    parts = {
        "fleet": lambda: views(bench, 2048, 2, "p99 <= 40 ms, CPU <= 15 %"),
        "relay": lambda: views(bench, 2048, 2, "p99 <= 40 ms, CPU <= 15 %", has_relay=True),
        "fast-fleet": lambda: views(bench, 2048, 10, "p99 <= 50 ms"),
        "link": lambda: slow_link(bench),
        "stock": lambda: stock(bench),
        "start": lambda: first_paint(bench),
        "logs": log_lines,
    }
    for name, part in parts.items():
        if name in options.only if options.only else not (options.quick and name == "fast-fleet"):
            part()
    bench.close()
    print(f"\nload {os.getloadavg()[0]:.1f}; {spin(2.0)}")


if __name__ == "__main__":
    main()
