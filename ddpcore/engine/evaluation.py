"""Exact evaluation: each sample counts once, whatever the number of ranks, and no rank waits for another's batches."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ddpcore.agreement import common_problem
from ddpcore.barriers.named_barriers import exchange
from ddpcore.engine.loader_options import LoaderOptions, make_loader, whole
from ddpcore.errors import EngineUseError, SamplerArgumentError
from ddpcore.nested import map_tensors, named_leaves, num_samples_of, zip_leaves
from ddpcore.parallel.fully_sharded import is_fully_sharded
from ddpcore.parallel.wrapping import unwrap
from ddpcore.process_group.open_group import TIMEOUT_S
from ddpcore.samplers.evaluation import EvaluationSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

Tree = TypeVar("Tree")

Prediction: TypeAlias = Callable[[nn.Module, Any], Tree]
"""Takes the module, in eval mode, and a batch on its device; returns a tree of tensors of shape (B, ...)."""

Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""Takes the module, in eval mode, and a batch on its device; returns a value for each sample, shape (B,), by name."""


@torch.no_grad()
def evaluate(  # noqa: PLR0913 - what the engine knows, beside what the program gives
    model: nn.Module,
    dataset: Dataset[Any],
    measure: Measure,
    *,
    batch_size: int,
    device: torch.device,
    group: ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    **loader_options: Unpack[LoaderOptions],
) -> dict[str, float]:
    """Return the mean over all samples of what `measure` returns of each, the same numbers on every rank.

    Every rank calls it; blocks. The module runs without its DDP wrapper, whose forward may communicate: ranks need not
    have equally many batches, nor any. Its parts that were in training mode are set back to it. Its buffers are made
    those of the first rank before, as DDP's next forward would: running statistics differ between ranks.

    `dataset` is the same on every rank, which reads its own share of it. `group` is a gloo group of all ranks; None
    without other ranks. Raises SamplerArgumentError for an empty data set, EngineUseError on every rank if `measure`
    returned something else than a value for each sample or the ranks differ in data set or measures,
    BarrierTimeoutError.
    """
    sums: dict[str, float] = {}
    num_samples = num_batches = 0
    ranks = _Ranks(group, "engine.evaluate", timeout_s)
    with _own_batches(model, dataset, batch_size, device, ranks, loader_options) as batches:
        for module, batch, size, counts in batches:
            measured = _named(measure(module, batch))
            if num_batches and measured.keys() != sums.keys():
                names, before = (", ".join(one) or "nothing" for one in (measured, sums))
                raise EngineUseError(
                    f"measure returned {names} for one batch and {before} for those before: it returns the same names "
                    "for each"
                )
            num_batches += 1
            for name, values in measured.items():
                if not isinstance(values, Tensor) or values.shape != (size,) or values.is_complex():
                    raise EngineUseError(
                        f"measure returned {name!r} of {_kind_of(values)} for {size} samples: "
                        "it takes one real number for each sample in a tensor, without a mean over them"
                    )
                sums[name] = sums.get(name, 0.0) + (float(values.double().sum()) if counts else 0.0)
            num_samples += size if counts else 0
    _check_same([zlib.crc32(name.encode()) for name in sorted(sums)], "different measures", group)
    total = torch.tensor([num_samples, *(sums[name] for name in sorted(sums))], dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
    means: list[float] = (total[1:] / total[0]).tolist()
    return dict(zip(sorted(sums), means, strict=True))


@torch.no_grad()
def predict_own(  # noqa: PLR0913 - as of evaluate
    model: nn.Module,
    dataset: Dataset[Any],
    function: Prediction[Tree],
    *,
    batch_size: int,
    device: torch.device,
    group: ProcessGroup | None,
    timeout_s: float = TIMEOUT_S,
    **loader_options: Unpack[LoaderOptions],
) -> Tree:
    """Return what `function` makes of each sample of this rank's share, in the data set's order, on the CPU.

    Every rank calls it; blocks. Arguments and errors are those of `evaluate`, as are model, buffers and shares. Without
    a share the tensors have no rows.
    """
    outputs: list[Tree] = []
    ranks = _Ranks(group, "engine.predict", timeout_s)
    with _own_batches(model, dataset, batch_size, device, ranks, loader_options) as batches:
        for module, batch, size, counts in batches:
            output = function(module, batch)
            for name, leaf in named_leaves(output):
                if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != size:
                    raise EngineUseError(
                        f"function returned{name and ' at '}{name} something of {_kind_of(leaf)} for {size} samples: "
                        "it takes tensors with one row for each sample"
                    )
            outputs.append(map_tensors(Tensor.cpu if counts else _no_rows, output))
    own: Tree = zip_leaves(_joined, outputs)
    return own


def _joined(parts: list[Tensor]) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        raise EngineUseError(
            f"function returned rows that do not go together ({error}): each batch's have one shape; pad them to it"
        ) from error


def _named(measured: object) -> Mapping[str, Any]:
    """Return what a measure has returned, if it is values by name."""
    if not isinstance(measured, Mapping) or not all(isinstance(name, str) for name in measured):
        raise EngineUseError(
            f"measure returned {type(measured).__name__} where it takes a value for each sample by name: "
            '{"loss": losses}'
        )
    return measured


def _kind_of(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"type {type(value).__name__}"
    return f"shape {tuple(value.shape)}" + (f" and {value.dtype}" if value.is_complex() else "")


def _no_rows(tensor: Tensor) -> Tensor:
    return tensor[:0].cpu()


class _Ranks(NamedTuple):
    """Communication of one call: a gloo group of all ranks (None without others), its name and its time-out."""

    group: ProcessGroup | None
    call: str
    timeout_s: float


class _OwnBatch(NamedTuple):
    """A batch of a rank's share of a data set, on the device of the module, which is in eval mode.

    `counts` is False for a stand-in: of a rank without a share, which learns so what the others measure, or of one with
    fewer batches of a sharded model.
    """

    module: nn.Module
    content: Any
    num_samples: int
    counts: bool


@contextmanager
def _own_batches(
    model: nn.Module,
    dataset: Dataset[Any],
    batch_size: int,
    device: torch.device,
    ranks: _Ranks,
    loader_options: LoaderOptions,
) -> Iterator[Iterator[_OwnBatch]]:
    """Yield the batches of this rank's share, with the module in eval mode and the first rank's buffers."""
    group = ranks.group
    sampler = EvaluationSampler(dataset) if group is None else _same_everywhere(dataset, ranks)
    module = unwrap(model)
    buffers, own_buffers = _buffers_of(model, module)
    _broadcast_buffers(buffers, group)
    # Part by part: a program may keep some in eval mode while the whole is in training, as a frozen BatchNorm.
    in_training = [part for part in module.modules() if part.training]
    module.eval()
    own_dataset: Dataset[Any] = dataset if len(sampler) else Subset(dataset, [0])
    own = {"batch_size": batch_size, "sampler": sampler if len(sampler) else None}
    loader = make_loader(own_dataset, own, loader_options)
    # A sharded model's forward gathers parameters from all ranks: each comes as often as the one with the most.
    num_forwards = _most(len(loader), group) if is_fully_sharded(module) else len(loader)

    def batches() -> Iterator[_OwnBatch]:
        batch: Any = None
        for content in whole(loader, len(loader)):
            batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), content)
            yield _OwnBatch(module, batch, num_samples_of(batch), bool(len(sampler)))
        for _ in range(num_forwards - len(loader)):
            yield _OwnBatch(module, batch, num_samples_of(batch), counts=False)

    try:
        yield batches()
    finally:
        for part in in_training:
            part.training = True
        for buffer, kept in zip(buffers, own_buffers, strict=False):
            buffer.copy_(kept)


def _same_everywhere(dataset: Dataset[Any], ranks: _Ranks) -> EvaluationSampler:
    """Meet the other ranks, before any collective could hang, and return this one's sampler of the same data set."""
    sampler, failure = None, None
    try:
        sampler = EvaluationSampler(dataset)
    except SamplerArgumentError as error:
        failure = error
    own = [str(failure or ""), 0 if sampler is None else sampler.num_total]
    answers = [json.loads(text) for text in exchange(ranks.call, json.dumps(own), ranks.timeout_s)]
    problems = [problem for problem, _ in answers]
    if failure is not None and len(set(problems)) == 1:
        raise failure
    if (problem := common_problem(problems)) or sampler is None:
        raise EngineUseError(f"{ranks.call}: {problem}") from failure
    if any(size != sampler.num_total for _, size in answers):
        raise EngineUseError(_different("data sets of different sizes"))
    return sampler


def _different(what: str) -> str:
    return f"the ranks evaluate {what}: each rank gives the whole data set, and the same measure"


def _most(number: int, group: ProcessGroup | None) -> int:
    """Return the largest of all ranks' numbers. Every rank calls it; blocks."""
    largest = torch.tensor(number)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)


def _buffers_of(model: nn.Module, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers that ranks have in common, and this rank's own where DDP leaves each its own."""
    wrapper = getattr(model, "_orig_mod", model)
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    buffers = [buffer for name, buffer in module.named_buffers() if buffer.numel() and name not in ignored]
    return buffers, [] if getattr(wrapper, "broadcast_buffers", True) else [buffer.clone() for buffer in buffers]


def _broadcast_buffers(buffers: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Give every rank the first one's buffers. Every rank calls it; blocks."""
    if group is None or not buffers:
        return
    bytes_of = [buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    packed = torch.cat(bytes_of)
    dist.broadcast(packed, 0, group)
    parts = torch.split(packed, [len(one) for one in bytes_of])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.clone().view(buffer.dtype).reshape(buffer.shape))


def _check_same(numbers: list[int], what: str, group: ProcessGroup | None) -> None:
    """Raise on every rank if one has other numbers than the rest."""
    if group is None:
        return
    digest = zlib.crc32(str(numbers).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise EngineUseError(_different(what))
