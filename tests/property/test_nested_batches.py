"""Any batch that a collate function makes can be mapped, counted and cut, and its parts put together are the batch."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from ddpcore.errors import UnsplittableBatchError
from ddpcore.nested import map_tensors, num_samples_of, split_samples, split_sizes


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    label: Any


class Tokens(UserDict[str, Any]):
    """Like a tokenizer's batch: a mapping with an attribute of its own."""

    def __init__(self, data: dict[str, Any], vocabulary: str) -> None:
        super().__init__(data)
        self.vocabulary = vocabulary


class Boxed(MutableMapping[str, Any]):
    """A mapping around a dict, of which copy.copy makes one around the same dict."""

    name = "none"

    def __init__(self, **items: Any) -> None:
        self.box = items

    def __getitem__(self, key: str) -> Any:
        return self.box[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.box[key] = value

    def __delitem__(self, key: str) -> None:
        del self.box[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.box)

    def __len__(self) -> int:
        return len(self.box)


class Sharing(Boxed):
    """One that does so by itself."""

    def __copy__(self) -> Sharing:
        other = Sharing()
        other.box = self.box
        return other


class Texts(list[Any]):
    """A list with an attribute of its own."""

    language = "en"


def leaves(num_samples: int) -> st.SearchStrategy[Any]:
    cut = [
        st.builds(lambda shape: torch.rand(num_samples, *shape), st.lists(st.integers(0, 3), max_size=2)),
        st.builds(lambda: torch.arange(num_samples)),
        st.builds(lambda: np.arange(num_samples)),
    ]
    if num_samples:
        cut.append(st.builds(lambda: [f"text {index}" for index in range(num_samples)]))
        cut.append(st.builds(lambda: tuple(f"text {index}" for index in range(num_samples))))
    whole = [st.builds(lambda: torch.tensor(3.5)), st.integers(), st.text(max_size=3), st.none(), st.just([])]
    return st.one_of(*cut, *whole)


def branches(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # A list of strings within a list of strings would be a list of samples in itself.
    return st.one_of(
        st.dictionaries(st.sampled_from("abc"), children, max_size=3),
        st.dictionaries(st.sampled_from("abc"), children, max_size=3).map(OrderedDict),
        st.builds(lambda child: [child, torch.tensor(0)], children),
        st.builds(lambda child: (child, torch.tensor(0)), children),
        st.builds(Pair, children, children),
        st.builds(Sample, children, children),
        st.builds(Frozen, children, children),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int]:
    num_samples = draw(st.integers(0, 9))
    tree = draw(st.recursive(leaves(num_samples), branches, max_leaves=6))
    return {"tree": tree, "x": torch.arange(num_samples)}, num_samples


def joined(parts: list[Any]) -> Any:
    """Put parts together again, by the rules of the module's docstring."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, dict):
        return type(first)((key, joined([part[key] for part in parts])) for key in first)
    if isinstance(first, Pair):
        return Pair(*(joined([part[field] for part in parts]) for field in range(2)))
    if isinstance(first, Sample | Frozen):
        return type(first)(*(joined([getattr(part, name) for part in parts]) for name in ("image", "label")))
    if isinstance(first, list | tuple):
        if first and all(isinstance(item, str) for item in first):
            return type(first)(item for part in parts for item in part)
        return type(first)(joined(list(items)) for items in zip(*parts, strict=True))
    return first


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, Sample | Frozen):
        assert_equal([left.image, left.label], [right.image, right.label])
    else:
        assert left == right


@given(batches(), st.integers(1, 12))
def test_parts_put_together_are_the_batch(batch: tuple[Any, int], num_parts: int) -> None:
    tree, num_samples = batch

    parts = split_samples(tree, num_parts)

    sizes = [num_samples_of(part) for part in parts]
    assert num_samples_of(tree) == num_samples == sum(sizes)
    assert len(parts) == max(1, min(num_parts, num_samples))
    assert max(sizes) - min(sizes) <= 1
    assert num_samples == 0 or min(sizes) > 0
    assert_equal(joined(parts), tree)


@given(batches(), st.data())
def test_a_batch_is_cut_into_the_asked_sizes_even_empty_ones(batch: tuple[Any, int], data: st.DataObject) -> None:
    tree, num_samples = batch
    cuts = sorted(data.draw(st.lists(st.integers(0, num_samples), max_size=4)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, num_samples], strict=True)]

    parts = split_sizes(tree, sizes)

    assert [num_samples_of(part) for part in parts] == sizes
    assert torch.equal(torch.cat([part["x"] for part in parts]), tree["x"])


@given(batches())
def test_mapping_keeps_the_tree_and_leaves_the_given_one_alone(batch: tuple[Any, int]) -> None:
    tree, _ = batch
    before = copy.deepcopy(tree)

    assert_equal(map_tensors(torch.clone, tree), tree)
    doubled = map_tensors(lambda tensor: tensor * 2, tree)

    assert_equal(tree, before)
    assert_equal(map_tensors(lambda tensor: tensor / 2, doubled)["x"], tree["x"].float())


def test_what_collate_makes_of_samples_with_texts_is_cut_sample_by_sample() -> None:
    samples = [{"image": torch.full((2, 2), index), "name": f"n{index}", "size": (index, 7)} for index in range(5)]

    parts = split_samples(default_collate(samples), 2)

    assert [part["name"] for part in parts] == [["n0", "n1"], ["n2", "n3", "n4"]]
    assert [part["size"][0].tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    assert parts[1]["image"][:, 0, 0].tolist() == [2, 3, 4]


def test_further_attributes_of_a_branch_survive() -> None:
    texts = Texts(["a", "b", "c", "d"])
    texts.language = "fr"
    counts: defaultdict[str, Any] = defaultdict(list, x=torch.arange(4))
    tree: list[Any] = [Tokens({"ids": torch.arange(4)}, "bytes"), texts, counts, MappingProxyType({"y": torch.ones(4)})]

    for result in (map_tensors(torch.clone, tree), split_samples(tree, 2)[0]):
        tokens, words, numbers, frozen = result
        assert (type(tokens), tokens.vocabulary) == (Tokens, "bytes")
        assert (type(words), words.language) == (Texts, "fr")
        assert numbers["absent"] == []
        assert type(frozen) is MappingProxyType
    assert "absent" not in counts


def test_a_mapping_that_wraps_a_dict_is_cut_and_stays_as_it_is() -> None:
    tree = Boxed(fixed=torch.tensor(1), x=torch.arange(6), inner=Boxed(y=torch.arange(6)))
    tree.name = "train"

    parts = split_samples(tree, 3)
    doubled = map_tensors(lambda tensor: tensor * 2, tree)

    assert [part["x"].tolist() for part in parts] == [part["inner"]["y"].tolist() for part in parts]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert doubled["inner"]["y"].tolist() == [0, 2, 4, 6, 8, 10]
    assert tree["x"].tolist() == tree["inner"]["y"].tolist() == list(range(6))
    assert {type(part).__name__ + part.name for part in (*parts, doubled)} == {"Boxedtrain"}


def test_a_mapping_whose_copy_is_not_its_own_is_refused_unchanged() -> None:
    tree = Sharing(fixed=3, x=torch.arange(6))

    for change in (lambda: split_samples(tree, 2), lambda: map_tensors(torch.clone, tree)):
        with pytest.raises(UnsplittableBatchError, match="a Sharing shares its items with what copy"):
            change()
        assert tree["x"].tolist() == list(range(6))


def test_parts_are_views() -> None:
    x = torch.zeros(4, 2)

    split_samples({"x": x}, 2)[1]["x"][:] = 1

    assert x.sum() == 4


def test_a_packed_sequence_is_mapped_but_its_batch_sizes_stay() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])

    doubled = map_tensors(lambda tensor: tensor * 2, {"packed": packed})["packed"]

    assert doubled.data.tolist() == [2.0] * 5
    assert doubled.batch_sizes is packed.batch_sizes
    with pytest.raises(UnsplittableBatchError, match=r"batch\['packed'\] is a PackedSequence"):
        split_samples({"packed": packed}, 2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"x": torch.ones(4), "y": [torch.ones(3)]}, r"batch\['y'\]\[0\] has 3 samples and batch\['x'\] has 4"),
        (Sample(torch.ones(4), ["a", "b"]), r"batch\.label has 2 samples and batch\.image has 4"),
        (Pair(torch.ones(2), (480, 640, 3)), r"batch\.right has 3 samples and batch\.left has 2"),
        ({"loss": torch.tensor(1.0), "name": "a"}, "batch has no samples to count"),
        (torch.tensor(1.0), "batch has no samples to count"),
        ([], "batch has no samples to count"),
    ],
)
def test_a_batch_that_cannot_be_counted_is_named(tree: Any, message: str) -> None:
    with pytest.raises(UnsplittableBatchError, match=message):
        num_samples_of(tree)
    with pytest.raises(UnsplittableBatchError, match=message):
        split_samples(tree, 2)


def test_an_empty_batch_is_one_empty_part() -> None:
    assert [part.shape for part in split_samples(torch.ones(0, 3), 4)] == [(0, 3)]


def test_sizes_that_do_not_fit_are_refused() -> None:
    for sizes in ([1, 2], [5, -1], []):
        with pytest.raises(UnsplittableBatchError, match="4 samples and cannot be split into"):
            split_sizes(torch.ones(4), sizes)
    with pytest.raises(UnsplittableBatchError, match="at least 1 part"):
        split_samples(torch.ones(4), 0)


def test_lists_go_whole_to_every_part_where_asked() -> None:
    parts = split_sizes({"x": torch.ones(3), "size": (480, 640)}, [1, 2], are_lists_cut=False)

    assert [part["size"] for part in parts] == [(480, 640)] * 2
