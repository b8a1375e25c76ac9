"""How long a job over several hosts takes to begin and to end, by what we do: its ranks only wait.

Run as root where namespaces are: `python -m tests.bench.bench_rollout [NUM_HOSTS]...`

Each host is a network namespace with an sshd and an agent of its own, all on this machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.fleet.agent_link import AgentLink, LinkGroup
from app.fleet.host_link import Access, HostLink
from app.session.control import has_ended
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from tests.support.hosts import Network, why_no_hosts
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USUAL = (4, 16)
WAITS = "import signal\nsignal.sigwait({signal.SIGUSR1})\n"
JOB = "wait"


def main() -> None:
    """Print the figures."""
    if reason := why_no_hosts():
        sys.exit(reason)
    for num_hosts in map(int, sys.argv[1:]) if len(sys.argv) > 1 else USUAL:
        with Network(*(f"h{index}" for index in range(num_hosts))) as network:
            print(f"{num_hosts} hosts")
            (network.directory / "wait.py").write_text(WAITS)
            measure(network)


def measure(network: Network) -> None:
    """Bring agents up, begin and end a job, and bring the agents down."""
    with reached(network, "agents up", AgentLink.bring_up) as group:
        request = RunRequest(("wait.py",), JOB, num_ranks=1, workdir=str(network.directory), is_probed=False)
        asyncio.run(begin_and_end(RemoteSession(these(*group.links), request)))
    with reached(network, "agents down", lambda link: link.shut_down(kill_jobs=True)):
        pass


@contextmanager
def reached(network: Network, what: str, then: Callable[[AgentLink], object]) -> Iterator[LinkGroup]:
    """Go to all hosts, do something there, and lend the links."""
    with LinkGroup() as group:
        for name in network.hosts:
            group.add(HostLink(Access(name, sys.executable, str(network.ssh_config))))
        with timed(what):
            failures = [error for _, error in group.connect(then) if error is not None]
        if failures:
            sys.exit(f"{len(failures)} hosts failed: {failures[0]}")
        yield group


async def begin_and_end(session: RemoteSession) -> None:
    try:
        with timed("roads, prepare and commit everywhere"):
            await session.start()
        with timed("until every rank has been started"):
            await until_async(lambda: has_started(session), 300, "all ranks run")
        with timed("kill, until it has ended everywhere"):
            await session.job_control.kill(JOB)
            while not has_ended(await session.job_control.statuses(JOB)):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
    finally:
        await session.close()


def has_started(session: RemoteSession) -> bool:
    rows = session.view().ranks()
    return bool(rows) and all(row.pid is not None for row in rows)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    began_s = time.perf_counter()
    yield
    print(f"  {what}: {time.perf_counter() - began_s:.2f} s")


if __name__ == "__main__":
    main()
