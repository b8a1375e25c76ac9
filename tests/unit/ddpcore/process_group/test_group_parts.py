"""The parts of opening and closing that touch torch, against a group of one rank and fakes of what needs a GPU."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ddpcore import placement
from ddpcore.errors import TorchFaultError
from ddpcore.placement import ALONE, Placement, current_placement
from ddpcore.process_group import closing, open_group
from ddpcore.process_group.closing import GroupLinks, close_group
from ddpcore.process_group.equality import check_equal_everywhere, rank_facts
from ddpcore.process_group.machine import check_version, comes_to_rest, device_facts, gpu_identity
from ddpcore.process_group.open_group import open_process_group
from ddpcore.process_group.rendezvous_spec import read_rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.device("cuda", 0)


@pytest.fixture
def lone_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def links_of(*backends: str, device: torch.device | None = None) -> GroupLinks:
    return GroupLinks(0, 1, device or torch.device("cpu"), frozenset(backends), None)


def told(calls: list[str], call: str, *, answer: bool) -> bool:
    calls.append(call)
    return answer


def test_a_busy_device_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    is_done = threading.Event()
    asked: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        is_done.wait(20)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    assert not comes_to_rest(CUDA, 0.05)
    is_done.set()
    assert comes_to_rest(CUDA, 5)
    assert asked == [CUDA, CUDA]
    assert comes_to_rest(torch.device("cpu"), 0)


def test_nccl_with_a_collective_that_never_ends_is_aborted_instead_of_destroyed(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(closing, "comes_to_rest", lambda device, _: told(calls, f"rest {device}", answer=False))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))

    close_group(links_of("nccl", device=CUDA), has_failed=False, timeout_s=5)

    assert calls == ["rest cuda:0", "abort"]
    assert "cuda:0 is still busy" in caplog.text


@pytest.mark.parametrize(("has_failed", "expected"), [(False, ["rest", "destroy"]), (True, ["abort"])])
def test_nccl_is_destroyed_when_it_is_at_rest_and_aborted_after_an_error(
    has_failed: bool, expected: list[str], lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(closing, "comes_to_rest", lambda *_: told(calls, "rest", answer=True))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))

    close_group(links_of("nccl", device=CUDA), has_failed=has_failed, timeout_s=5)

    assert calls == expected
    monkeypatch.undo()


def test_a_destruction_that_hangs_is_left_behind(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_done = threading.Event()
    kept: list[dist.ProcessGroup] = []
    monkeypatch.setattr(closing, "DESTROY_S", 0.05)
    monkeypatch.setattr(closing, "_keep_for_ever", kept.extend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: is_done.wait(20))

    close_group(links_of("gloo"), has_failed=False, timeout_s=5)

    is_done.set()
    assert kept == [lone_group]
    assert "torch has not destroyed its process group in 0.05 s" in caplog.text
    monkeypatch.undo()


def test_what_torch_says_against_being_destroyed_is_only_told(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(dist, "destroy_process_group", fail)

    close_group(links_of("gloo"), has_failed=False, timeout_s=5)

    assert "destroying the process group: no such luck" in caplog.text
    monkeypatch.undo()


def test_a_placement_is_remembered_with_its_group_and_no_longer(lone_group: dist.ProcessGroup) -> None:
    mine = Placement(0, 1, 0, 1, 7)
    placement.remember(mine)
    assert current_placement() == mine

    dist.destroy_process_group()
    assert current_placement() == ALONE
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert current_placement() == Placement(0, 1, 0, 1, 0)
    placement.forget()
    placement.remember(mine)
    placement.forget()
    assert current_placement() == Placement(0, 1, 0, 1, 0)


def test_in_a_group_of_the_program_s_own_the_launcher_s_word_counts(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("GROUP_RANK", "3")

    assert current_placement() == Placement(0, 1, 0, 1, 3)


def test_facts_about_devices_are_torch_s_own() -> None:
    facts = device_facts({"CUDA_VISIBLE_DEVICES": "0,1"})

    assert facts.torch_version == torch.__version__
    assert "gloo" in facts.backends
    assert facts.backend_of_type["cuda"] == "nccl"
    assert facts.visible_variable == "0,1"
    assert bool(facts.accelerator) == torch.accelerator.is_available()


def test_only_a_gpu_has_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "8932f937-d72c-4106-c12f-20bd9faed9f6"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert gpu_identity(torch.device("cpu")) == ""
    assert gpu_identity(CUDA) == "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111,MIG-2222")
    assert gpu_identity(CUDA) == "MIG-1111"


def test_a_faulty_torch_is_refused_or_worked_around(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "TORCH_NCCL_USE_COMM_NONBLOCKING"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "__version__", "1.12.0+cu116")
    with pytest.raises(TorchFaultError, match=r"torch 1.12.0\+cu116 has a known fault"):
        check_version(("gloo",), has_cuda=False)

    monkeypatch.setattr(torch, "__version__", "2.7.0+cu128")
    check_version(("nccl",), has_cuda=True)

    assert os.environ[name] == "0"
    assert "torch 2.7.0+cu128 has a known fault" in caplog.text


def test_facts_to_compare_name_program_versions_and_what_changes_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--local-rank=3", "--lr", "0.1", "x" * 3000])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    environ = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_ALGO": "Ring"}

    facts = rank_facts({"gloo"}, environ)

    assert facts.strict["torch"] == torch.__version__.partition("+")[0]
    assert facts.strict["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "NCCL_ALGO" not in facts.strict
    assert re.fullmatch(r"test_group_parts\.py \([0-9a-f]+\)", facts.strict["the program"])
    assert facts.soft["the command line"].startswith("--lr 0.1 xxx")
    assert len(facts.soft["the command line"]) < 2100


def test_alone_everything_is_equal() -> None:
    check_equal_everywhere({"data set": "1000 samples"})


def test_a_group_of_a_process_alone_needs_no_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with open_process_group(device="cpu") as group:
        assert group.placement == ALONE
        assert not dist.is_initialized()
    group.close()


@pytest.mark.parametrize("what", ["typed", "a task on a terminal", "a task's child without one", "torchrun"])
def test_what_is_typed_into_a_shell_of_srun_is_none_of_its_tasks(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The other tasks' shells ended at once, having no terminal: nobody would come.
    of_step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
    own_pid = os.getpid() if what == "a task on a terminal" else 1
    for name, value in (of_step | {"SLURM_STEP_NODELIST": "h[1-2]", "SLURM_TASK_PID": str(own_pid)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    if what == "torchrun":
        monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "isatty", lambda _: what != "a task's child without one")

    spec = read_rendezvous(None, None, None, {**open_group._environment()} | {"WORLD_SIZE": "", "RANK": ""})

    if what == "typed":
        assert spec is None
        assert "one rank: this shell is one of the 4 tasks" in caplog.text
    else:
        assert spec is not None
        assert (spec.rank, spec.world_size) == (0, 4)
        assert not caplog.text
