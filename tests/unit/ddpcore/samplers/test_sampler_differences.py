"""Where our sampler differs from torch's and torchdata's: each row of the table in ddpcore/README.md, on all three."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DistributedSampler

import ddpcore
from ddpcore.errors import SamplerArgumentError, SamplerStateError
from ddpcore.samplers import ElasticDistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

torchdata = pytest.importorskip("torchdata.stateful_dataloader.sampler", reason="torchdata is not installed")

PAGE = Path(ddpcore.__file__).parent / "README.md"

Torch: Any = DistributedSampler
TorchData: Any = torchdata.StatefulDistributedSampler
Ours: Any = ElasticDistributedSampler

checks: dict[str, Callable[[], None]] = {}
"""By the first cell of the row."""


def row(first_cell: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def enter(check: Callable[[], None]) -> Callable[[], None]:
        checks[first_cell] = check
        return check

    return enter


def take(sampler: Any, num: int) -> list[int]:
    return [index for _, index in zip(range(num), sampler, strict=False)]


def loaded(make: Any, state: dict[str, Any], *, num: int = 40, world_size: int = 2, rank: int = 0) -> Any:
    sampler = make(range(num), world_size, rank)
    sampler.load_state_dict(state)
    return sampler


@row("permutation")
def _() -> None:
    def epoch_of(make: Any, seed: int, epoch: int) -> list[int]:
        sampler = make(range(1000), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    for theirs in (Torch, TorchData):
        assert epoch_of(theirs, 0, 1) == epoch_of(theirs, 1, 0)
        assert epoch_of(theirs, 0, 0) != epoch_of(Ours, 0, 0)
    pairs = [(seed, epoch) for seed in range(20) for epoch in range(20)]
    assert len({tuple(epoch_of(Ours, *pair)) for pair in pairs}) == len(pairs)


@row("epochs")
def _() -> None:
    for theirs in (Torch(range(40), 2, 0), TorchData(range(40), 2, 0)):
        assert list(theirs) == list(theirs)
        assert theirs.epoch == 0
    ours = Ours(range(40), 2, 0)
    passes = [list(ours) for _ in range(3)]
    assert all(one != other for one, other in pairwise(passes))
    assert ours.epoch == 2


@row("`drop_last` with fewer samples than ranks")
def _() -> None:
    for theirs in (Torch, TorchData):
        assert list(theirs(range(2), 3, 0, drop_last=True)) == []
    with pytest.raises(SamplerArgumentError):
        Ours(range(2), 3, 0, drop_last=True)


@row("an empty data set")
def _() -> None:
    for theirs in (Torch, TorchData):
        assert list(theirs(range(0), 1, 0)) == []
    with pytest.raises(SamplerArgumentError):
        Ours(range(0), 1, 0)


@row("a data set that has grown")
def _() -> None:
    for theirs in (Torch, TorchData):
        samples = list(range(10))
        sampler = theirs(samples, 2, 0)
        samples += [10, 11]
        with pytest.raises(AssertionError):
            list(sampler)
        cut = theirs(samples[:10], 2, 0, drop_last=True)
        cut.dataset += [10, 11]
        drawn = set()
        for epoch in range(20):
            cut.set_epoch(epoch)
            drawn |= set(cut)
        assert drawn == set(range(12))
    samples = list(range(10))
    ours = Ours(samples, 1, 0)
    samples += [10, 11]
    assert sorted(ours) == list(range(10))


@row("no process group, and no rank given")
def _() -> None:
    for theirs in (Torch, TorchData):
        with pytest.raises(ValueError, match="process group"):
            theirs(range(10))
    alone = Ours(range(10))
    assert (alone.rank, alone.num_replicas) == (0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "3")
        second = Ours(range(10))
    assert (second.rank, second.num_replicas) == (1, 3)


@row("negative seeds and epochs")
def _() -> None:
    for theirs in (Torch, TorchData):
        sampler = theirs(range(10), 1, 0, seed=-5)
        sampler.set_epoch(-1)
        assert sorted(sampler) == list(range(10))
    with pytest.raises(SamplerArgumentError):
        Ours(range(10), 1, 0, seed=-5)
    with pytest.raises(SamplerArgumentError):
        Ours(range(10), 1, 0).set_epoch(-1)


def stopped(make: Any, num_yielded: int, *, world_size: int) -> Any:
    sampler = make(range(40), world_size, 0)
    take(sampler, num_yielded)
    return sampler


@row("`len` after a state of another number of ranks")
def _() -> None:
    states = {make: stopped(make, 5, world_size=4).state_dict() for make in (TorchData, Ours)}
    assert len(loaded(TorchData, states[TorchData])) == 20
    # 20 of 40 samples are left, 10 for each; 10 count as yielded.
    ours = loaded(Ours, states[Ours], num=40)
    assert len(ours) == 20
    assert len(list(ours)) == 10
    uneven = Ours(range(41), 3, 0)
    take(uneven, 5)
    assert len(loaded(Ours, uneven.state_dict(), num=41)) == 7 + 13


@row("the state")
def _() -> None:
    theirs, ours = (stopped(make, 5, world_size=2) for make in (TorchData, Ours))
    assert theirs.state_dict() == {"yielded": 5}
    assert not hasattr(Torch(range(40), 2, 0), "state_dict")
    assert {"yielded", "epoch", "position", "order"} <= ours.state_dict().keys()
    assert list(loaded(TorchData, ours.state_dict())) == list(TorchData(range(40), 2, 0))[5:]
    assert list(loaded(Ours, theirs.state_dict())) == list(Ours(range(40), 2, 0))[5:]


@row("a state at another number of ranks")
def _() -> None:
    def seen_by(make: Any, *, before: int, after: int) -> list[int]:
        seen: list[int] = []
        for rank in range(before):
            seen += take(make(range(40), before, rank), 5)
        state = stopped(make, 5, world_size=before).state_dict()
        for rank in range(after):
            seen += list(loaded(make, state, world_size=after, rank=rank))
        return sorted(seen)

    assert len(seen_by(TorchData, before=4, after=2)) > 40
    assert len(set(seen_by(TorchData, before=2, after=4))) < 40
    for before, after in ((4, 2), (2, 4), (2, 1)):
        seen = seen_by(Ours, before=before, after=after)
        assert set(seen) == set(range(40))
        assert len(seen) - 40 < after


@row("a state of another data set or seed")
def _() -> None:
    state = stopped(TorchData, 5, world_size=2).state_dict()
    assert len(list(loaded(TorchData, state, num=60))) == 25
    with pytest.raises(SamplerStateError):
        loaded(Ours, stopped(Ours, 5, world_size=2).state_dict(), num=60)
    with pytest.raises(SamplerStateError):
        Ours(range(40), 2, 0, seed=1).load_state_dict(stopped(Ours, 5, world_size=2).state_dict())


@row("a state that has yielded more than there is")
def _() -> None:
    assert list(loaded(TorchData, {"yielded": 99})) == []
    with pytest.raises(SamplerStateError):
        loaded(Ours, {"yielded": 99})


@row("the state of a complete pass")
def _() -> None:
    assert list(loaded(TorchData, stopped(TorchData, 20, world_size=2).state_dict())) == []
    complete = Ours(range(40), 2, 0)
    first = list(complete)
    state = complete.state_dict()
    second = list(complete)
    assert first != second
    assert list(loaded(Ours, state)) == second
    asked = loaded(Ours, state)
    asked.set_epoch(0)
    assert list(asked) == []


@row("`set_epoch` to another epoch after a state")
def _() -> None:
    def resumed(make: Any, state: dict[str, Any]) -> list[int]:
        sampler = loaded(make, state)
        sampler.set_epoch(7)
        return list(sampler)

    whole = {make: make(range(40), 2, 0) for make in (TorchData, Ours)}
    for sampler in whole.values():
        sampler.set_epoch(7)
    theirs, ours = (list(whole[make]) for make in (TorchData, Ours))
    assert resumed(TorchData, {"yielded": 5}) == theirs[5:]
    assert resumed(Ours, stopped(Ours, 5, world_size=2).state_dict()) == ours
    assert resumed(Ours, {"yielded": 5}) == ours[5:]


@pytest.mark.parametrize("first_cell", checks)
def test_the_samplers_differ_as_the_page_says(first_cell: str) -> None:
    checks[first_cell]()


def test_each_row_of_the_page_has_its_check() -> None:
    table = PAGE.read_text().partition("<!-- sampler differences -->")[2].partition("<!-- /sampler differences -->")[0]

    assert re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) == list(checks)
