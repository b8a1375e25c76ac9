"""Models that `torch.compile` has compiled, on real gloo ranks: DDP goes between the compiler and the model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddpcore import load_checkpoint, unwrap
from ddpcore.engine.engine import Engine
from ddpcore.parallel.wrapping import accumulate, wrap
from ddpcore.probe.stack import StackWalk, code_roots
from ddpcore.wire import Phase
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class Net(nn.Module):
    """A model of the user's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.first(inputs).tanh())
        return hidden


def new_model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def new_net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def compiled(model: nn.Module, backend: str = "eager") -> nn.Module:
    return cast("nn.Module", torch.compile(model, backend=backend))


def samples() -> Tensor:
    return torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def take_steps(backend: str, is_own: bool, is_static: bool) -> tuple[float, list[str], bool, int]:
    """Return the error of gradients, names in the state, whether DDP is inside, and how many graphs were compiled."""
    new = new_net if is_own else new_model
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    # Other weights than rank 0's: the wrap must begin with rank 0's everywhere.
    bare = new(3 + dist.get_rank())
    model = wrap(cast("nn.Module", torch.compile(bare, backend=counting)), static_graph=is_static)
    errors = []
    for _ in range(2):
        whole = new()
        model.zero_grad()
        parts = samples().chunk(dist.get_world_size())[dist.get_rank()].chunk(3)
        for number, part in enumerate(parts):
            with accumulate(model, is_last=number == 2):
                (model(part).square().mean() / 3).backward()
        whole(samples()).square().mean().backward()
        for own, wanted in zip(bare.parameters(), whole.parameters(), strict=True):
            assert own.grad is not None
            assert wanted.grad is not None
            errors.append((own.grad - wanted.grad).abs().max().item())
    assert unwrap(model) is bare
    inner = getattr(model, "_orig_mod", None)
    return max(errors), list(unwrap(model).state_dict()), isinstance(inner, DistributedDataParallel), len(graphs)


@pytest.mark.parametrize(
    ("backend", "is_own", "is_static"),
    [
        ("eager", True, False),
        pytest.param("aot_eager", True, False, marks=pytest.mark.slow),
        pytest.param("eager", True, True, marks=pytest.mark.slow),
        pytest.param("eager", False, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process_and_the_model_is_compiled(
    backend: str, *, is_own: bool, is_static: bool
) -> None:
    for error, names, has_ddp_inside, num_graphs in run_ranks(take_steps, 2, backend, is_own, is_static):
        assert error < 1e-12
        assert names == (["first.weight", "first.bias", "last.weight", "last.bias"] if is_own else NAMES)
        assert has_ddp_inside is is_own
        assert num_graphs > 0


def train(root: str, until: str, is_compiled: bool) -> list[list[float]]:
    data = TensorDataset(samples(), samples()[:, :1])
    with Engine(seed=4) as engine:
        model = engine.wrap(compiled(new_model()) if is_compiled else new_model())
        optimizer = torch.optim.AdamW(model.parameters(), 0.02)
        batches = engine.loader(data, global_batch_size=8)
        engine.checkpoint(root, every="100 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until=until):
            for inputs, targets in batch.micro_batches(2):
                engine.backward((model(inputs) - targets).square().mean())
            engine.update(optimizer)
        return [parameter.tolist() for parameter in unwrap(model).parameters()]


@pytest.mark.slow
def test_a_compiled_model_trains_saves_and_resumes_as_one_that_is_not(tmp_path: Path) -> None:
    wanted = train(str(tmp_path / "alone"), "8 steps", False)

    run_ranks(train, 2, str(tmp_path / "ranks"), "4 steps", True, has_group=False)
    for found in run_ranks(train, 3, str(tmp_path / "ranks"), "8 steps", True, has_group=False):
        for one, other in zip(found, wanted, strict=True):
            assert (torch.tensor(one) - torch.tensor(other)).abs().max().item() < 1e-6
    whole, shell = new_model(9), compiled(new_model(9))
    assert list(load_checkpoint(tmp_path / "ranks", model=whole).state["model"]) == NAMES
    assert load_checkpoint(tmp_path / "ranks", model=shell).fit.is_whole
    assert all(torch.equal(own, other) for own, other in zip(whole.parameters(), shell.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_probe_sees_the_phases_of_a_compiled_model() -> None:
    walk, phases = StackWalk(code_roots()), []

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch has it so
    def look() -> None:
        reading = walk.read(threading.get_ident())
        phases.append((reading.phase, reading.place and reading.place.function))

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.layer(inputs)
            look()
            return hidden.tanh()

    model = compiled(Watched(), "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: look())
    for _ in range(2):
        phases.clear()
        hidden = model(torch.ones(1, 2))
        hidden.register_hook(lambda _: look())
        hidden.sum().backward()
        optimizer.step()

    assert phases == [(Phase.FORWARD, "look"), (Phase.BACKWARD, "look"), (Phase.OPTIMIZER, "look")]
