"""In torchdata's StatefulDataLoader: a state is right at its batch, however far workers are ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.order import ShuffledOrder

if TYPE_CHECKING:
    from collections.abc import Callable

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

# torchdata 0.11 calls a function of torch that newer torch wants nobody to call.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def with_drop_in(num_workers: int) -> Any:
    sampler = ElasticDistributedSampler(range(100), 2, 1)
    return torchdata.StatefulDataLoader(range(100), batch_size=5, sampler=sampler, num_workers=num_workers)


def with_batches(num_workers: int) -> Any:
    sampler = ElasticBatchSampler(ShuffledOrder(100), 10, rank=1, num_replicas=2)
    return torchdata.StatefulDataLoader(range(100), batch_sampler=sampler, num_workers=num_workers)


def train(loader: Any, num_steps: int | None = None) -> list[list[int]]:
    batches = []
    for batch in loader:
        assert isinstance(batch, torch.Tensor)
        batches.append(batch.tolist())
        if isinstance(loader.batch_sampler, ElasticBatchSampler):
            loader.batch_sampler.finish_step()
        if len(batches) == num_steps:
            break
    return batches


@pytest.mark.parametrize("make", [with_drop_in, with_batches])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_in_the_middle_of_an_epoch(make: Callable[[int], Any], num_workers: int) -> None:
    straight, stopped, resumed = (make(num_workers) for _ in range(3))
    first, second = train(straight), train(straight)
    assert train(stopped, 4) == first[:4]

    resumed.load_state_dict(stopped.state_dict())

    assert train(resumed) == first[4:]
    assert train(resumed) == second


@pytest.mark.parametrize("make", [with_drop_in, with_batches])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_a_complete_epoch_a_loader_resumes_with_the_next(make: Callable[[int], Any], num_workers: int) -> None:
    straight, resumed = make(num_workers), make(num_workers)
    train(straight)
    state = straight.state_dict()
    second = train(straight)

    resumed.load_state_dict(state)

    assert train(resumed) == second
