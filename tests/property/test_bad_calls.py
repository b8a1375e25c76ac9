"""Every parameter of everything public, with wrong types and values: our error, or a meaning that is documented.

The calls are generated from the signatures: a new parameter is tried by itself. Nothing may end in an error from
inside, and nothing senseless may be accepted in silence.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpcore
import ddpcore.barriers
import ddpcore.checkpoint
import ddpcore.parallel
import ddpcore.process_group
import ddpcore.samplers
from ddpcore.checkpoint import Checkpointer
from ddpcore.engine.batches import Batch
from ddpcore.engine.loader_options import LoaderOptions, TrainingLoaderOptions
from ddpcore.engine.stop_agreement import StopReason
from ddpcore.errors import (
    CheckpointCallError,
    CheckpointDirectoryError,
    DdpcoreError,
    EngineUseError,
    SamplerArgumentError,
)
from ddpcore.parallel.ddp_arguments import DdpArguments
from ddpcore.parallel.wrapping import WrapOptions
from ddpcore.process_group import OpenGroup
from ddpcore.process_group.open_group import GroupOptions
from ddpcore.samplers import ElasticBatchSampler, ElasticDistributedSampler, ShuffledOrder, WeightedOrder
from tests.support.checkpoint_copies import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

DATA = TensorDataset(torch.ones(12, 2))

WRONG: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    math.nan,
    math.inf,
    10**30,
    10**400,
    "",
    "no such thing",
    b"bytes",
    [],
    {},
    object(),
    nn.Linear,
]

TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass
class Call:
    """How something public is called well.

    Attributes:
        function: Whose signature it is.
        arguments: By name; those left out have defaults.
        run: Calls it with these arguments and a directory to write in; by default the function itself.
        extra: Parameters that the signature takes as `**options`, with their types.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    run: Callable[..., Any] | None = None
    extra: dict[str, str] = field(default_factory=dict)

    def __call__(self, directory: Path, arguments: dict[str, Any]) -> object:
        return self.run(directory, **arguments) if self.run is not None else self.function(**arguments)


def with_engine(where: Path, /, **arguments: Any) -> None:
    with ddpcore.Engine(**{"log_dir": where / "logs", **arguments}):
        pass


def in_engine(name: str) -> Callable[..., None]:
    def run(where: Path, /, **arguments: Any) -> None:
        with ddpcore.Engine() as engine:
            if arguments.get("directory") == "checkpoints":
                arguments["directory"] = where / "checkpoints"
            returned = getattr(engine, name)(**arguments)
            if inspect.isgenerator(returned):
                next(returned)

    return run


def in_step(name: str) -> Callable[..., None]:
    def run(_: Path, /, **arguments: Any) -> None:
        with ddpcore.Engine() as engine:
            model = engine.wrap(nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for batch in engine.steps(engine.loader(DATA, global_batch_size=4), until="1 step"):
                if name == "micro_batches":
                    assert list(batch.micro_batches(**arguments))
                    break
                for (inputs,) in batch.micro_batches():
                    loss = model(inputs).mean()
                    engine.backward(**{"loss": loss, **(arguments if name == "backward" else {})})
                if name == "update":
                    engine.update(**{"optimizer": optimizer, **arguments})
                elif name == "log":
                    engine.log(**arguments)

    return run


def steps(_: Path, /, **arguments: Any) -> None:
    with ddpcore.Engine() as engine:
        batches = engine.loader(DATA, global_batch_size=4)
        for _batch in engine.steps(**{"batches": batches, **arguments}):
            break


opened: dict[Path, Checkpointer] = {}
"""One for all values of a test: each has a process."""


def with_checkpointer(name: str) -> Callable[..., None]:
    def run(where: Path, /, **arguments: Any) -> None:
        root = where.parent / "checkpoints"
        if root not in opened:
            opened[root] = Checkpointer(root)
            opened[root].save(1, {"a": 1})
        getattr(opened[root], name)(**arguments)

    return run


def open_checkpointer(where: Path, /, **arguments: Any) -> None:
    if arguments["directory"] == "checkpoints":
        arguments["directory"] = where / "checkpoints"
    Checkpointer(**arguments).close()


def load_from(function: Callable[..., object]) -> Callable[..., None]:
    def run(where: Path, /, **arguments: Any) -> None:
        root = where.parent / "sound"
        if not root.exists():
            root.mkdir()
            write_checkpoint(root, {"model": nn.Linear(2, 1).state_dict()}, 1, step=1)
        if arguments["path"] == "checkpoints":
            arguments["path"] = root
        function(**arguments)

    return run


def sampler() -> ElasticBatchSampler:
    return ElasticBatchSampler(ShuffledOrder(12), 4)


def on_sampler(name: str) -> Callable[..., object]:
    def run(_: Path, /, **arguments: Any) -> None:
        getattr(sampler(), name)(**arguments)

    return run


def on_distributed(name: str) -> Callable[..., object]:
    def run(_: Path, /, **arguments: Any) -> None:
        getattr(ElasticDistributedSampler(DATA), name)(**arguments)

    return run


def read_through(_: Path, /, **arguments: Any) -> None:
    assert list(ddpcore.Prefetcher(**arguments)) is not None


def in_block(block: Callable[..., Any]) -> Callable[..., None]:
    def run(_: Path, /, **arguments: Any) -> None:
        with block(**arguments):
            pass

    return run


def on_models(function: Callable[..., Any]) -> Callable[..., None]:
    """Models are the arguments without a name."""

    def run(_: Path, /, *, model: object, **arguments: Any) -> None:
        with function(model, **arguments):
            pass

    return run


ORDERS: list[Any] = [
    ddpcore.samplers.SequentialOrder(12),
    ShuffledOrder(12),
    ddpcore.samplers.LengthGroupedOrder([1, 2, 3] * 4, 2),
    ddpcore.samplers.ShardedOrder([5, 7], 2),
    WeightedOrder([1.0, 2.0, 3.0] * 4),
    WeightedOrder([1.0, 2.0, 3.0] * 4, replacement=False),
]


def on_orders(name: str) -> list[Call]:
    arguments: dict[str, Any] = {"begin": 2, "end": 5} if name == "indices" else {"positions": np.arange(3)}
    return [
        Call(
            getattr(type(order), name),
            {"epoch": 1, **arguments},
            lambda _, /, order=order, **given: getattr(order, name)(**given),
        )
        for order in ORDERS
    ]


def sample_of(_: Path, /, index: Any) -> object:
    dataset: Any = ddpcore.samplers.ShardedDataset(["a"], [12], lambda shard, start: [shard] * (12 - start))
    return dataset[index]


MEMORY = ddpcore.samplers.RankMemory(10**9, 10**8, 10.0)


def close_group(_: Path, /, **arguments: Any) -> None:
    ddpcore.open_process_group().close(**arguments)


def options_of(*kinds: Any, but: Collection[str] = ()) -> dict[str, str]:
    """Return the names and types of options that a signature takes as `**options: Unpack[...]`."""
    return {
        name: kind.__forward_arg__ for one in kinds for name, kind in one.__annotations__.items() if name not in but
    }


DDP_CHECKED = {
    "device_ids",
    "output_device",
    "process_group",
    "device_mesh",
    "mixed_precision",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
}
"""Arguments of DDP that its constructor checks itself, which nobody calls who is alone."""

CALLS: list[Call] = [
    Call(ddpcore.Engine, {}, with_engine, options_of(GroupOptions)),
    Call(
        ddpcore.Engine.wrap,
        {"model": nn.Linear(2, 1)},
        in_engine("wrap"),
        options_of(WrapOptions, but=DDP_CHECKED),
    ),
    Call(ddpcore.Engine.ema, {"model": nn.Linear(2, 1)}, in_engine("ema")),
    Call(
        ddpcore.Engine.loader,
        {"dataset": DATA, "global_batch_size": 4},
        in_engine("loader"),
        {**options_of(TrainingLoaderOptions), "shufle": ""},
    ),
    Call(
        ddpcore.Engine.checkpoint,
        {"directory": "checkpoints", "every": "1 step", "model": nn.Linear(2, 1)},
        in_engine("checkpoint"),
        {"model": ""},
    ),
    Call(
        ddpcore.Engine.schedule,
        {"schedule": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], 0.1))},
        in_engine("schedule"),
    ),
    Call(ddpcore.Engine.early_stopping, {"metric": "loss", "patience": 2}, in_engine("early_stopping")),
    Call(ddpcore.Engine.steps, {"until": "2 steps"}, steps),
    Call(ddpcore.Engine.backward, {}, in_step("backward")),
    Call(ddpcore.Engine.update, {}, in_step("update")),
    Call(ddpcore.Engine.log, {"loss": 1.0}, in_step("log"), {"loss": "float"}),
    Call(ddpcore.Engine.add_logger, {}, in_engine("add_logger")),
    Call(ddpcore.Engine.is_due, {"every": "1 step"}, in_engine("is_due")),
    Call(
        ddpcore.Engine.evaluate,
        {"model": nn.Linear(2, 1), "dataset": DATA, "measure": lambda m, b: {"a": m(b[0])[:, 0]}, "batch_size": 4},
        in_engine("evaluate"),
        {**options_of(LoaderOptions), "drop_last": ""},
    ),
    Call(
        ddpcore.Engine.predict,
        {"model": nn.Linear(2, 1), "dataset": DATA, "function": lambda m, b: m(b[0]), "batch_size": 4},
        in_engine("predict"),
        {**options_of(LoaderOptions), "drop_last": ""},
    ),
    Call(ddpcore.Engine.gather, {"tree": 1.0}, in_engine("gather")),
    Call(ddpcore.Engine.reduce, {"tree": 1.0}, in_engine("reduce")),
    Call(Batch.micro_batches, {}, in_step("micro_batches")),
    Call(Checkpointer, {"directory": "checkpoints"}, open_checkpointer),
    Call(Checkpointer.save, {"step": 2, "state": {"a": 1}}, with_checkpointer("save")),
    Call(Checkpointer.prepare, {"state": {"a": 1}}, with_checkpointer("prepare")),
    Call(Checkpointer.would_keep, {"metrics": {"a": 1.0}}, with_checkpointer("would_keep")),
    Call(Checkpointer.load, {"step": 1}, with_checkpointer("load")),
    Call(ddpcore.checkpoint.restore, {"state": {}, "objects": {}}),
    Call(ddpcore.load_checkpoint, {"path": "checkpoints"}, load_from(ddpcore.load_checkpoint), {"model": ""}),
    Call(ddpcore.load_tensors, {"path": "checkpoints", "names": ["model.bias"]}, load_from(ddpcore.load_tensors)),
    Call(ElasticBatchSampler, {"order": ShuffledOrder(12), "global_batch_size": 4}),
    Call(ElasticBatchSampler.set_weights, {"weights": [1]}, on_sampler("set_weights")),
    Call(ElasticBatchSampler.set_epoch, {"epoch": 1}, on_sampler("set_epoch")),
    Call(
        ElasticBatchSampler.load_state_dict,
        {"state_dict": sampler().state_dict()},
        on_sampler("load_state_dict"),
    ),
    Call(ElasticDistributedSampler, {"dataset": DATA}),
    Call(ElasticDistributedSampler.set_epoch, {"epoch": 1}, on_distributed("set_epoch")),
    Call(
        ElasticDistributedSampler.load_state_dict,
        {"state_dict": ElasticDistributedSampler(DATA).state_dict()},
        on_distributed("load_state_dict"),
    ),
    Call(ddpcore.samplers.EvaluationSampler, {"dataset": DATA}),
    Call(ddpcore.samplers.LengthGroupedOrder, {"lengths": [1, 2, 3], "global_batch_size": 2}),
    Call(ddpcore.samplers.SequentialOrder, {"num_samples": 3}),
    Call(ShuffledOrder, {"num_samples": 3}),
    Call(ddpcore.samplers.WeightedOrder, {"weights": [1.0, 2.0]}),
    Call(ddpcore.samplers.ShardedOrder, {"lengths": [3, 4], "global_batch_size": 2}),
    Call(
        ddpcore.samplers.ShardedDataset,
        {"shards": ["a", "b"], "lengths": [3, 4], "read": lambda shard, start: [shard, start]},
    ),
    Call(ddpcore.samplers.loss_factor, {"num_local": 1, "num_global": 2, "world_size": 2}),
    Call(ddpcore.samplers.sample_seed, {"seed": 1, "epoch": 0, "index": 0}),
    Call(ddpcore.Prefetcher, {"batches": [torch.ones(1)], "device": "cpu"}, read_through),
    Call(ddpcore.barrier, {"label": "epoch"}),
    Call(ddpcore.exchange, {"label": "epoch", "value": "a"}),
    Call(ddpcore.master_first, {}, in_block(ddpcore.master_first)),
    Call(ddpcore.local_master_first, {}, in_block(ddpcore.local_master_first)),
    Call(ddpcore.only_on_master, {}, in_block(ddpcore.only_on_master)),
    Call(ddpcore.rank_zero_only, {"function": print}),
    Call(ddpcore.phase, {"name": "eval"}, in_block(ddpcore.phase)),
    Call(ddpcore.report_step, {"step": 1}),
    Call(ddpcore.open_process_group, {}, lambda _, /, **arguments: ddpcore.open_process_group(**arguments).close()),
    Call(OpenGroup.close, {}, close_group),
    Call(ddpcore.wrap, {"model": nn.Linear(2, 1)}, extra=options_of(DdpArguments, but=DDP_CHECKED)),
    Call(ddpcore.unwrap, {"model": nn.Linear(2, 1)}),
    Call(ddpcore.parallel.PowerSGD, {}),
    Call(
        ddpcore.parallel.accumulate,
        {"model": nn.Linear(2, 1), "is_last": False},
        on_models(ddpcore.parallel.accumulate),
        {"model": "nn.Module"},
    ),
    Call(
        ddpcore.parallel.joined,
        {"model": nn.Linear(2, 1)},
        on_models(ddpcore.parallel.joined),
        {"model": "nn.Module"},
    ),
    Call(ddpcore.parallel.BalancedDataParallel, {"module": nn.Linear(2, 1)}),
    Call(ddpcore.samplers.RankMemory, {"capacity_bytes": 10**9, "fixed_bytes": 0, "bytes_per_sample": 1.0}),
    Call(ddpcore.samplers.fit_memory, {"capacity_bytes": 10**9, "smaller": (4, 400), "larger": (8, 800)}),
    Call(ddpcore.samplers.suggest_weights, {"memory": [MEMORY], "global_batch_size": 4}),
    Call(ddpcore.samplers.ShardedDataset.__getitem__, {"index": 1}, sample_of),
    *on_orders("indices"),
    *on_orders("take"),
]

ANYTHING = "anything"
STATE: list[Any] = [None, True, 0, -1, 1.5, math.nan, math.inf, 10**30, 10**400, "", "no such thing", [], {}]
"""What a checkpoint can hold."""
NUMBERS: list[Any] = [True, 0, -1, 1.5, math.nan, math.inf]

MEANING: dict[tuple[str, str], list[Any] | str] = {
    ("Engine", "seed"): [0],
    ("Engine", "deadline"): [0],
    ("Engine", "rank"): [0],
    ("Engine", "stop_patience_s"): [0],
    ("Engine.ema", "decay"): [0],
    ("Engine.backward", "weight"): [0],
    ("Engine.early_stopping", "min_delta"): [0],
    ("Engine.evaluate", "num_workers"): [0],
    ("Engine.evaluate", "timeout"): [0],
    ("Engine.loader", "num_workers"): [0],
    ("Engine.loader", "timeout"): [0],
    ("Engine.predict", "num_workers"): [0],
    ("Engine.predict", "timeout"): [0],
    ("Engine.gather", "tree"): NUMBERS,
    ("Engine.reduce", "tree"): NUMBERS,
    ("Engine.log", "loss"): [True, 0, -1, math.nan, math.inf],
    ("Engine.update", "clip_norm"): [math.inf],
    ("Engine.wrap", "dim"): [0, -1],
    ("wrap", "dim"): [0, -1],
    ("Checkpointer.save", "step"): [0],
    ("Checkpointer.save", "state"): STATE,
    ("Checkpointer.save", "per_rank"): STATE,
    ("Checkpointer.save", "metrics"): [{}],
    ("Checkpointer.would_keep", "metrics"): [{}],
    ("Checkpointer.prepare", "state"): STATE,
    ("Checkpointer.prepare", "per_rank"): STATE,
    ("ElasticBatchSampler", "rank"): [0],
    ("ElasticBatchSampler.set_epoch", "epoch"): [0],
    ("ElasticDistributedSampler", "rank"): [0],
    ("ElasticDistributedSampler", "seed"): [0],
    ("ElasticDistributedSampler.set_epoch", "epoch"): [0],
    ("EvaluationSampler", "rank"): [0],
    ("LengthGroupedOrder", "seed"): [0],
    ("ShuffledOrder", "seed"): [0],
    ("ShardedOrder", "seed"): [0],
    ("ShardedDataset", "max_skip"): [0],
    ("WeightedOrder", "seed"): [0],
    ("loss_factor", "num_local"): [0],
    ("sample_seed", "seed"): [0],
    ("sample_seed", "epoch"): [0],
    ("sample_seed", "index"): [0],
    ("Prefetcher", "batches"): [[]],
    ("barrier", "timeout_s"): [math.inf],
    ("exchange", "timeout_s"): [math.inf],
    ("exchange", "value"): [""],
    ("master_first", "timeout_s"): [math.inf],
    ("local_master_first", "timeout_s"): [math.inf],
    ("only_on_master", "name"): [""],
    ("rank_zero_only", "function"): [nn.Linear],
    ("report_step", "step"): ANYTHING,
    ("report_step", "loss"): ANYTHING,
    ("report_step", "epoch"): ANYTHING,
    ("report_step", "loss_step"): ANYTHING,
    ("restore", "state"): [{}],
    ("restore", "objects"): [{}],
    ("open_process_group", "rank"): [0],
    ("BalancedDataParallel", "first_device_batch"): [0],
    ("BalancedDataParallel", "output_device"): [0],
    ("RankMemory", "fixed_bytes"): [0],
    ("RankMemory", "bytes_per_sample"): [0],
    ("suggest_weights", "reserve_frac"): [0],
    ("ShardedDataset.__getitem__", "index"): [0],
    **{(f"{type(order).__name__}.take", "epoch"): [0] for order in ORDERS},
    **{("OrderByPositions.indices", name): [0] for name in ("epoch", "begin")},
    ("PowerSGD", "start_iter"): [0],
    ("PowerSGD", "orthogonalization_epsilon"): [0],
    ("PowerSGD", "random_seed"): [0],
}
"""Values that only look senseless: what they mean stands in the parameter's documentation."""


def cases() -> list[Any]:
    found = []
    for call in CALLS:
        names = [
            name
            for name, parameter in inspect.signature(call.function).parameters.items()
            if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        found += [pytest.param(call, name, id=f"{call.function.__qualname__}-{name}") for name in [*names, *call.extra]]
    return found


def has_meaning(call: Call, name: str, value: object) -> bool:
    """Say whether a value may be accepted: by its annotation, or as documented in `MEANING`."""
    known = MEANING.get((call.function.__qualname__.replace("Measuring.", "Engine."), name), [])
    if known == ANYTHING or any(value is one or (type(value) is type(one) and value == one) for one in known):
        return True
    parameter = inspect.signature(call.function).parameters.get(name)
    annotation = str(parameter.annotation) if parameter is not None else call.extra[name]
    kinds = [kind.strip() for kind in annotation.split("|")]
    if value is None:
        return "None" in kinds
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int | float):
        is_number = any(type(value) in TYPES[kind] for kind in kinds if kind in ("int", "float"))
        return is_number and value > 0 and math.isfinite(value)
    return isinstance(value, str) and bool(value) and ("str" in kinds)


PACKAGES = (
    ddpcore,
    ddpcore.barriers,
    ddpcore.checkpoint,
    ddpcore.parallel,
    ddpcore.process_group,
    ddpcore.samplers,
)

NOT_CALLED = {
    "Order": "a protocol",
    "Stateful": "a protocol",
    "Checkpoint": "returned",
    "Cursor": "returned",
    "Fit": "returned",
    "LoadedCheckpoint": "returned",
    "OpenGroup": "returned",
    "Share": "returned",
    "BalancedDataParallel.forward": "its arguments are the module's",
    "BalancedDataParallel.apply_replicas": "for classes that override it",
}
"""Public names that no program calls with arguments of this package, and why."""


def public_calls() -> set[str]:
    """Return what is public and takes arguments: functions, constructors, methods of public classes."""
    found = set()
    for package in PACKAGES:
        for thing in (getattr(package, name) for name in package.__all__):
            methods = [] if thing.__name__ in ("Order", "Stateful") else public_methods(thing)
            found |= {one.__qualname__ for one in (thing, *methods) if takes_arguments(one)}
    return found


def public_methods(thing: Any) -> list[Any]:
    return [
        method
        for name, method in inspect.getmembers(thing, inspect.isfunction)
        if (name == "__getitem__" or not name.startswith("_")) and method.__module__.startswith("ddpcore.")
    ]


def takes_arguments(thing: Any) -> bool:
    return any(name != "self" for name in inspect.signature(thing).parameters)


def test_everything_public_is_called() -> None:
    called = {call.function.__qualname__ for call in CALLS}

    assert public_calls() - called == set(NOT_CALLED)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.parametrize(("call", "name"), cases())
def test_a_wrong_argument_is_our_error_or_has_a_meaning(
    call: Call, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = []
    for number, value in enumerate(WRONG):
        (tmp_path / str(number)).mkdir()
        try:
            call(tmp_path / str(number), {**call.arguments, name: value})
        except DdpcoreError as error:
            if not str(error):
                problems.append(f"{value!r}: says nothing")
        except Exception as error:  # noqa: BLE001 - any other is what this test is for
            problems.append(f"{value!r}: {type(error).__name__}: {str(error)[:90]}")
        else:
            if not has_meaning(call, name, value):
                problems.append(f"{value!r} is accepted in silence")
    while opened:
        opened.popitem()[1].close()
    assert not problems, "\n".join(problems)


def test_a_path_that_no_file_system_has_is_said() -> None:
    with pytest.raises(CheckpointCallError, match=r"path=.* makes no sense: give a path"):
        ddpcore.load_checkpoint("\ud800")
    with pytest.raises(CheckpointDirectoryError, match="cannot be read: File name too long"):
        ddpcore.load_checkpoint("x" * 5000)


def test_a_home_directory_that_nobody_has_is_said() -> None:
    wrong = "~nobody-at-all/checkpoints"
    with ddpcore.Engine() as engine:
        calls: list[Callable[[], object]] = [
            lambda: Checkpointer(wrong),
            lambda: ddpcore.load_checkpoint(wrong),
            lambda: engine.checkpoint(wrong, every="1 step", model=nn.Linear(2, 1)),
        ]
        for call in calls:
            with pytest.raises(CheckpointCallError, match="give a path whose home directory exists"):
                call()


def test_a_data_loader_in_place_of_a_data_set_is_refused() -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match=r"give it loader\.dataset"):
        engine.loader(DataLoader(DATA), global_batch_size=4)  # type: ignore[arg-type] # that is the point


@pytest.mark.parametrize("num_samples", [4, 13])
def test_an_order_of_another_length_than_the_data_is_refused(num_samples: int) -> None:
    with ddpcore.Engine() as engine, pytest.raises(SamplerArgumentError, match="would not hold each sample once"):
        engine.loader(DATA, global_batch_size=4, order=ShuffledOrder(num_samples))


def test_a_weighted_order_may_draw_fewer_samples_or_more() -> None:
    with ddpcore.Engine() as engine:
        for number, num_samples in enumerate([4, 40]):
            order = WeightedOrder([1.0] * 12, num_samples=num_samples)
            assert len(engine.loader(DATA, global_batch_size=4, order=order, name=str(number)).sampler) > 0


@pytest.mark.parametrize("num_weights", [3, 13])
def test_weights_of_another_number_of_samples_than_the_data_has_are_refused(num_weights: int) -> None:
    order = WeightedOrder([1.0] * num_weights, num_samples=12)
    with ddpcore.Engine() as engine, pytest.raises(SamplerArgumentError, match="give a weight for each sample"):
        engine.loader(DATA, global_batch_size=4, order=order)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_forgotten_update_is_said_once(caplog: pytest.LogCaptureFixture, *, is_forgotten: bool) -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in engine.steps(engine.loader(DATA, global_batch_size=4), until="3 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            if not is_forgotten:
                # Without the engine's help is a way, too.
                optimizer.step()

    warnings = [record.message for record in caplog.records if "engine.update" in record.message]
    assert len(warnings) == is_forgotten


def test_an_optimizer_of_another_model_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with ddpcore.Engine() as engine:
        model, other = engine.wrap(nn.Linear(2, 1)), nn.Linear(2, 1)
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        for batch in engine.steps(engine.loader(DATA, global_batch_size=4), until="3 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)

    (message,) = [record.message for record in caplog.records]
    assert message.startswith(
        "step 1 has computed gradients and changed no weight: engine.update was given an optimizer"
    )


@pytest.mark.parametrize(
    "name", ["sampler", "batch_sampler", "generator", "seed", "device", "placement", "group", "in_order"]
)
def test_options_that_are_not_the_programs_to_choose_are_refused(name: str) -> None:
    with ddpcore.Engine() as engine:
        calls: list[Callable[..., Any]] = [
            lambda **options: engine.loader(DATA, global_batch_size=4, **options),
            lambda **options: engine.evaluate(
                nn.Linear(2, 1), DATA, lambda _, batch: {"a": batch[0]}, batch_size=4, **options
            ),
            lambda **options: engine.predict(nn.Linear(2, 1), DATA, lambda _, batch: batch[0], batch_size=4, **options),
        ]
        for call in calls:
            with pytest.raises(EngineUseError, match=f"a loader has no option '{name}' here"):
                call(**{name: None})


@pytest.mark.parametrize("value", [torch.tensor(1j), 10**400, np.ones(2)])
def test_what_is_logged_is_a_real_number(value: Any) -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match="a was logged as"):
        engine.log(a=value)


def test_a_loss_is_a_real_number() -> None:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(2, 1))
        for batch in engine.steps(engine.loader(DATA, global_batch_size=4), until="1 step"):
            for (inputs,) in batch.micro_batches():
                with pytest.raises(EngineUseError, match=r"this one is torch\.complex64 of shape \(\)"):
                    engine.backward(model(inputs).mean() * 1j)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (None, "measure returned NoneType where it takes a value for each sample by name"),
        ({1: torch.ones(4)}, "measure returned dict where"),
        ({"a": 1.0}, "measure returned 'a' of type float for 4 samples"),
        ({"a": np.ones(4)}, "measure returned 'a' of type ndarray for 4 samples"),
        ({"a": torch.ones(3)}, r"measure returned 'a' of shape \(3,\) for 4 samples"),
        ({"a": torch.ones(4) * 1j}, r"measure returned 'a' of shape \(4,\) and torch.complex64"),
    ],
)
def test_a_measure_returns_a_number_for_each_sample(measured: Any, words: str) -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match=words):
        engine.evaluate(nn.Linear(2, 1), DATA, lambda _, __: measured, batch_size=4)


def test_what_differs_between_batches_is_said() -> None:
    numbers = iter(range(1, 9))
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(2, 1))
        with pytest.raises(EngineUseError, match="measure returned a2 for one batch and a1 for those before"):
            engine.evaluate(model, DATA, lambda _, batch: {f"a{next(numbers)}": batch[0][:, 0]}, batch_size=4)
        with pytest.raises(EngineUseError, match="function returned rows that do not go together"):
            engine.predict(model, DATA, lambda _, batch: torch.ones(len(batch[0]), next(numbers)), batch_size=4)


def test_weights_of_samples_are_not_taken_for_weights_of_ranks() -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match="the ranks' are rank_weights="):
        engine.loader(DATA, global_batch_size=4, weights=[1.0] * 12)  # type: ignore[call-arg] # that is the point


def test_why_training_has_stopped_is_printed_in_words() -> None:
    assert [str(reason) for reason in StopReason] == ["none", "request", "signal", "deadline", "early"]
