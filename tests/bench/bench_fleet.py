"""What many hosts cost, their reports over SSH: connecting, looking on, a command.

Run as root where namespaces are: `python -m tests.bench.bench_fleet [NUM_HOSTS]`

Each host is a network namespace with an sshd of its own; their agents' sockets belong to one process that publishes for
all of them. The machine that is measured holds all of that, too. CPU is that of this process, as a share of one core.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agent.wire.commands import GetStatus
from agent.wire.digest import decode_frame
from agent.wire.reports import WIRE_VERSION
from app.cli.main import START_OBJECTS
from app.errors import AppError
from app.fleet.agent_link import AgentLink, LinkGroup
from app.fleet.host_link import Access, HostLink
from app.inventory.inventory import HostEntry
from app.session.hosts import Hosts
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from app.ssh.login import Logins
from app.threads import run_parallel
from tests.bench.fleet_feeder import FIRST_S, node_directory
from tests.support.hosts import Network, why_no_hosts
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_HOSTS = 128
HZ = 2
WATCH_S = 20.0
NUM_ROUNDS = 2
BEGUN_S = time.monotonic()
"""The feeder's clock counts from here."""
NUM_COMMANDS = 300


def main() -> None:
    """Print the figures."""
    if reason := why_no_hosts():
        sys.exit(reason)
    num_hosts = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_HOSTS
    gc.set_threshold(START_OBJECTS)  # as the command does
    with Network(*(f"h{index}" for index in range(num_hosts))) as network, fed(network, num_hosts):
        for _ in range(NUM_ROUNDS):
            print(f"{num_hosts} hosts")
            measure(network)


@contextmanager
def fed(network: Network, num_hosts: int) -> Iterator[None]:
    """Let somebody speak for the agents of all hosts, and let each host's Python say where."""
    directory = network.directory / "fleet"
    argv = [sys.executable, "-m", "tests.bench.fleet_feeder", str(directory), "--lines-s", "0"]
    argv += ["--begun-s", str(BEGUN_S)]
    feeder = subprocess.Popen(
        [*argv, "--nodes", str(num_hosts), "--hz", str(HZ)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert feeder.stdin is not None
    assert feeder.stdout is not None
    try:
        assert feeder.stdout.readline() == b"ready\n"
        for index, host in enumerate(network.hosts.values()):
            place = {"ready": True, "dir": str(node_directory(directory, index)), "python": "python3", "home": "/root"}
            program = host.home / "python"
            program.write_text(f"#!/bin/sh\necho '{json.dumps({**place, 'wire_version': WIRE_VERSION})}'\n")
            program.chmod(0o700)
        yield
    finally:
        feeder.stdin.close()
        feeder.wait(30)
        feeder.stdout.close()


def measure(network: Network) -> None:
    """Connect, look on, ask, and leave."""
    with LinkGroup() as group:
        logins = Logins()
        for name in network.hosts:
            group.add(HostLink(Access(name, "~/python", str(network.ssh_config)), logins))
        with timed("connect"):
            failures = [error for _, error in group.connect(lambda link: link) if error is not None]
        with timed("find the agents"):
            failures += [said for said in run_parallel(group.links, AgentLink.find) if isinstance(said, AppError)]
        if failures:
            sys.exit(f"{len(failures)} hosts failed: {failures[0]}")
        asyncio.run(look_on(group))


async def look_on(group: LinkGroup) -> None:
    entries = tuple(HostEntry(link.host) for link in group.links)
    session = RemoteSession(Hosts(tuple(group.links), entries, "", {}), None, SessionOptions(is_read_only=True))
    heard: list[tuple[float, bytes]] = []
    take = session.telemetry.take
    with timed("open the roads"):
        await session.connect()
    began_s = time.perf_counter()
    await until_async(lambda: all(row.state == "up" for row in session.view().nodes()), 30, "every node is up")
    print(f"  every node is up after {time.perf_counter() - began_s:.2f} s")
    print(f"  {threading.active_count()} threads, {num_files()} files open")

    def keep(node: str, frame: bytes, age_s: float = 0.0) -> None:
        heard.append((time.monotonic() - age_s, frame))
        take(node, frame, age_s)

    session.telemetry.take = keep  # type: ignore[method-assign]
    cpu_s, began_s = time.process_time(), time.perf_counter()
    while time.perf_counter() < began_s + WATCH_S:
        session.view()
        await asyncio.sleep(0.5)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    print(f"  look on at {HZ} reports/s, a view in 0.5 s: {share:.1%} of a core, {threading.active_count()} threads")
    session.telemetry.take = take  # type: ignore[method-assign]
    tell_delays([now_s - said_s(frame) for now_s, frame in heard])
    await ask(session, group.links[0].host)
    with timed("leave"):
        await session.close()


def said_s(frame: bytes) -> float:
    """Return when a report was made, by this machine's clock."""
    return BEGUN_S + decode_frame(frame).workers[0].seen_s - FIRST_S


def tell_delays(delays_s: list[float]) -> None:
    delays_ms = sorted(1e3 * delay_s for delay_s in delays_s)
    p50_ms, p99_ms = statistics.median(delays_ms), delays_ms[int(0.99 * len(delays_ms))]
    print(f"  {len(delays_ms)} reports, dated p50 {p50_ms:.1f} ms after they were made, p99 {p99_ms:.1f}")


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def ask(session: RemoteSession, host: str) -> None:
    times_ms = []
    for _ in range(NUM_COMMANDS):
        began_s = time.perf_counter()
        await session.fleet.ask(host, GetStatus())
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    times_ms.sort()
    print(
        f"  a command meanwhile: p50 {statistics.median(times_ms):.2f} ms, p99 {times_ms[int(0.99 * NUM_COMMANDS)]:.1f}"
    )


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took, and what of it was this process's CPU."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    yield
    print(f"  {what}: {time.perf_counter() - began_s:.2f} s ({time.process_time() - cpu_s:.2f} s CPU here)")


if __name__ == "__main__":
    main()
