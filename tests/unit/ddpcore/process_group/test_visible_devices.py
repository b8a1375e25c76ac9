"""CUDA_VISIBLE_DEVICES, followed to the machine's GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.process_group.visible_devices import PhysicalGpu, VisibleGpu, visible_gpus

GPUS = [
    PhysicalGpu(0, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "H200"),
    PhysicalGpu(1, "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6", "H200"),
    PhysicalGpu(2, "GPU-11112222-d72c-4106-c12f-20bd9faed9f6", "H200", ("MIG-aaaa1111-0", "MIG-aaaa2222-0")),
]


def seen(variable: str | None, order: str | None = None) -> list[int]:
    return [visible.gpu.index for visible in visible_gpus(variable, GPUS, order)]


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0,2", [0, 2]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("1", [1]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        ("0,3,1", [0]),
        ("0,,1", [0]),
        ("0,x,1", [0]),
        ("1gpu2,2ampere", [1, 2]),
        ("+1", [1]),
        ("+", []),
        ("0,0", []),
        ("1,0,1", []),
        ("GPU-1111", [2]),
        ("GPU-11112222-d72c-4106-c12f-20bd9faed9f6,GPU-8932f", [2, 0]),
        ("GPU-8932", []),
        ("GPU-1111,GPU-8932,GPU-8932f", [2]),
        ("GPU-1111,0", [2]),
        ("GPU-1111,GPU-11112", []),
        ("GPU-ffff", []),
        ("0,GPU-1111", [0]),
    ],
)
def test_what_the_variable_says(variable: str | None, indices: list[int]) -> None:
    assert seen(variable) == indices


def test_a_full_uuid_is_never_ambiguous() -> None:
    gpus = [PhysicalGpu(0, "GPU-1"), PhysicalGpu(1, "GPU-12")]

    assert [visible.uuid for visible in visible_gpus("GPU-1", gpus)] == ["GPU-1"]


@pytest.mark.parametrize("variable", ["MIG-aaaa2", "MIG-aaaa2222-0,MIG-aaaa1111-0", "MIG-aaaa2222-0,7"])
def test_of_mig_instances_a_program_sees_the_first(variable: str) -> None:
    (visible,) = visible_gpus(variable, GPUS)

    assert visible == VisibleGpu(GPUS[2], "MIG-aaaa2222-0")
    assert visible.uuid == "MIG-aaaa2222-0"


def test_an_unknown_mig_instance_is_none() -> None:
    assert visible_gpus("MIG-bbbb", GPUS) == []


def test_numbers_by_speed_are_only_known_where_all_are_alike() -> None:
    mixed = [*GPUS, PhysicalGpu(3, "GPU-3", "T4")]

    with pytest.raises(LookupError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus("0", mixed)
    with pytest.raises(LookupError):
        visible_gpus(None, mixed, "FASTEST_FIRST")
    assert [visible.gpu.index for visible in visible_gpus("3", mixed, "PCI_BUS_ID")] == [3]
    assert [visible.gpu.index for visible in visible_gpus("GPU-3", mixed)] == [3]


@given(st.lists(st.integers(0, 7), unique=True), st.integers(1, 8))
def test_any_list_of_distinct_numbers_is_followed_up_to_the_first_that_is_not_there(
    numbers: list[int], num_gpus: int
) -> None:
    gpus = [PhysicalGpu(index, f"GPU-{index}") for index in range(num_gpus)]
    expected = []
    for number in numbers:
        if number >= num_gpus:
            break
        expected.append(number)

    assert [visible.gpu.index for visible in visible_gpus(",".join(map(str, numbers)), gpus)] == expected


@given(st.text(max_size=40))
def test_whatever_stands_there_each_gpu_is_seen_once_at_most(variable: str) -> None:
    found = visible_gpus(variable, GPUS)

    assert len(set(found)) == len(found)
