"""What SSH costs: connecting, bringing an agent up, a command by each of the three ways, beside `ssh` itself.

Run as root where namespaces are: `python -m tests.bench.bench_ssh`
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from agent.wire.commands import GetStatus
from app.fleet.commands import StreamChannel
from app.fleet.host_link import Access, HostLink
from tests.support.hosts import Network, why_no_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 20


def main() -> None:
    """Print the figures."""
    if reason := why_no_hosts():
        sys.exit(reason)
    for options in ((), ("AllowStreamLocalForwarding no",)):
        with Network("h1", sshd_options=options) as network:
            print("sockets forwarded" if not options else "through proxy and telemetry")
            measure(network)


def measure(network: Network) -> None:
    config = str(network.ssh_config)
    access = Access("h1", sys.executable, config)
    by_openssh = timed(lambda: subprocess.run(["ssh", "-F", config, "h1", "true"], check=True, capture_output=True))
    with HostLink(access) as link:
        link.connect()
        print(f"  bring up, cold     {1e3 * once(link.bring_up):8.1f} ms")
    say("ssh h1 true", by_openssh)
    say("connect", timed(lambda: connect_once(access)))
    with HostLink(access) as link:
        link.connect()
        say("bring up, again", timed(link.bring_up, 5))
        say("exec agent status", timed(lambda: link._run("status"), 5))
        print(f"  open the road      {1e3 * once(lambda: link.open_sockets(leave)):8.1f} ms")
        say("command", asyncio.run(command_times(link)))
        link.shut_down(kill_jobs=True)


def leave(frame: bytes, age_s: float = 0.0) -> None:
    """Take nothing of it."""
    del frame, age_s


def connect_once(access: Access) -> None:
    with HostLink(access) as link:
        link.connect()


async def command_times(link: HostLink) -> list[float]:
    road = StreamChannel("h1", link.directory)
    times = []
    for _ in range(REPEATS * 5):
        began_s = time.perf_counter()
        await road.request(GetStatus())
        times.append(time.perf_counter() - began_s)
    await road.close()
    return times[1:]  # the first opens the stream


def timed(call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    return [once(call) for _ in range(repeats)]


def once(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def say(what: str, times: list[float]) -> None:
    print(f"  {what:18} {1e3 * statistics.median(times):8.1f} ms   (worst {1e3 * max(times):.1f})")


if __name__ == "__main__":
    main()
