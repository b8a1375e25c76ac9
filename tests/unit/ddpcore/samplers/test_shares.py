"""Shares of a batch: what people will read when their numbers make no sense, and the cases from the literature."""

from __future__ import annotations

import pytest

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.shares import RankMemory, fit_memory, loss_factor, split, suggest_weights

GIB = 2**30


def test_eight_samples_with_a_fuller_first_device_fall_into_two_three_three() -> None:
    # The example of Balanced-DataParallel: three devices that hold three samples each, the first one only two.
    memory = [RankMemory(10 * GIB, 4 * GIB, 2.5 * GIB), *[RankMemory(10 * GIB, GIB, 2.5 * GIB)] * 2]

    weights = suggest_weights(memory, 8)

    assert weights == [2, 3, 3]
    assert split(8, weights) == [0, 2, 5, 8]


def test_as_long_as_it_fits_shares_are_even_and_the_fullest_rank_is_spared_the_remainder() -> None:
    memory = [RankMemory(80 * GIB, 30 * GIB, GIB), *[RankMemory(80 * GIB, 10 * GIB, GIB)] * 3]

    assert suggest_weights(memory, 34) == [8, 9, 9, 8]


def test_faster_ranks_get_more_as_far_as_memory_allows() -> None:
    memory = [RankMemory(24 * GIB, 4 * GIB, GIB), RankMemory(80 * GIB, 4 * GIB, GIB)]

    assert suggest_weights(memory, 40, speeds=[100.0, 300.0]) == [10, 30]
    assert suggest_weights(memory, 80, speeds=[100.0, 100.0]) == [18, 62]


def test_a_batch_that_does_not_fit_is_refused_with_how_much_does() -> None:
    with pytest.raises(
        SamplerArgumentError, match=r"20 does not fit: 12 samples do \(\[6, 6\] by rank\).* over 2 parts"
    ):
        suggest_weights([RankMemory(10, 3, 1.0)] * 2, 20)


def test_ranks_that_are_full_before_the_first_sample_get_none() -> None:
    assert suggest_weights([RankMemory(10, 12, 1.0), RankMemory(100, 1, 1.0)], 20) == [0, 20]
    with pytest.raises(SamplerArgumentError, match=r"0 samples do .* a smaller model"):
        suggest_weights([RankMemory(10, 12, 1.0)], 1)


def test_peaks_of_two_batch_sizes_give_the_line_between_them() -> None:
    assert fit_memory(80, (4, 18), (8, 26)) == RankMemory(capacity_bytes=80, fixed_bytes=10, bytes_per_sample=2.0)
    for smaller, larger in (((8, 26), (4, 18)), ((4, 26), (8, 18)), ((4, 18), (4, 18))):
        with pytest.raises(SamplerArgumentError, match="two different batch sizes, the smaller one first"):
            fit_memory(80, smaller, larger)
    with pytest.raises(SamplerArgumentError, match=r"smaller\[0\]=-1 makes no sense"):
        fit_memory(80, (-1, 18), (4, 20))


def test_uneven_shares_weigh_in_proportion_and_an_empty_one_not_at_all() -> None:
    assert [loss_factor(num, 24, 4) for num in (3, 5, 7, 9)] == [0.5, 20 / 24, 28 / 24, 1.5]
    assert loss_factor(0, 24, 4) == 0.0


@pytest.mark.parametrize("share", [(5, 4, 2), (-1, 4, 2), (0, 0, 2), (1, 1, 0)])
def test_a_share_that_is_none_has_no_factor(share: tuple[int, int, int]) -> None:
    with pytest.raises(SamplerArgumentError, match="is none"):
        loss_factor(*share)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_weights_that_share_nothing_out_are_refused(weights: list[int]) -> None:
    with pytest.raises(SamplerArgumentError, match="at least one above 0"):
        split(10, weights)


def test_weights_that_are_no_integers_are_refused_by_rank() -> None:
    with pytest.raises(SamplerArgumentError, match=r"weights\[1\]=0.5 is not an integer"):
        split(10, [1, 0.5])  # type: ignore[list-item]


def test_a_negative_number_of_samples_is_refused() -> None:
    with pytest.raises(SamplerArgumentError, match="num=-1 is negative"):
        split(-1, [1])


@pytest.mark.parametrize("numbers", [(0, 0, 1.0), (10, -1, 1.0), (10, 1, float("nan"))])
def test_memory_that_no_device_has_is_refused(numbers: tuple[int, int, float]) -> None:
    with pytest.raises(SamplerArgumentError, match=r"_bytes=0|_bytes=-1|bytes_per_sample=nan"):
        RankMemory(*numbers)


def test_what_is_no_memory_is_refused_by_rank() -> None:
    with pytest.raises(SamplerArgumentError, match=r"memory\[1\]=10 makes no sense"):
        suggest_weights([RankMemory(10, 1, 1.0), 10], 2)  # type: ignore[list-item] # that is the point


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], [1.0, float("inf")]])
def test_speeds_that_are_none_are_refused(speeds: list[float]) -> None:
    with pytest.raises(SamplerArgumentError, match="each of the 2 ranks"):
        suggest_weights([RankMemory(10, 1, 1.0)] * 2, 2, speeds=speeds)


def test_a_step_without_a_sample_is_refused() -> None:
    with pytest.raises(SamplerArgumentError, match="a sample at least"):
        suggest_weights([RankMemory(10, 1, 1.0)], 0)
