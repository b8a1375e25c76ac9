"""An agent and its GPU sampler: hung, dead, lying, absent; and which rank is on which GPU of a real job."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from agent.machine import sampler_care
from agent.node_state.gpu_sample import SAMPLE_MARK, SAMPLE_VERSION, GpuSample, encode_sample
from agent.processes.leftovers import sweep
from agent.wire.machine import GpuWatchState
from ddpcore.wire_launch import INBOX_SOCKET
from tests.support.agents import RunningAgent
from tests.support.gpu_samplers import PATIENCE_S, Ward, is_watching
from tests.support.jobs import make_local_spec
from tests.support.nvml_recordings import DRIVER_NOT_LOADED, GIB, Replay, a100, recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.reports import NodeReport


def replayed(monkeypatch: pytest.MonkeyPatch, path: Path, content: dict[str, Any]) -> Replay:
    """Let every sampler that is started from now on replay a recording."""
    replay = Replay(path / "nvml.json", content)
    for name in ("PYTHONPATH", "NVML_RECORDING"):
        monkeypatch.setenv(name, replay.environ()[name])
    return replay


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    ward = Ward(tmp_path)
    yield ward
    ward.close()


def test_a_sampler_that_hangs_in_nvml_is_replaced_and_hurts_nobody(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_care, "SILENT_S", 1.5)
    monkeypatch.setattr(sampler_care, "HUNG_S", 3.0)
    monkeypatch.setattr(sampler_care, "FIRST_PAUSE_S", 0.1)
    replay = replayed(monkeypatch, tmp_path, recording(a100(0)))
    ward.wait_until(is_watching, "the first sample")
    (first,) = ward.watch.pids

    replay.content["devices"][0]["nvmlDeviceGetPowerUsage"] = {"hang": True}
    replay.write()
    hanging = ward.wait_until(lambda gpus: gpus.state is GpuWatchState.SILENT, "the silence")
    assert "NVML has not answered" in hanging.detail
    assert hanging.gpus[0].figures.power_watts == 318.412, "old figures are kept, with their age"
    assert hanging.age_s > 1.0

    replay.content["devices"][0]["nvmlDeviceGetPowerUsage"] = 300_000
    replay.write()
    ward.wait_until(
        lambda gpus: is_watching(gpus) and gpus.gpus[0].figures.power_watts == 300, "a new sampler's figures"
    )
    ward.wait_until(lambda _: first not in ward.watch.pids, "the first one's end")


def test_a_sampler_that_dies_is_replaced_and_said_to_have_died(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_care, "FIRST_PAUSE_S", 1.0)
    replayed(monkeypatch, tmp_path, recording(a100(0)))
    ward.wait_until(is_watching, "the first sample")
    (first,) = ward.watch.pids

    os.kill(first, signal.SIGSEGV)
    dead = ward.wait_until(lambda gpus: gpus.state is GpuWatchState.SILENT, "its death")
    assert "was killed by signal 11" in dead.detail
    ward.wait_until(is_watching, "another one")
    assert first not in ward.watch.pids


def test_where_there_is_no_driver_the_reason_is_told_and_no_process_is_left(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed(monkeypatch, tmp_path, recording(nvmlInit={"error": DRIVER_NOT_LOADED}))

    absent = ward.wait_until(lambda gpus: gpus.state is GpuWatchState.ABSENT, "the reason")
    assert (absent.detail, absent.gpus) == ("the NVIDIA driver is not loaded", [])
    ward.wait_until(lambda _: not ward.watch.pids, "the sampler's end")
    assert ward.gpus().state is GpuWatchState.ABSENT
    ward.watch.close()
    assert not ward.log.exists()


def test_a_sampler_that_cannot_be_started_is_a_reason_too(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    assert "cannot be started: No such file" in ward.wait_until(lambda gpus: gpus.detail, "the reason").detail


def test_a_sample_that_no_sampler_of_ours_sent_changes_nothing(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed(monkeypatch, tmp_path, recording(a100(0)))
    ward.wait_until(is_watching, "the first sample")

    ward.watch.receive(GpuSample(SAMPLE_VERSION, os.getpid(), "it is all over"))

    assert is_watching(ward.gpus())


def test_a_sweep_of_leftovers_spares_the_sampler(ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch, tmp_path, recording(a100(0)))
    ward.wait_until(is_watching, "the first sample")
    others = {child.pid for child in psutil.Process().children()} - ward.watch.pids

    assert not sweep(str(tmp_path / "inbox"), others | ward.watch.pids, owns_all_below=True)
    assert is_watching(ward.gpus())


def test_garbage_in_the_inbox_is_counted_and_a_strangers_sample_dropped() -> None:
    with RunningAgent("--private") as agent, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for datagram in (
            SAMPLE_MARK,
            SAMPLE_MARK + b"\x91" * 1000,
            encode_sample(GpuSample(SAMPLE_VERSION, 1, "lies")),
        ):
            stranger.sendto(datagram, str(agent.directory / INBOX_SOCKET))
        report = agent.wait_until(lambda report: report.malformed_reports == 2, 10, "two refusals")
        assert report.gpus.detail != "lies"


PROGRAM = "import time\nwhile True: time.sleep(1)\n"


@pytest.mark.ranks
def test_ranks_are_found_on_their_gpus_and_where_they_should_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = replayed(monkeypatch, tmp_path, recording(a100(0), a100(1)))
    (tmp_path / "train.py").write_text(PROGRAM)
    spec = make_local_spec(tmp_path)
    with RunningAgent("--private") as agent:
        agent.start_job(spec)
        running = agent.wait_until(lambda report: len(report.workers) == 2, 60, "the workers")
        pids = [worker.pid for worker in running.workers]
        on = [{"pid": pid, "usedGpuMemory": GIB} for pid in pids]
        replay.content["devices"] = [a100(0, on), a100(1, on[1:])]
        replay.write()

        def is_seen(report: NodeReport) -> bool:
            return any(holder.is_foreign for gpu in report.gpus.gpus for holder in gpu.holders)

        first, second = agent.wait_until(is_seen, PATIENCE_S, "the foreign context").gpus.gpus
        assert [owner.rank for owner in (*first.owners, *second.owners)] == [0, 1]
        assert [holder.pid for holder in first.holders if holder.is_foreign] == [pids[1]]
        assert not any(holder.is_foreign for holder in second.holders)
        weighed = agent.wait_until(
            lambda report: all(worker.pss_bytes for worker in report.workers), PATIENCE_S, "every worker's PSS"
        )
        assert all((worker.pss_bytes or 0) <= worker.rss_bytes * 1.1 for worker in weighed.workers)
