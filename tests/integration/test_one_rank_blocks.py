"""What needs every rank raises in a block that one rank runs alone, and the ranks go on together afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from ddpcore import barriers
from ddpcore.barriers.one_rank_blocks import only_on_master, rank_zero_only
from ddpcore.errors import BarrierUseError
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(call: Callable[[], object]) -> str:
    """Return why a call is refused in a block of rank 0, or ""."""
    try:
        with only_on_master("save"):
            call()
    except BarrierUseError as error:
        return str(error).partition(": ")[0]
    return ""


def call_everything() -> dict[str, str]:
    ones = torch.ones(2)
    alone, pair = dist.new_group([0]), dist.new_group([0, 1])
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = nn.parallel.DistributedDataParallel(model)
    batch = torch.ones(3, 2)
    loss = ddp(batch).sum()
    gathered = [torch.ones(2), torch.ones(2)]
    refused: dict[str, str] = {}
    if dist.get_rank() == 0:
        refused = {
            "all_reduce": refusal(lambda: dist.all_reduce(ones)),
            "asynchronous": refusal(lambda: dist.all_reduce(ones, async_op=True)),
            "barrier": refusal(dist.barrier),
            "monitored_barrier": refusal(dist.monitored_barrier),
            "broadcast": refusal(lambda: dist.broadcast(ones, 0)),
            "all_gather": refusal(lambda: dist.all_gather(gathered, ones)),
            "all_gather_object": refusal(lambda: dist.all_gather_object([None, None], 1)),
            "broadcast_object_list": refusal(lambda: dist.broadcast_object_list([1], 0)),
            "functional": refusal(lambda: functional.all_reduce(ones, "sum", pair)),
            "in a pair": refusal(lambda: dist.all_reduce(ones, group=pair)),
            "alone": refusal(lambda: dist.all_reduce(ones, group=alone)),
            "send": refusal(lambda: dist.send(ones, 1)),
            "DDP's forward": refusal(lambda: ddp(batch)),
            "DDP's backward": refusal(loss.backward),
            "the module's forward": refusal(lambda: model(batch)),
            "our barrier": refusal(lambda: barriers.barrier("epoch")),
            "our exchange": refusal(lambda: barriers.exchange("epoch", "")),
            "our first-block": refusal(lambda: barriers.master_first("corpus").__enter__()),
        }
    else:
        dist.recv(ones, 0)
    # Nothing of it has got out: the ranks still agree on what comes next.
    barriers.barrier("end")
    dist.all_reduce(ones)
    return refused


def test_what_needs_every_rank_raises_at_once_and_what_does_not_is_let_through() -> None:
    refused, nothing = run_ranks(call_everything, 2)

    assert nothing == {}
    assert refused == {
        "all_reduce": "all_reduce inside only_on_master save",
        "asynchronous": "all_reduce inside only_on_master save",
        "barrier": "barrier inside only_on_master save",
        "monitored_barrier": "monitored_barrier inside only_on_master save",
        "broadcast": "broadcast inside only_on_master save",
        "all_gather": "all_gather inside only_on_master save",
        "all_gather_object": "all_gather inside only_on_master save",
        "broadcast_object_list": "broadcast inside only_on_master save",
        "functional": "all_reduce inside only_on_master save",
        "in a pair": "all_reduce inside only_on_master save",
        "alone": "",
        "send": "",
        "DDP's forward": "broadcast inside only_on_master save",
        "DDP's backward": "all_reduce inside only_on_master save",
        "the module's forward": "",
        "our barrier": "barrier 'epoch' inside only_on_master save",
        "our exchange": "exchange 'epoch' inside only_on_master save",
        "our first-block": "first 'corpus' inside only_on_master save",
    }


@rank_zero_only
def add(left: int, right: int = 1) -> int:
    """Add."""
    return left + right


@rank_zero_only
def add_up_over_ranks() -> None:
    dist.all_reduce(torch.ones(1))


def use_decorated() -> tuple[int | None, str, bool]:
    message = ""
    try:
        add_up_over_ranks()
    except BarrierUseError as error:
        message = str(error).partition(": ")[0]
    with only_on_master() as is_mine:
        total = add(2, right=3)
    return total, message, is_mine


def test_a_decorated_function_runs_on_rank_0_alone() -> None:
    assert run_ranks(use_decorated, 2) == [
        (5, "all_reduce inside rank_zero_only add_up_over_ranks", True),
        (None, "", False),
    ]


def test_without_a_process_group_the_marks_change_nothing() -> None:
    assert add(1) == 2
    assert add.__doc__ == "Add."
    with only_on_master() as is_mine:
        assert is_mine
        barriers.barrier("nobody else")
