"""The faults that need torch, in ranks that meet: what is left out, what nobody else calls, memory that runs out."""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce, barrier  # bound before anything is replaced
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import ddpcore
from ddpcore.probe.faults import omission
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.torch_faults import LEFT_OUT, strike
from ddpcore.wire import FaultKind
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP_TIMEOUT_S = 3.0

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "barrier": lambda _: barrier(),
    "all_reduce": all_reduce,
    "async all_reduce": lambda value: all_reduce(value, async_op=True).wait(),
    "broadcast": lambda value: dist.broadcast(value, 1),
    "ddpcore.barrier": lambda _: ddpcore.barrier("alone"),
}


def leave_out(how: str) -> tuple[float, float]:
    """Rank 0 leaves out a call to which rank 1 never comes, and meets it in the next."""
    value = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 0:
        strike(FaultKind.SKIP_BARRIER)
        strike(FaultKind.SKIP_BARRIER)  # one that is pending is enough
        CALLS[how](value)
        assert not omission.is_armed
    own = value.item()
    all_reduce(value)
    ddpcore.barrier("together")
    return own, value.item()


@pytest.mark.parametrize("how", CALLS)
def test_a_left_out_call_does_nothing_and_the_next_one_is_held(how: str) -> None:
    assert run_ranks(leave_out, 2, how) == [(1.0, 3.0), (2.0, 3.0)]


def leave_out_around_an_object() -> tuple[object, float]:
    """Rank 0 is to leave out its next meeting; torch's own calls below a broadcast of an object are none."""
    box: list[object] = [{"lr": 0.1}] if dist.get_rank() == 1 else [None]
    value = torch.tensor([1.0 + dist.get_rank()])
    before = _functions_of_torch()
    if dist.get_rank() == 0:
        strike(FaultKind.SKIP_BARRIER)
    dist.broadcast_object_list(box, src=1)
    if dist.get_rank() == 0:
        assert omission.is_armed
        work = all_reduce(value, async_op=True)
        assert work is not None
        assert work.get_future().then(lambda future: future.value()[0]).wait() is value
        assert _functions_of_torch() == before, "all is put back"
    return box[0], value.item()


def _functions_of_torch() -> list[Any]:
    functions = [getattr(dist.distributed_c10d, name) for name in LEFT_OUT]
    inner = [one.__closure__[one.__code__.co_freevars.index("func")].cell_contents for one in functions]
    return [*inner, DistributedDataParallel.forward]


def test_torch_s_own_calls_are_passed_over_and_all_of_it_is_put_back() -> None:
    assert run_ranks(leave_out_around_an_object, 2) == [({"lr": 0.1}, 1.0), ({"lr": 0.1}, 2.0)]


def leave_out_a_backward() -> tuple[float, float]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))

    def gradient() -> float:
        model.zero_grad()
        model(torch.tensor([[1.0 + dist.get_rank()]])).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.item()

    first = gradient()
    if dist.get_rank() == 0:
        strike(FaultKind.SKIP_BARRIER)
        with torch.no_grad():
            model(torch.ones(1, 1))  # meets nobody, and is passed over
        assert omission.is_armed
        first = gradient()
    return first, gradient()


def test_a_left_out_backward_keeps_its_gradient_to_itself_and_the_next_one_is_averaged() -> None:
    assert run_ranks(leave_out_a_backward, 2) == [(1.0, 1.5), (1.5, 1.5)]


def call_out_of_turn(calls_barriers: bool) -> str:
    if calls_barriers:
        dist.barrier()
    # Not of the group from its beginning: ranks that are slow to open it do come.
    _set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        if dist.get_rank() == 0:
            strike(FaultKind.MISMATCH)
        else:
            dist.all_reduce(torch.ones(4))
    except RuntimeError:  # the time is over, for this rank or for the other, which has closed its connection then
        return FlightRecorder().dump().entries[-1].op
    raise AssertionError("they have met")


@pytest.mark.parametrize(("calls_barriers", "op"), [(False, "gloo:barrier"), (True, "gloo:reduce")])
def test_a_call_out_of_turn_is_another_operation_and_meets_nobody(*, calls_barriers: bool, op: str) -> None:
    outcomes = try_ranks(call_out_of_turn, 2, calls_barriers)

    assert [outcome.value for outcome in outcomes] == [op, "gloo:all_reduce"], outcomes


def call_out_of_turn_alone() -> None:
    strike(FaultKind.MISMATCH)


def test_without_other_ranks_there_is_nothing_to_mismatch_and_it_is_said() -> None:
    (outcome,) = try_ranks(call_out_of_turn_alone, 1)

    assert (outcome.error, outcome.status) == ("", 0)
    assert "fault mismatch: nothing is done" in outcome.log


def run_out_of_memory() -> str:
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        strike(FaultKind.OOM)
    except RuntimeError as error:
        assert resource.getrlimit(resource.RLIMIT_AS) == before
        assert torch.ones(2**26, dtype=torch.uint8).sum() > 0
        return str(error)
    raise AssertionError("there was memory enough")


def test_memory_that_runs_out_is_told_by_torch_and_is_there_again_afterwards() -> None:
    (told,) = run_ranks(run_out_of_memory, 1)

    assert "DefaultCPUAllocator: can't allocate memory" in told
