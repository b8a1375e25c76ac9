"""When calls are over by gloo's rules (as run with torch 2.13 on four ranks), and by NCCL's."""

from __future__ import annotations

import pytest

from tests.corpus.generator.exchange import Exchange, Operation
from tests.corpus.generator.program import Collective, Semantics, Transfer

EVERYBODY = range(4)


def _over_for(op: str, missing: int, root: int = -1) -> set[int]:
    exchange = Exchange(Semantics.GLOO, {}, 4)
    calls = {rank: Collective(op, 1, "main", 1000, root=root) for rank in EVERYBODY if rank != missing}
    operation = _call(exchange, calls)
    return {rank for rank in EVERYBODY if operation.is_done(rank, 2.0)}


def _call(exchange: Exchange, calls: dict[int, Collective]) -> Operation:
    operations = [exchange.called(rank, 1, call) for rank, call in calls.items()]
    for rank, operation in zip(calls, operations, strict=True):
        exchange.came(rank, operation, 1.0)
    return operations[0]


@pytest.mark.parametrize(
    ("op", "missing", "over"),
    [
        ("broadcast", 1, {2}),
        ("broadcast", 3, {0, 2}),
        ("broadcast", 0, set()),
        ("reduce", 1, set()),
        ("reduce", 3, set()),
        ("gather", 1, {2, 3}),
        ("gather", 0, set()),
        ("scatter", 1, {2, 3}),
        ("scatter", 3, {1, 2}),
        ("all_reduce", 3, set()),
        ("barrier", 0, set()),
    ],
)
def test_where_one_never_calls_gloo_is_through_for_some(op: str, missing: int, over: set[int]) -> None:
    root = 0 if op in ("broadcast", "reduce", "gather", "scatter") else -1
    assert _over_for(op, missing, root) == over


def test_whoever_receives_more_than_it_asked_for_aborts() -> None:
    exchange = Exchange(Semantics.GLOO, {}, 3)
    sizes = enumerate((1000, 2000, 1000))
    operation = _call(exchange, {rank: Collective("all_reduce", 1, "main", elements) for rank, elements in sizes})
    assert operation.aborted == {2}
    assert not operation.done_s


def test_different_operations_at_one_place_do_not_meet() -> None:
    for semantics in Semantics:
        exchange = Exchange(semantics, {}, 2)
        ops = enumerate(("all_reduce", "barrier"))
        operation = _call(exchange, {rank: Collective(op, 1, "main") for rank, op in ops})
        assert not operation.done_s


def test_a_send_is_over_when_its_receiver_has_asked() -> None:
    exchange = Exchange(Semantics.GLOO, {}, 2)
    sent = exchange.transferred(0, Transfer(is_send=True, peer=1, line=1, function="main"))
    exchange.came(0, sent, 1.0)
    assert not sent.is_done(0, 5.0)
    received = exchange.transferred(1, Transfer(is_send=False, peer=0, line=1, function="main"))
    exchange.came(1, received, 6.0)
    assert received is sent
    assert sent.is_done(0, 6.5)


@pytest.mark.parametrize("hangs", [True, False])
def test_what_nccl_does_about_different_sizes_is_played_both_ways(hangs: bool) -> None:
    exchange = Exchange(Semantics.NCCL, {}, 2, mismatch_hangs=hangs)
    sizes = enumerate((1000, 2000))
    operation = _call(exchange, {rank: Collective("all_reduce", 1, "main", elements) for rank, elements in sizes})
    assert bool(operation.done_s) is not hangs
