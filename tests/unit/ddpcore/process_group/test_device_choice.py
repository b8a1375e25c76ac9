"""Which device and backend a rank takes."""

from __future__ import annotations

import pytest

from ddpcore.errors import BackendMissingError, ContradictoryLaunchError
from ddpcore.process_group.choices import (
    DeviceChoice,
    DeviceFacts,
    backend_names,
    choose_backend,
    choose_device,
    choose_type,
)

KNOWN = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


def cpu_only(variable: str | None = None, version: str = "2.13.0+cpu") -> DeviceFacts:
    return DeviceFacts(version, frozenset({"gloo"}), KNOWN, visible_variable=variable)


def with_gpus(num_devices: int, variable: str | None = None) -> DeviceFacts:
    return DeviceFacts("2.13.0+cu128", frozenset({"gloo", "nccl"}), KNOWN, "cuda", num_devices, variable)


@pytest.mark.parametrize(
    ("asked", "backend", "facts", "kind"),
    [
        (None, None, cpu_only(), "cpu"),
        (None, "gloo", cpu_only(), "cpu"),
        ("cpu", None, with_gpus(2), "cpu"),
        ("cpu", "cpu:gloo,cuda:nccl", with_gpus(2), "cpu"),
        (None, None, with_gpus(2), "cuda"),
        (None, "nccl", with_gpus(2), "cuda"),
        (None, "gloo", with_gpus(2), "cpu"),
        (None, "cpu:gloo,cuda:nccl", with_gpus(2), "cuda"),
        ("cuda", "gloo", with_gpus(2), "cuda"),
        ("cuda:1", None, with_gpus(2), "cuda"),
    ],
)
def test_the_accelerator_is_taken_where_there_is_one(
    asked: str | None, backend: str | None, facts: DeviceFacts, kind: str
) -> None:
    assert choose_type(asked, backend, facts) == kind


@pytest.mark.parametrize(
    ("asked", "backend", "facts", "words"),
    [
        ("cuda", None, cpu_only(), r"this process sees no GPU \(torch 2.13.0\+cpu\): install a CUDA build"),
        (None, "nccl", cpu_only("0", "2.13.0+cu128"), "sees no GPU, with CUDA_VISIBLE_DEVICES='0'"),
        ("cuda", None, cpu_only("0"), "install a CUDA build of torch"),
        ("xpu", None, with_gpus(2), "xpu is asked for, but this process sees cuda: give device='cuda'"),
        ("xpu", None, cpu_only(), "this process sees no accelerator: give device='cpu'"),
        ("cuda", None, DeviceFacts("2.13.0", frozenset({"gloo"}), KNOWN, "xpu", 1), "this process sees xpu"),
    ],
)
def test_a_device_that_is_not_seen_is_said_so(
    asked: str | None, backend: str | None, facts: DeviceFacts, words: str
) -> None:
    with pytest.raises(BackendMissingError, match=words):
        choose_type(asked, backend, facts)


def test_nccl_is_not_for_the_cpu() -> None:
    with pytest.raises(ContradictoryLaunchError, match="backend nccl is for GPUs"):
        choose_type("cpu", "nccl", with_gpus(2))


@pytest.mark.parametrize(
    ("asked", "local", "facts", "device"),
    [
        (None, (1, 2), with_gpus(2), "cuda:1"),
        (None, (1, 2), with_gpus(8), "cuda:1"),
        ("cuda", (3, 4), with_gpus(4), "cuda:3"),
        ("cuda:1", (0, 1), with_gpus(2), "cuda:1"),
        (None, (0, 8), with_gpus(1, "3"), "cuda:0"),
        (None, (5, 8), with_gpus(1, "5"), "cuda:0"),
    ],
)
def test_the_local_rank_s_device_or_the_only_one(
    asked: str | None, local: tuple[int, int], facts: DeviceFacts, device: str
) -> None:
    assert str(choose_device(asked, "cuda", *local, facts)) == device


def test_the_cpu_has_no_index() -> None:
    assert choose_device(None, "cpu", 3, 4, with_gpus(2)) == DeviceChoice("cpu")
    assert str(DeviceChoice("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("asked", "local", "facts", "words"),
    [
        (None, (0, 4), with_gpus(2), "4 ranks on this machine, but this process sees 2 cuda devices"),
        (None, (3, 4), with_gpus(2, "0,2"), r"sees 2 \(CUDA_VISIBLE_DEVICES='0,2'\) cuda devices"),
        (None, (1, 2), with_gpus(1), "2 ranks on this machine, but this process sees 1 cuda devices"),
        ("cuda:2", (0, 1), with_gpus(2), "device cuda:2 is asked for, but this process sees 2"),
    ],
)
def test_more_ranks_than_devices_are_refused(
    asked: str | None, local: tuple[int, int], facts: DeviceFacts, words: str
) -> None:
    with pytest.raises(ContradictoryLaunchError, match=words):
        choose_device(asked, "cuda", *local, facts)


@pytest.mark.parametrize(
    ("asked", "kind", "backend"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "cpu:gloo,cuda:nccl"),
        ("NCCL", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_both_backends_serve_where_both_kinds_of_tensors_are(asked: str | None, kind: str, backend: str) -> None:
    assert choose_backend(asked, kind, with_gpus(2)) == backend


def test_without_gloo_the_accelerator_s_backend_serves_alone() -> None:
    facts = DeviceFacts("2.13.0", frozenset({"nccl"}), KNOWN, "cuda", 2)

    assert choose_backend(None, "cuda", facts) == "nccl"


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ("mpi", "cpu", r"backend 'mpi' is not in torch 2.13.0\+cpu: torch's wheels come without it"),
        ("nccl", "cuda", "built without NCCL"),
        ("cpu:gloo,cuda:nccl", "cpu", "backend 'nccl' is not in torch"),
        ("smoke", "cpu", "it has gloo"),
        (None, "hpu", "knows no backend for hpu"),
    ],
)
def test_a_backend_that_is_not_there_is_named_with_how_to_get_it(asked: str | None, kind: str, words: str) -> None:
    with pytest.raises(BackendMissingError, match=words):
        choose_backend(asked, kind, cpu_only())


def test_backends_are_told_from_their_devices() -> None:
    assert backend_names("cpu:gloo,cuda:nccl") == {"gloo", "nccl"}
    assert backend_names("GLOO") == {"gloo"}
    assert backend_names(None) == set()
