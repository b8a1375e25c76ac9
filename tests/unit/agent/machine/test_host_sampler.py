"""The machine's own figures, on whatever machine this is."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from agent.machine.host import HostSampler
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_second_look_has_rates_and_the_disk(tmp_path: Path) -> None:
    sampler = HostSampler(tmp_path)
    try:
        first = sampler.sample().host
        host = until(lambda: (found := sampler.sample().host).disk_free_bytes is not None and found, 30, "the disk")
    finally:
        sampler.close()

    assert (first.nic_rx_bytes_hz, first.nic_tx_bytes_hz) == (None, None)
    assert host
    assert host.nic_rx_bytes_hz is not None
    assert host.nic_rx_bytes_hz >= 0
    assert host.disk_total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert host.shm_total_bytes == shutil.disk_usage("/dev/shm").total
    assert host.swap_total_bytes is not None
    assert host.load_1min is not None


def test_a_directory_that_is_gone_has_no_disk(tmp_path: Path) -> None:
    sampler = HostSampler(tmp_path / "gone")
    try:
        assert sampler.sample().host.disk_free_bytes is None
        assert sampler.sample().memory_total_bytes > 0
    finally:
        sampler.close()
