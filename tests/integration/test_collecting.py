"""gather, reduce and predict on real gloo ranks: everything once, in order, the same on all; mistakes are named."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.errors import EngineUseError
from ddpcore.nested import named_leaves
from ddpcore.samplers import EvaluationSampler
from tests.support.waiting import until
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


INT4 = torch.zeros(2, dtype=torch.uint8).view(torch.int4)  # type: ignore[attr-defined] # torch's types lack it


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Figures:
    score: Any


def tree_of(rank: int) -> dict[str, Any]:
    """A tree whose rows count up over the ranks; rank r brings r rows."""
    start = rank * (rank - 1) // 2
    rows = torch.arange(start, start + rank)
    return {
        "half": rows.to(torch.bfloat16),
        "many": [rows.reshape(-1, 1, 1).expand(-1, 2, 3).double(), {"odd": rows % 2 == 1}],
        "named": Pair(rows.to(torch.int8), Figures(rows.to(torch.complex64))),
        "one": torch.tensor(float(rank), requires_grad=True),
        "number": rank,
        "mixed": 0 if rank else 0.5,
    }


def gather_trees() -> dict[str, Any]:
    with ddpcore.Engine() as engine:
        gathered = engine.gather(tree_of(engine.placement.rank))
        assert isinstance(gathered["named"], Pair)
        assert isinstance(gathered["named"].right, Figures)
        return dict(named_leaves(gathered))


@pytest.mark.parametrize("world_size", [1, 4])
def test_uneven_trees_are_put_one_behind_the_other(world_size: int) -> None:
    rows = torch.arange(world_size * (world_size - 1) // 2)
    for gathered in run_ranks(gather_trees, world_size, has_group=False):
        assert torch.equal(gathered["['half']"], rows.to(torch.bfloat16))
        assert torch.equal(gathered["['many'][0]"], rows.reshape(-1, 1, 1).expand(-1, 2, 3).double())
        assert torch.equal(gathered["['many'][1]['odd']"], rows % 2 == 1)
        assert torch.equal(gathered["['named'].left"], rows.to(torch.int8))
        assert torch.equal(gathered["['named'].right.score"], rows.to(torch.complex64))
        assert torch.equal(gathered["['one']"], torch.arange(float(world_size)))
        assert not gathered["['one']"].requires_grad
        assert torch.equal(gathered["['number']"], torch.arange(world_size))
        assert torch.equal(gathered["['mixed']"], torch.tensor([0.5, *[0.0] * (world_size - 1)], dtype=torch.float64))


def reduce_trees() -> dict[str, Any]:
    with ddpcore.Engine() as engine:
        rank = engine.placement.rank
        tree = {
            "whole": torch.tensor([rank, 100], dtype=torch.int8),
            "half": torch.tensor([0.1, 256.0 + rank], dtype=torch.bfloat16),
            "flag": torch.tensor([rank == 1, True]),
            "count": rank,
            "total": 0 if rank else 0.25,
            "nan": math.nan if rank == 1 else 1.0,
        }
        reduced: dict[str, Any] = {op: engine.reduce(tree, op) for op in ("sum", "mean", "min", "max")}
        reduced["complex"] = engine.reduce(torch.tensor([1j, rank + 0j], dtype=torch.complex64))
        reduced["number"] = engine.reduce(rank)
        reduced["empty"] = engine.reduce(torch.empty(0, 3), "max")
        return reduced


def test_what_lies_in_memory_in_another_way_is_what_it_stands_for() -> None:
    with ddpcore.Engine() as engine:
        conjugate = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128).conj()
        for tensor in (conjugate, conjugate.imag, conjugate.real, torch.eye(3)[:, 1]):
            assert torch.equal(engine.gather(tensor), tensor)
            assert torch.equal(engine.reduce(tensor), tensor)


def test_a_mean_of_whole_numbers_keeps_their_digits() -> None:
    with ddpcore.Engine() as engine:
        mean = engine.reduce(torch.tensor([100_000_001, 3]), "mean")
    assert (mean.dtype, mean.tolist()) == (torch.float64, [100_000_001.0, 3.0])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor([2**63 + 5], dtype=torch.uint64), "uint64, which int64 does not hold"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        (torch.empty(2, dtype=torch.bits8), "bits8, which torch cannot compute with"),
        (INT4, "int4, which torch cannot compute with"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2, which torch cannot compute with"),
    ],
)
def test_tensors_that_cannot_be_reduced_are_refused(tensor: Tensor, words: str) -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match=words):
        engine.reduce({"a": tensor}, "max")


def nested(depth: int) -> Any:
    tree: Any = torch.ones(1)
    for _ in range(depth):
        tree = [tree]
    return tree


def test_trees_are_nested_up_to_100_deep() -> None:
    with ddpcore.Engine() as engine:
        assert engine.gather(nested(100)) == nested(100)
        for depth in (101, 900):
            with pytest.raises(EngineUseError, match="the value is nested more than 100 deep, or holds itself"):
                engine.gather(nested(depth))


def test_trees_are_reduced_element_by_element() -> None:
    for reduced in run_ranks(reduce_trees, 3, has_group=False):
        assert reduced["sum"]["whole"].tolist() == [3, 300]
        assert reduced["mean"]["whole"].tolist() == [1.0, 100.0]
        assert (reduced["min"]["whole"].tolist(), reduced["min"]["whole"].dtype) == ([0, 100], torch.int8)
        assert reduced["max"]["whole"].tolist() == [2, 100]
        assert reduced["mean"]["half"].dtype == torch.bfloat16
        assert reduced["sum"]["flag"].tolist() == [1, 3]
        assert reduced["max"]["flag"].tolist() == [True, True]
        assert reduced["min"]["flag"].tolist() == [False, True]
        assert (reduced["sum"]["count"], reduced["mean"]["count"]) == (3, 1.0)
        assert isinstance(reduced["sum"]["count"], int)
        assert (reduced["sum"]["total"], reduced["max"]["total"], reduced["min"]["total"]) == (0.25, 0.25, 0.0)
        assert all(math.isnan(reduced[op]["nan"]) for op in ("sum", "mean", "min", "max"))
        assert reduced["complex"].tolist() == [3j, 3 + 0j]
        assert reduced["number"] == 3
        assert reduced["empty"].shape == (0, 3)


# ---- a measure of the whole data set


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Return the share of pairs of a positive and a negative sample that the scores order rightly."""
    right = (scores[labels == 1][:, None] > scores[labels == 0][None, :]).double()
    return float(right.mean())


def labelled(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) + torch.randn(num_samples, generator=generator) > 0).long())


def predict_all(num_samples: int) -> tuple[dict[str, Tensor], bool]:
    data = labelled(num_samples)
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)))
        predicted = engine.predict(
            model, data, lambda module, batch: {"scores": module(batch[0])[:, 0], "labels": batch[1]}, batch_size=3
        )
        return predicted, model.training


@pytest.mark.parametrize("num_samples", [2, 29])
def test_each_sample_is_predicted_once_and_in_order(num_samples: int) -> None:
    """With two samples, two of four ranks have none: their stand-ins do not count."""
    (alone, _), *_ = run_ranks(predict_all, 1, num_samples, has_group=False)
    for predicted, is_training in run_ranks(predict_all, 4, num_samples, has_group=False):
        assert torch.equal(predicted["labels"], labelled(num_samples).tensors[1])
        torch.testing.assert_close(predicted["scores"], alone["scores"])
        assert len(predicted["scores"]) == num_samples
        assert is_training
        if num_samples > 2:
            assert area_under_curve(**predicted) == pytest.approx(area_under_curve(**alone))


def perplexity_of_a_loop() -> float:
    """Without `predict`: sums over uneven shares in a loop of one's own."""
    total, count = 0.0, 0
    with ddpcore.Engine() as engine:
        for index in EvaluationSampler(range(5)):
            total, count = total + math.log(index + 1), count + 1
        sums = engine.reduce({"total": total, "count": count})
        return math.exp(sums["total"] / sums["count"])


def test_a_perplexity_is_a_quotient_of_two_sums() -> None:
    assert run_ranks(perplexity_of_a_loop, 3, has_group=False) == [pytest.approx(math.factorial(5) ** 0.2)] * 3


# ---- mistakes

DIFFER = "MetricMismatchError: engine.gather: the ranks do not bring the same: "


def give_up(engine: ddpcore.Engine) -> None:
    try:
        engine.gather(1.0)
    finally:
        Path("has given up").touch()


def come_too_late() -> None:
    until(Path("has given up").exists, 60, "the other rank gives up")


def collect_badly(how: str) -> None:
    with ddpcore.Engine(timeout_s=8.0 if how == "did not come" else 60.0) as engine:
        rank, is_odd = engine.placement.rank, engine.placement.rank == 1
        calls: dict[str, Callable[[], Any]] = {
            "dtype": lambda: engine.gather({"a": torch.ones(rank + 1).to(torch.float64 if is_odd else torch.float32)}),
            "bare": lambda: engine.gather(torch.ones(1) if is_odd else torch.tensor(1)),
            "shape": lambda: engine.gather({"a": torch.ones(3, 4 if is_odd else 5)}),
            "names": lambda: engine.gather({"b" if is_odd else "a": 1.0}),
            "text": lambda: engine.gather({"a": [1.0, "text" if is_odd else 2.0]}),
            "whole of 4 bits": lambda: engine.gather({"a": INT4}),
            "deep": lambda: engine.gather(nested(900 if is_odd else 1)),
            "sparse": lambda: engine.gather(torch.eye(2).to_sparse()),
            "rows": lambda: engine.reduce([torch.ones(rank + 1)]),
            "overflow": lambda: engine.reduce({"a": torch.tensor([2**62 + 1])}, "mean"),
            "op": lambda: engine.reduce(1.0, "max" if is_odd else "min"),
            "no op": lambda: engine.reduce(1.0, "median"),  # type: ignore[arg-type] # that is the point
            "nothing": lambda: engine.gather([]),
            "other call": lambda: engine.reduce(1.0) if is_odd else engine.gather(1.0),
            "did not come": lambda: come_too_late() if is_odd else give_up(engine),
            "dead": lambda: os.kill(os.getpid(), signal.SIGKILL) if is_odd else engine.gather(1.0),
            "in evaluation": lambda: engine.evaluate(
                nn.Linear(1, 1),
                TensorDataset(torch.ones(4, 1)),
                lambda _, batch: {"a": engine.gather(batch[0][:, 0])},
                batch_size=1,
            ),
            "no rows": lambda: engine.predict(
                nn.Linear(1, 1), TensorDataset(torch.ones(4, 1)), lambda _, batch: batch[0].mean(), batch_size=1
            ),
        }
        calls[how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "dtype",
            DIFFER + "['a'] is float32 of shape (any) on rank 0, float64 of shape (any) on rank 1",
        ),
        (
            "shape",
            DIFFER + "['a'] is float32 of shape (any, 5) on rank 0, float32 of shape (any, 4) on rank 1",
        ),
        ("bare", DIFFER + "the value is int64 of shape () on rank 0, float32 of shape (any) on rank 1"),
        ("names", DIFFER + "['a'] is "),
        (
            "text",
            "EngineUseError: engine.gather: rank 1: the value at ['a'][1] is of type str: give tensors or numbers",
        ),
        ("whole of 4 bits", "EngineUseError: engine.gather: the value at ['a'] is of torch.int4, which torch cannot"),
        ("deep", "EngineUseError: engine.gather: rank 1: the value is nested more than 100 deep, or holds itself"),
        ("sparse", "EngineUseError: engine.gather: the value is a torch.sparse_coo tensor"),
        ("rows", DIFFER.replace("gather", "reduce") + "[0] is float32 of shape (1,)"),
        (
            "overflow",
            "EngineUseError: engine.reduce: the value at ['a'] is so large that int64 may not hold the sum of 2",
        ),
        (
            "op",
            DIFFER.replace("gather", "reduce") + "op is min on rank 0, max on rank 1",
        ),
        ("no op", "EngineUseError: op='median' makes no sense"),
        ("nothing", "EngineUseError: engine.gather: there is nothing in it"),
        ("in evaluation", "EngineUseError: engine.gather in a function that each rank calls for its own batches"),
        ("no rows", "EngineUseError: function returned something of shape () for 1 samples"),
    ],
)
def test_what_does_not_fit_is_one_error_on_every_rank(how: str, message: str) -> None:
    outcomes = try_ranks(collect_badly, 2, how, has_group=False)
    assert [outcome.error[: len(message)] for outcome in outcomes] == [message] * 2


@pytest.mark.parametrize(
    ("how", "name", "words"),
    [
        ("other call", "BarrierDeadlockError", "rank 1 waits in its 1st call of exchange 'engine.reduce'"),
        ("did not come", "BarrierTimeoutError", "rank 1 did not reach exchange 'engine.gather' in 8 s"),
        ("dead", "BarrierDeadlockError", "rank 1 has died, last seen at "),
    ],
)
def test_a_rank_that_does_not_come_is_named(how: str, name: str, words: str) -> None:
    outcome = try_ranks(collect_badly, 2, how, has_group=False)[0]
    assert outcome.error.startswith(f"{name}: "), outcome.error
    assert words in outcome.error
