"""Consoles that stand still, whose terminal closes or shrinks, or that have few descriptors: rows 31, 32 and 34."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.relay import MAX_FRAMES_ASKED
from agent.wire.reports import decode_node_report
from app.fleet.report_reader import ReportReader
from tests.support.desk import Desk, named
from tests.support.fault_rows import measure
from tests.support.hosts import Network, require_hosts
from tests.support.ranks import still_runs
from tests.support.waiting import until
from tests.support.watch import SSHD, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.codec import MalformedMessageError
    from agent.wire.relay import Merged

pytestmark = pytest.mark.timeout(400)

WAIT_S = 90.0
STALL_STEPS = 300
"""Steps that ranks make in fifteen seconds."""
HOSTS = ("h1", "h2")
FILES_OF_TWO_HOSTS = 40


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network(*HOSTS, sshd_options=SSHD) as network:
        yield network


@pytest.fixture
def desk(network: Network) -> Iterator[Desk]:
    desk = Desk(network)
    yield desk
    desk.end()


@pytest.mark.slow
@pytest.mark.fault(row=[31, 32])
async def test_a_console_that_was_stopped_shows_the_latest_paints_twenty_by_five_and_ends_with_its_terminal(
    network: Network, desk: Desk
) -> None:
    async with watched(network) as watch:

        def steps() -> int:
            return min(watch.job.steps().values())

        def live_with_a_terminal() -> None:
            terminal = desk.terminal("one", "attach", *named(*HOSTS))
            terminal.until_it_shows("2 ranks training", WAIT_S)
            (console,) = psutil.Process(int(terminal.tmux("display-message", "-p", "#{pane_pid}"))).children()
            console.send_signal(signal.SIGSTOP)
            stopped_at = steps()
            until(lambda: steps() > stopped_at + STALL_STEPS, WAIT_S, "ranks go on")
            console.send_signal(signal.SIGCONT)
            shown = terminal.until_it_shows("training, step ", WAIT_S)
            with measure(31, "latest state after a stop"):
                until(lambda: shown_step(terminal.text()) > stopped_at + STALL_STEPS, WAIT_S, "the latest is shown")
            assert "Traceback" not in shown

            terminal.tmux("resize-window", "-x", "20", "-y", "5")
            until(lambda: len(terminal.text().splitlines()) <= 5, WAIT_S, "it is small")
            terminal.tmux("resize-window", "-x", "120", "-y", "35")
            terminal.until_it_shows("2 ranks training", WAIT_S)
            with measure(32, "console gone after its terminal"):
                terminal.tmux("kill-server")
                until(lambda: not still_runs(console), WAIT_S, "it ends")

        await watch.do(live_with_a_terminal)
        await watch.until_green()


def shown_step(text: str) -> int:
    words = text.partition("training, step ")[2].replace(",", " ").split()
    return int(words[0]) if words and words[0].isdigit() else 0


@pytest.mark.fault(row=31)
async def test_a_reader_that_stood_still_takes_up_with_the_latest_report(network: Network) -> None:
    may_go_on = threading.Event()
    came: list[tuple[str, int]] = []

    def take(node: str, merged: Merged, _way_s: float) -> None:
        may_go_on.wait(WAIT_S)
        came.extend((node, decode_node_report(report.frame).report_seq) for report in merged.reports)

    def malformed(_node: str, error: MalformedMessageError) -> None:
        raise error

    async with watched(network) as watch:

        def seq_of(node: str) -> int:
            report = watch.session._cluster.nodes[node].report
            return 0 if report is None else report.report_seq

        reader = ReportReader({host: watch.links[host].directory / REPORTS_SOCKET for host in HOSTS}, take, malformed)
        reader.start()
        try:
            before = seq_of("h1")
            await watch.until(lambda: seq_of("h1") > before + 50, WAIT_S, "ten seconds go by")
            stalled = {host: seq_of(host) for host in HOSTS}
            may_go_on.set()

            def is_up_to_date() -> bool:
                return all(any(node == host and seq >= stalled[host] for node, seq in list(came)) for host in HOSTS)

            with measure(31, "latest report after a reader's stop"):
                await watch.until(is_up_to_date, WAIT_S, "the latest comes")
        finally:
            may_go_on.set()
            await watch.do(reader.close)
        for host in HOSTS:
            backlog = [seq for node, seq in came if node == host and seq < stalled[host]]
            assert len(backlog) <= 2 * MAX_FRAMES_ASKED, "old reports were kept for it"


@pytest.mark.slow
@pytest.mark.fault(row=34)
@pytest.mark.parametrize("limit", [16, 24, 40, 256])
async def test_a_console_with_few_descriptors_says_so_and_never_breaks(
    network: Network, desk: Desk, limit: int
) -> None:
    async with watched(network) as watch:

        def look() -> subprocess.CompletedProcess[str]:
            script = f'ulimit -n {limit}; exec "$@"'
            argv = ["bash", "-c", script, "-", *desk.argv("status", *named(*HOSTS))]
            env = {**os.environ, **desk.environment}
            return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)

        with measure(34, "told", f"console, {limit} descriptors"):
            done = await watch.do(look)
        assert "Traceback" not in done.stderr
        if limit < FILES_OF_TWO_HOSTS:
            assert done.returncode == 2
            assert f"at most {limit} open files are allowed here, and 2 hosts need 40 (ulimit -n 280" in done.stderr
        else:
            assert done.returncode in ({0, 10} if limit == 256 else {0, 1, 3, 4, 10}), done.stderr
            assert done.returncode in {0, 10} or done.stderr.strip()
