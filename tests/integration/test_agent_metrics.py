"""What Prometheus gets of a real agent, and who may listen."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.wire.commands import Accepted, Prepare, PullHistory, Tier
from agent.wire.commands import History as PastReports
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def scrape(port: int) -> dict[str, float]:
    """Return every sample by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        " ".join([sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_an_agent_serves_its_newest_report_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with RunningAgent("--metrics", "127.0.0.1:0") as agent:
        port = agent.ready["metrics_port"]
        spec = make_local_spec(tmp_path)
        assert isinstance(agent.ask(Prepare(spec)), Accepted)

        metrics = until(lambda: found if "rankdeck_job_attempt job=train" in (found := scrape(port)) else None, 10, "")

        assert metrics is not None
        state = "rankdeck_job_state job=train rankdeck_job_state="
        assert metrics[f"{state}prepared"] == 1.0
        assert metrics[f"{state}running"] == 0.0
        assert metrics["rankdeck_job_restarts_total job=train"] == 0.0
        assert metrics["rankdeck_node_memory_bytes"] > metrics["rankdeck_node_memory_available_bytes"] > 2**20
        assert 0.0 <= metrics["rankdeck_node_cpu_ratio"] <= 1.0


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "9400", "localhost", "10.0.0.1:9400", "127.0.0.1:99999"])
def test_no_other_address_is_served(tmp_path: Path, address: str) -> None:
    done = run_agent_verb("serve", "--dir", str(tmp_path / "agent"), "--metrics", address)

    assert done.returncode == 2
    assert f"--metrics {address}: give a loopback address and a port" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_prometheus_the_extra_to_install_is_said(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; from agent.cli import main; "
        f"sys.argv = ['agent', 'serve', '--dir', {str(tmp_path / 'agent')!r}, '--metrics', '127.0.0.1:0']; main()"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert done.stderr == "agent: prometheus_client is missing: install rankdeck[metrics]\n"


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_agent_verb("serve", "--dir", str(tmp_path / "agent"), "--metrics", f"127.0.0.1:{port}")

    assert done.returncode == 2
    assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_the_past_is_there_for_whoever_attaches_later() -> None:
    with RunningAgent() as first:
        first.wait_until(lambda report: report.report_seq > 3, 20, "some reports")
        first.process.kill()
        first.process.wait()
        with RunningAgent(directory=first.directory) as second:

            def look() -> PastReports | None:
                reply = second.ask(PullHistory(Tier.RECENT))
                assert isinstance(reply, PastReports)
                return reply if len({past.report.epoch for past in reply.reports}) == 2 else None

            past = until(look, 20, "the past of both agents")

    assert past is not None
    assert [one.seq for one in past.reports] == list(range(1, len(past.reports) + 1))
    ages = [one.age_s for one in past.reports]
    assert ages == sorted(ages, reverse=True)
    assert past.reports[0].report.epoch == first.ready["epoch"]
