"""The split of a batch over one process's devices: all samples, device 0 spared, the others even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.parallel.balanced import balanced_sizes

NUM_SAMPLES = st.integers(0, 200)
NUM_DEVICES = st.integers(1, 9)
FIRST = st.integers(0, 60)
STEPS = st.integers(1, 5)


@given(NUM_SAMPLES, NUM_DEVICES, st.none() | FIRST, STEPS)
def test_every_sample_goes_to_one_device_and_the_others_share_evenly(
    num_samples: int, num_devices: int, first: int | None, steps: int
) -> None:
    sizes = balanced_sizes(num_samples, num_devices, first, steps)

    assert len(sizes) == num_devices
    assert sum(sizes) == num_samples
    assert min(sizes) >= 0
    others = sizes[1:] or [0]
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True)


@given(NUM_SAMPLES, st.integers(2, 9), FIRST, STEPS)
def test_device_0_takes_what_is_asked_and_never_more_than_evenly(
    num_samples: int, num_devices: int, first: int, steps: int
) -> None:
    sizes = balanced_sizes(num_samples, num_devices, first, steps)
    even = balanced_sizes(num_samples, num_devices)

    assert sizes[0] == min(first // steps, even[0])
    if first // steps >= even[0]:
        assert sizes == even
    else:
        assert max(sizes) >= max(even)


@given(NUM_SAMPLES, NUM_DEVICES)
def test_the_even_split_is_even(num_samples: int, num_devices: int) -> None:
    sizes = balanced_sizes(num_samples, num_devices)

    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes)


@given(NUM_SAMPLES, st.integers(2, 9), FIRST)
def test_where_the_original_balances_the_split_is_the_original_s(
    num_samples: int, num_devices: int, first: int
) -> None:
    unit = (num_samples - first) // (num_devices - 1)
    if first >= unit:
        return
    original = [first] + [unit] * (num_devices - 1)
    for index in range(num_samples - sum(original)):
        original[index + 1] += 1

    assert balanced_sizes(num_samples, num_devices, first) == original


def test_the_worked_example() -> None:
    assert balanced_sizes(8, 3, first_device_batch=2) == [2, 3, 3]
    assert balanced_sizes(8, 3, first_device_batch=4, accumulation_steps=2) == [2, 3, 3]
    assert balanced_sizes(16, 3, first_device_batch=4) == [4, 6, 6]


def test_zero_leaves_device_0_for_gathering_alone() -> None:
    assert balanced_sizes(8, 3, first_device_batch=0) == [0, 4, 4]
    assert balanced_sizes(7, 4, first_device_batch=0) == [0, 3, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ((-1, 2, 0, 1), "num_samples is -1"),
        ((4, 0, 0, 1), "num_devices is 0"),
        ((4, 2, -2, 1), "first_device_batch is -2"),
        ((4, 2, 2, 0), "accumulation_steps is 0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: tuple[int, int, int, int], lines: str) -> None:
    with pytest.raises(ValueError, match=lines):
        balanced_sizes(*arguments)
