"""The node's latest report for Prometheus, on request and on loopback only: whoever may scrape is not asked who he is.

Names and units follow Prometheus' conventions: base units, `_total` for what only grows, states as one series each.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, StateSetMetricFamily
from prometheus_client.registry import Collector

from agent.errors import OperatorError
from agent.wire.jobs import JobState
from agent.wire.reports import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from agent.wire.reports import NodeReport


class MetricsServer:
    """Serves `/metrics` from a thread of its own, from `open` to `close`."""

    def __init__(self, address: str, latest_report: Callable[[], NodeReport | None]) -> None:
        """`latest_report` is called from the server's thread.

        Raises:
            OperatorError: The address is none of this machine's loopback.
        """
        self._host, self._port = _loopback(address)
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(latest_report))

    def open(self) -> int:
        """Listen, and return the port.

        Raises:
            OperatorError: The port is taken.
        """
        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise OperatorError(f"cannot serve metrics on {self._host}:{self._port}: {error.strerror}") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _NodeCollector(Collector):
    """Turns the latest report into metrics when it is asked for them."""

    def __init__(self, latest_report: Callable[[], NodeReport | None]) -> None:
        self._latest_report = latest_report

    def describe(self) -> list[Metric]:
        """Return nothing: what there is depends on the report."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the latest report."""
        report = self._latest_report()
        if report is None:
            return
        yield from _of_node(report)
        yield from _of_jobs(report)
        yield from _of_workers(report)


def _of_node(report: NodeReport) -> Iterator[Metric]:
    for name, value, help_text in (
        ("rankdeck_node_cpu_ratio", report.cpu_frac, "Busy share of all cores, 0 to 1."),
        ("rankdeck_node_memory_bytes", report.memory_total_bytes, "Memory of the node."),
        ("rankdeck_node_memory_available_bytes", report.memory_available_bytes, "Memory that programs can still get."),
        ("rankdeck_agent_resident_memory_bytes", report.agent_rss_bytes, "Resident memory of the agent."),
    ):
        yield GaugeMetricFamily(name, help_text, value)
    yield CounterMetricFamily("rankdeck_log_lines", "Lines that ranks have printed.", report.log_seq)
    yield CounterMetricFamily("rankdeck_malformed_reports", "Datagrams that were refused.", report.malformed_reports)


def _of_jobs(report: NodeReport) -> Iterator[Metric]:
    states = StateSetMetricFamily("rankdeck_job_state", "Where a job is on this node.", labels=["job"])
    attempts = GaugeMetricFamily("rankdeck_job_attempt", "The current attempt.", labels=["job"])
    restarts = CounterMetricFamily("rankdeck_job_restarts", "Attempts that the node began by itself.", labels=["job"])
    for job in report.jobs:
        states.add_metric([job.job_id], {state.value: state is job.state for state in JobState})
        attempts.add_metric([job.job_id], job.attempt)
        restarts.add_metric([job.job_id], job.num_restarts)
    yield from (states, attempts, restarts)


def _of_workers(report: NodeReport) -> Iterator[Metric]:
    labels = ["job", "rank"]
    states = StateSetMetricFamily("rankdeck_worker_process_state", "State by the kernel.", labels=labels)
    memory = GaugeMetricFamily("rankdeck_worker_resident_memory_bytes", "Resident memory of a rank.", labels=labels)
    cpu = CounterMetricFamily("rankdeck_worker_cpu_seconds", "CPU time of a rank's process.", labels=labels)
    steps = CounterMetricFamily("rankdeck_rank_steps", "Steps that this process has done.", labels=labels)
    step = GaugeMetricFamily("rankdeck_rank_step", "Number of the last step.", labels=labels)
    loss = GaugeMetricFamily("rankdeck_rank_loss", "The last loss.", labels=labels)
    waited = CounterMetricFamily("rankdeck_rank_waited_seconds", "Time spent waiting in collectives.", labels=labels)
    waiting = GaugeMetricFamily("rankdeck_rank_waiting_seconds", "How long the longest wait lasts.", labels=labels)
    age = GaugeMetricFamily("rankdeck_rank_report_age_seconds", "How old its last report is.", labels=labels)
    for worker in report.workers:
        names = [worker.job_id, str(worker.rank)]
        states.add_metric(names, {state.value: state is worker.process for state in ProcessState})
        memory.add_metric(names, worker.rss_bytes)
        cpu.add_metric(names, worker.cpu_s)
        rank = worker.report
        if rank is None:
            continue
        steps.add_metric(names, rank.steps_done)
        waited.add_metric(names, rank.waited_s)
        waiting.add_metric(names, max((group.waiting_s for group in rank.groups), default=0.0))
        age.add_metric(names, worker.report_age_s)
        if rank.step is not None:
            step.add_metric(names, rank.step)
        if rank.loss is not None:
            loss.add_metric(names, rank.loss)
    yield from (states, memory, cpu, steps, step, loss, waited, waiting, age)


def _loopback(address: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9400` or `[::1]:9400`.

    Raises:
        OperatorError: It is something else.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not port.isdigit() or int(port) > 65535:
        raise OperatorError(
            f"--metrics {address}: give a loopback address and a port, such as 127.0.0.1:9400; for scrapes from "
            "elsewhere put a proxy before it that asks who comes"
        )
    return host, int(port)
