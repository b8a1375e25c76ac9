"""Which replica a sampler is for, and how long its data set is: from where it stands, or refused with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.arguments import num_samples_of_dataset, resolve_replica

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unbounded(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_without_a_launcher_a_process_is_alone() -> None:
    assert resolve_replica(None, None) == (0, 1)


def test_torchrun_s_variables_say_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert resolve_replica(None, None) == (2, 4)
    assert resolve_replica(1, None) == (1, 4)
    assert resolve_replica(None, 3) == (2, 3)


def test_the_process_group_comes_before_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert resolve_replica(None, None) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "world_size"), [("2", None), (None, "4"), ("two", "4"), ("", "4")])
def test_half_of_a_launcher_s_variables_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            monkeypatch.setenv(name, value)

    with pytest.raises(SamplerArgumentError, match="start with torchrun, which sets both"):
        resolve_replica(None, None)


@pytest.mark.parametrize(
    ("rank", "num_replicas", "message"),
    [
        (3, 3, "Invalid rank 3 for 3 replicas, which count from 0 to 2"),
        (-1, 3, "Invalid rank -1"),
        (2, None, "Invalid rank 2 for 1 replicas"),
        (0, 0, "num_replicas=0: there is one at least"),
        (1.0, 3, "rank=1.0 is not an integer"),
        (0, "2", "num_replicas='2' is not an integer"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(rank: int, num_replicas: int | None, message: str) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        resolve_replica(rank, num_replicas)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "the data set has 0 samples"),
        (Stream(), "Stream is an IterableDataset, which no sampler can order"),
        (Unbounded(), "Unbounded has no length"),
        (iter([1]), "list_iterator has no length"),
        (None, "NoneType has no length"),
    ],
)
def test_a_data_set_without_a_length_is_refused(dataset: object, message: str) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        num_samples_of_dataset(dataset)


def test_anything_with_a_length_is_a_data_set() -> None:
    assert num_samples_of_dataset(range(5)) == 5
