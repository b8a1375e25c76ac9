"""What /proc tells of a process on a GPU, and whom it does not believe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agent.machine.gpu_processes import GpuProcesses
from agent.node_state.gpu_sample import GpuProcess

if TYPE_CHECKING:
    from pathlib import Path

INITIAL = "pid:[4026531836]"


class FakeProc:
    """A /proc of files."""

    def __init__(self, path: Path, namespace: str) -> None:
        self.path = path
        (path / "self/ns").mkdir(parents=True)
        (path / "self/ns/pid").symlink_to(namespace)

    def add(
        self,
        pid: int,
        parent: int,
        environ: bytes = b"",
        status: str = "",
        device: str = "/dev/null",
        start: str = "",
    ) -> None:
        directory = self.path / str(pid)
        (directory / "fd").mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} (a) b) (c) S {parent} 1 1 0{' 0' * 14} {start}")
        (directory / "environ").write_bytes(environ)
        (directory / "status").write_text(f"Name:\tpython\n{status}\n")
        (directory / "fd/3").symlink_to(device)


def test_a_rank_in_a_container_is_told_whole(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path, INITIAL)
    ours = b"RANK=3\0RANKDECK_JOB_ID=gpt\0RANKDECK_INBOX=/run/inbox\0"
    cuda = b"CUDA_VISIBLE_DEVICES=2,3\0CUDA_DEVICE_ORDER=PCI_BUS_ID\0odd\0"
    proc.add(900, 800, ours + cuda, "NSpid:\t900\t12\t5")
    proc.add(800, 700)
    proc.add(700, 1)

    assert GpuProcesses("/run/inbox", str(tmp_path)).describe(900, 5, "MIG-1") == GpuProcess(
        pid=900,
        used_bytes=5,
        mig_uuid="MIG-1",
        ancestors=[800, 700],
        inner_pids=[12, 5],
        job_id="gpt",
        rank=3,
        visible_devices="2,3",
        device_order="PCI_BUS_ID",
        name="a) b) (c",
    )


def test_a_process_that_is_gone_is_only_a_pid(tmp_path: Path) -> None:
    FakeProc(tmp_path, INITIAL)

    assert GpuProcesses("/run/inbox", str(tmp_path)).describe(900, None, "") == GpuProcess(900)


def test_a_rank_of_another_agent_s_job_of_the_same_name_is_none_of_ours(tmp_path: Path) -> None:
    environ = b"RANK=0\0RANKDECK_JOB_ID=job\0RANKDECK_INBOX=/other/inbox\0CUDA_VISIBLE_DEVICES=1"
    FakeProc(tmp_path, INITIAL).add(900, 1, environ)

    described = GpuProcesses("/run/inbox", str(tmp_path)).describe(900, None, "")

    assert described == GpuProcess(900, visible_devices="1", name="a) b) (c")


def test_a_process_outside_containers_has_no_inner_pids(tmp_path: Path) -> None:
    FakeProc(tmp_path, INITIAL).add(900, 900, b"RANK=x\0", "NSpid:\t900")

    described = GpuProcesses("", str(tmp_path)).describe(900, None, "")

    assert (described.inner_pids, described.rank, described.visible_devices) == ([], None, None)


@pytest.mark.parametrize(("device", "is_believed"), [("/dev/null", False), ("/dev/nvidia0", True)])
def test_in_a_container_only_a_process_with_the_driver_open_is_believed(
    tmp_path: Path, device: str, *, is_believed: bool
) -> None:
    FakeProc(tmp_path, "pid:[4026532000]").add(12, 1, b"RANK=0\0RANKDECK_INBOX=/i\0", device=device)

    processes = GpuProcesses("/i", str(tmp_path))

    assert (processes.describe(12, None, "").rank == 0) is is_believed
    assert processes.describe(13, None, "") == GpuProcess(13)


def test_this_process_has_its_parent_for_an_ancestor() -> None:
    assert os.getppid() in GpuProcesses("").describe(os.getpid(), None, "").ancestors or os.getppid() <= 1


def test_an_environment_is_read_once_while_nvml_names_the_process_and_its_parents_each_time(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path, INITIAL)
    proc.add(900, 800, b"CUDA_VISIBLE_DEVICES=1", start="5000")
    processes = GpuProcesses("", str(tmp_path))

    def seen() -> tuple[str | None, list[int]]:
        processes.begin_sample()
        found = processes.describe(900, None, "")
        return found.visible_devices, found.ancestors

    assert seen() == ("1", [800])
    (tmp_path / "900/environ").write_bytes(b"CUDA_VISIBLE_DEVICES=2")
    (tmp_path / "900/stat").write_text(f"900 (a) S 700 1 1 0{' 0' * 14} 5000")
    assert seen() == ("1", [700])
    processes.begin_sample()  # a sample in which it holds no GPU: it may have become another program
    assert seen() == ("2", [700])
    (tmp_path / "900/environ").write_bytes(b"CUDA_VISIBLE_DEVICES=3")
    (tmp_path / "900/stat").write_text(f"900 (b) S 1 1 1 0{' 0' * 14} 5001")
    assert seen() == ("3", []), "another process of the same pid"
