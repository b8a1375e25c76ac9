"""Everything around a training loop, in one object. The loop stays the user's.

    with ddpcore.Engine(seed=0) as engine:
        model = engine.wrap(Net())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        batches = engine.loader(dataset, global_batch_size=64)
        engine.checkpoint("checkpoints", every="100 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="3 epochs"):
            for inputs, targets in batch.micro_batches(2):
                engine.backward(loss_function(model(inputs), targets))
            engine.update(optimizer, clip_norm=1.0)

This is the same program on one CPU, on one node and on many: without torchrun there is one rank. Every rank runs the
same lines; what must happen on all of them at once (a stop, a checkpoint, a mean) happens between the steps. Each part
can be used without the engine: `ddpcore.samplers`, `ddpcore.checkpoint`, `ddpcore.parallel`, and so on.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ddpcore.arguments import (
    BELOW_ZERO,
    MAX_SECONDS,
    check_flag,
    check_has,
    check_is,
    check_number,
    check_path,
    check_text,
    check_whole,
    refuse,
)
from ddpcore.barriers.failure_notice import ends_well, leave_notice
from ddpcore.checkpoint.catalog import Mode, Retention, check_retention
from ddpcore.engine.batches import Batch, Batches, wants_equal_forwards
from ddpcore.engine.cadence import Unit, parse_cadence
from ddpcore.engine.loader_options import check_loader_options
from ddpcore.engine.loop import BATCHES, Loop, LoopOptions
from ddpcore.engine.loss_weights import LossWeights
from ddpcore.engine.measuring import Measuring
from ddpcore.engine.metrics.log import open_log
from ddpcore.engine.metrics.watched import EarlyStopping
from ddpcore.engine.saving import CheckpointOptions, Saving
from ddpcore.engine.seeds import seed_everything
from ddpcore.engine.stop_agreement import StopReason, new_group_of_all
from ddpcore.engine.stop_signals import Deadline
from ddpcore.engine.updates import Updates, moving_average
from ddpcore.errors import EngineUseError, WrapError
from ddpcore.parallel.comm_hooks import weights_refused_by
from ddpcore.parallel.fully_sharded import is_fully_sharded
from ddpcore.parallel.wrapping import WrapOptions, accumulate, unwrap, wrap
from ddpcore.process_group.open_group import TIMEOUT_S, GroupOptions, open_process_group
from ddpcore.samplers.arguments import check_order, num_samples_of_dataset
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.order import SequentialOrder, ShuffledOrder
from ddpcore.samplers.sampler_agreement import make_same_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel
    from torch.utils.data import Dataset

    from ddpcore.checkpoint import Stateful
    from ddpcore.engine.batches import MicroBatch
    from ddpcore.engine.loader_options import TrainingLoaderOptions
    from ddpcore.engine.metrics.log import Logger
    from ddpcore.placement import Placement
    from ddpcore.samplers.order import Order

_SECONDS = "a finite number of seconds, 0 or more, or None"
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Engine(Measuring):
    """One rank of a training. A context manager: what it has opened, it closes.

    Attributes:
        placement: This rank among all, and among those of its node.
        device: Where models and batches are brought to.

    Args:
        seed: Seed of the weights, of the order of samples, and of what steps draw.
        precision: "fp32", "bf16" (autocast) or "fp16" (autocast with a scaled loss).
        log_dir: Rank 0 writes metrics.jsonl, and TensorBoard's files if tensorboard is installed, here; None for none.
        log_every: Steps or epochs between lines of metrics.
        deadline: Unix time, in seconds, by which training should have stopped at a boundary; by default two minutes
            before Slurm ends the job, which it is asked for again and again; less before the end of a short job.
        stop_patience_s: How long after SIGTERM the rank may take to reach an agreed stop before it ends like any
            other program; by default ten steps, at least 2 and at most 25 s.
        group_options: Options of `open_process_group`: `device`, `backend`, `timeout_s`, `init_method` and so on; see
            `GroupOptions`.

    Raises:
        CadenceError: `log_every` is no cadence in steps or epochs.
        EngineUseError: There is no such precision.
        DdpcoreError: The ranks do not come together; see `open_process_group`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        precision: str = "fp32",
        log_dir: str | Path | None = None,
        log_every: str = "20 steps",
        deadline: float | None = None,
        stop_patience_s: float | None = None,
        **group_options: Unpack[GroupOptions],
    ) -> None:
        check_whole(EngineUseError, "seed", seed, least=0, most=(1 << 64) - 1)
        for name, number in (("deadline", deadline), ("stop_patience_s", stop_patience_s)):
            if number is not None:
                most = MAX_SECONDS if name == "stop_patience_s" else 1e12
                check_number(EngineUseError, name, number, range_=(BELOW_ZERO, most), wanted=_SECONDS)
        if log_dir is not None:
            check_path(EngineUseError, "log_dir", log_dir)
        if precision not in tuple(_DTYPES):
            raise EngineUseError(f"no precision is called {precision!r}: use one of {', '.join(_DTYPES)}")
        cadence = parse_cadence(log_every, Unit.STEP, Unit.EPOCH)
        with ExitStack() as closing:
            opened = closing.enter_context(open_process_group(**group_options))
            self.placement: Placement = opened.placement
            self.device: torch.device = opened.device
            self._timeout_s = float(group_options.get("timeout_s", TIMEOUT_S))
            self._control_group = new_group_of_all(self._timeout_s) if self.placement.world_size > 1 else None
            log = open_log(log_dir, is_first=self.is_first)
            if log is not None:
                closing.callback(log.close)
            self._closing = closing.pop_all()
        options = LoopOptions(
            seed=seed,
            rank=self.placement.rank,
            device=self.device,
            control_group=self._control_group,
            log=log,
            log_every=cadence,
            deadline=Deadline(deadline, is_asking=self.is_first),
            stop_patience_s=stop_patience_s,
            timeout_s=self._timeout_s,
        )
        self._seed = seed
        self._dtype = _DTYPES[precision]
        self._weights = LossWeights(self.device, self.placement.world_size, self._control_group, self._timeout_s)
        self._updates = self._closing.enter_context(Updates(self.device, self._weights, is_scaled=precision == "fp16"))
        self._loop = Loop(options, self._updates)
        if precision == "fp16":
            self._loop.add_part("scaler", self._updates.scaler)
        self._models: list[nn.Module] = []
        self._micro_batch: MicroBatch | None = None
        self._num_local = 1
        self._is_static = False
        seed_everything(seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (self._loop.where or not ends_well(error)):
            # Before the rest of the end, which may take a while: the others want to know why it comes.
            leave_notice(error, self._loop.where)
            self._closing.__exit__(kind, error, trace)
            return
        with self._closing:
            self._loop.leave()
            self._loop.write_metrics()

    @property
    def is_first(self) -> bool:
        """True on global rank 0."""
        return self.placement.rank == 0

    @property
    def step(self) -> int:
        """Finished steps, over all attempts. In the loop's body the running step is `step + 1`: it is not finished."""
        return self._loop.step

    @property
    def stop_reason(self) -> StopReason:
        """Why `steps` ended before its time; `StopReason.NONE` when it did not."""
        return self._loop.stop_reason

    def wrap(self, model: nn.Module | Callable[..., Any], **options: Unpack[WrapOptions]) -> nn.Module:
        """Bring a model to the device and wrap it for this job; without other ranks it stays as it is.

        Args:
            model: With equal weights on all ranks or not: rank 0's count. Compiled by `torch.compile` or not. One that
                `fully_shard` has sharded stays as it is.
            options: Options of `ddpcore.parallel.wrap`: `sync_batchnorm`, `comm_hook`, `static_graph` and all of DDP's.
        """
        if not isinstance(model, nn.Module):
            raise refuse(WrapError, "model", model, "a torch.nn.Module")
        wrapped = wrap(model.to(self.device), device=self.device, **options)
        self._models.append(wrapped)
        self._weights.refused = self._weights.refused or weights_refused_by(options.get("comm_hook"))
        self._is_static |= wants_equal_forwards(unwrap(wrapped)) or bool(options.get("static_graph"))
        return wrapped

    def ema(self, model: nn.Module, decay: float = 0.999) -> AveragedModel:
        """Return a copy of a model that follows it as an exponential moving average, once a step.

        Every rank keeps its own, without communication: their parameters are equal. Buffers of whole numbers are
        copied, not averaged. Name it in `checkpoint` to have it saved, and give it to `evaluate`.
        """
        check_is(EngineUseError, "model", model, nn.Module, "a torch.nn.Module")
        check_number(EngineUseError, "decay", decay, range_=(BELOW_ZERO, 1.0), wanted="a number from 0 to 1")
        source = unwrap(model)
        if is_fully_sharded(source):
            raise EngineUseError("a fully sharded model cannot be copied: an average of it is not kept")
        average = moving_average(source, decay)
        self._updates.follow(average, source)
        return average

    def loader(  # noqa: PLR0913 - what a loader can be asked for, with defaults
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        order: Order | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        rank_weights: Sequence[int] | None = None,
        name: str = "train",
        **options: Unpack[TrainingLoaderOptions],
    ) -> Batches:
        """Return the data set in global batches, dealt out to the ranks: exact, and resumable at any number of ranks.

        Args:
            dataset: Map-style, the same on every rank.
            global_batch_size: Samples of one step, over all ranks and micro-batches.
            order: Order of the samples; by default another random one each epoch.
            shuffle: False for the data set's own order; not together with `order`.
            drop_last: Leave out an epoch's last global batch if it is not full. Otherwise it is smaller, and counts
                accordingly.
            rank_weights: A whole number for each rank, not for each sample: its share of every batch in proportion.
                Equal by default. The model's final weights do not depend on it. To draw samples by weights, give
                `order=WeightedOrder(weights)`.
            name: Under which a checkpoint keeps the cursor: give each of several loaders its own.
            options: `num_workers`, `prefetch`, and more of torch's DataLoader: see `TrainingLoaderOptions`.

        Raises:
            EngineUseError: There is a loader of this name, or `order` comes with `shuffle=False`.
            DdpcoreError: The data set, the order or the batch size make no sense, or differ between ranks.
        """
        check_text(EngineUseError, "name", name)
        check_flag(EngineUseError, "shuffle", shuffle)
        check_loader_options({one: value for one, value in options.items() if one != "prefetch"})
        if isinstance(dataset, DataLoader):
            raise EngineUseError(
                "loader makes the DataLoader itself, since the ranks' shares must fit each other: give it "
                "loader.dataset, and options such as num_workers or collate_fn by name"
            )
        if order is not None and not shuffle:
            raise EngineUseError("order and shuffle=False are two orders: leave out shuffle, the order is as it is")

        def make_sampler() -> ElasticBatchSampler:
            num_samples = num_samples_of_dataset(dataset)
            default = ShuffledOrder(num_samples, self._seed) if shuffle else SequentialOrder(num_samples)
            if order is not None:
                check_order(order, num_samples)
            return ElasticBatchSampler(order or default, global_batch_size, weights=rank_weights, drop_last=drop_last)

        sampler = make_same_everywhere(make_sampler)
        self._loop.add_part(f"{BATCHES}{name}", sampler)
        return Batches(dataset, sampler, device=self.device, placement=self.placement, seed=self._seed, **options)

    def checkpoint(  # noqa: PLR0913 - what can stay, with defaults
        self,
        directory: str | Path,
        *,
        every: str,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Mode = "min",
        resume: bool = True,
        **objects: Stateful,
    ) -> bool:
        """Save checkpoints here, and go on from the latest valid one if there is one. Every rank calls it; blocks.

        Call it once, when model and optimizer are ready and before `steps`. Saved are the objects, the cursors of all
        loaders, random states, the step and the goodput.

        Args:
            directory: The same path on every rank.
            every: "100 steps", "1 epoch" or "10 min"; where gradients add up over steps, at steps with an update.
            keep_last: Latest checkpoints that stay; None keeps all.
            keep_every: Checkpoints whose step is a multiple of it stay for ever.
            keep_best: Checkpoints with the best `metric` that stay besides, for `load_best`; None for none. A step that
                logs the metric is saved at once if it is among them.
            metric: Name of what `log` is given in the steps that measure it, as in
                `engine.log(**engine.evaluate(...))`; the ranks meet there to agree on its mean. What is logged between
                two `steps` decides nothing, and is an error in the second.
            mode: "min" if the least value is best, or "max".
            resume: False starts over: what lies there goes when it is too old for `keep_last`, and does not count for
                `keep_best`.
            objects: Models, optimizers, schedules, averages, by the name they get in the checkpoint.

        Returns:
            True if training goes on from a checkpoint: `step` is where.

        Raises:
            CheckpointMismatchError: The checkpoint is one of other objects. Nothing has been touched.
            CadenceError: `every` is no cadence.
            EngineUseError: An object cannot be saved, or it is too late: see above.
        """
        self._loop.check_takes_saving()
        check_flag(EngineUseError, "resume", resume)
        options = CheckpointOptions(Retention(keep_last, keep_every, keep_best, metric, mode), self._timeout_s)
        saving = Saving(directory, every=every, options=options, objects=objects)
        self._closing.enter_context(saving)
        if metric is not None:
            self._loop.watched.watch(metric)
        return self._loop.set_saving(saving, resume=resume)

    def load_best(self) -> int:
        """Set the objects of `checkpoint` back to the one with the best metric; return its step. Every rank calls it.

        Blocks. For what comes after the loop, such as a last evaluation; `step` stays as it is.

        Raises:
            EngineUseError: `checkpoint` was not called with `keep_best`, or no step has logged the metric.
            CheckpointInvalidError: None of those with the metric is sound.
        """
        return self._loop.load_best()

    def early_stopping(self, metric: str, *, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> None:
        """Stop all ranks once a metric has not improved so many times. Call it before `steps`.

        The count is in every checkpoint: a resumed run goes on with it, and one that had stopped does no more steps.
        `stop_reason` is then `StopReason.EARLY`.

        Args:
            metric: Name of what `log` is given in the steps that measure it.
            patience: Values in a row, each no better than the best, after which training stops.
            mode: "min" if the least value is best, or "max".
            min_delta: By how much more a value has to be better to count.

        Raises:
            EngineUseError: It comes too late, or a second time for this metric, or an argument makes no sense.
        """
        check_text(EngineUseError, "metric", metric)
        check_whole(EngineUseError, "patience", patience)
        check_retention(EngineUseError, Retention(mode=mode))
        check_number(EngineUseError, "min_delta", min_delta, range_=(BELOW_ZERO, 1e300), wanted="a number, 0 or more")
        self._loop.stop_early(metric, EarlyStopping(patience, mode, min_delta))

    def steps(self, batches: Batches, *, until: str) -> Generator[Batch, None, None]:
        """Yield a batch for each step until training is over, the same number of times on every rank.

        Between steps the ranks agree on stops and checkpoints; at the end, early or not, a last checkpoint is written.
        To end it early call `stop`. A rank that leaves it alone, by `break` or `return`, is an error that names it.

        Args:
            batches: Batches of `loader`.
            until: "1000 steps" or "3 epochs", counted from the first attempt's beginning.

        Raises:
            CadenceError: `until` is no such text.
            EngineUseError: `until` or updates differ between ranks, or a metric that decides was logged in no step.
            SamplerStateError: The checkpoint's cursor belongs to other data, or to a loader of another name.
        """
        check_is(EngineUseError, "batches", batches, Batches, "what engine.loader has returned")
        contents = self._loop.run(batches, until)
        for content in contents:
            batch = Batch(content, batches, self._in_micro_batch, is_static=self._is_static)
            self._num_local = batch.num_samples
            yield batch
        self._loop.check_not_left(contents)

    def backward(self, loss: Tensor, *, weight: Tensor | float | None = None) -> None:
        """Add a micro-batch's gradients, weighted so that the step's gradient is the mean over the global batch.

        Args:
            loss: The mean over this micro-batch's samples, one element; with `weight` the mean over what it counts.
            weight: How much this loss counts among all since the last update, on all ranks: its number of tokens, for
                one. A number or a tensor, on an accelerator too, where nobody waits for it. With 0 it counts nothing,
                but has to be finite. Every rank gives one in every micro-batch, or none does; `update` divides by
                their sum.

        Raises:
            EngineUseError: Outside of `micro_batches`, the loss is not a mean, or the weights do not go together.
        """
        micro_batch = self._micro_batch
        if micro_batch is None:
            raise EngineUseError("backward outside of a micro-batch: call it in `for ... in batch.micro_batches():`")
        check_is(EngineUseError, "loss", loss, Tensor, "a tensor, the mean loss of a micro-batch")
        if not loss.requires_grad:
            raise EngineUseError(
                "backward: this loss depends on no parameter that is trained, or was computed without gradients"
            )
        if loss.numel() != 1 or loss.is_complex():
            raise EngineUseError(
                f"backward wants the mean loss of a micro-batch, this one is {loss.dtype} of shape {tuple(loss.shape)}"
            )
        self._updates.backward(loss, weight, micro_batch)

    def schedule(
        self, schedule: LRScheduler, *, every: str | None = None, metric: str | None = None, name: str = "schedule"
    ) -> None:
        """Have a learning rate's schedule step by itself, and its state saved with every checkpoint.

        It steps in each `update` of its optimizer, unless fp16's overflow has left out that step. Do not call its
        `step`, and name its optimizer in `checkpoint`, which holds the present learning rate.

        Args:
            schedule: One of torch.optim.lr_scheduler, with its optimizer.
            every: "1 epoch" or "10 steps" for one that counts these instead of updates.
            metric: For `ReduceLROnPlateau`: what `log` is given in the steps that measure it. The schedule steps with
                each value, the same on all ranks.
            name: Under which a checkpoint keeps it: give each of several schedules its own.

        Raises:
            CadenceError: `every` is no such text.
            EngineUseError: There is a schedule of this name, or `every` and `metric` do not go with it.
        """
        members = ("step", "optimizer", "state_dict", "load_state_dict")
        check_has(EngineUseError, "schedule", schedule, members, "a schedule of torch.optim.lr_scheduler")
        check_text(EngineUseError, "name", name)
        cadence = None if every is None else parse_cadence(every, Unit.STEP, Unit.EPOCH)
        if metric is not None:
            check_text(EngineUseError, "metric", metric)
        plateau = schedule if isinstance(schedule, ReduceLROnPlateau) else None
        if (plateau is None) != (metric is None) or (metric is not None and cadence is not None):
            raise EngineUseError(
                'schedule(plateau, metric="val_loss") is for ReduceLROnPlateau alone, which steps with each value of it'
            )
        self._loop.add_part(f"schedule {name}", schedule)
        if plateau is not None and metric is not None:
            self._loop.watched.watch(metric, plateau.step)
        else:
            self._updates.schedule(schedule, cadence)

    def update(self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None) -> Tensor | None:
        """Unscale and clip the gradients, take the optimizer's step and clear them.

        Args:
            optimizer: Optimizer of a wrapped model; with several, call it for each in the same steps.
            clip_norm: The most that the gradients' norm may be, above 0; `math.inf` only measures it. None leaves them.

        Returns:
            The norm before clipping, on the device; None without `clip_norm`.

        Raises:
            EngineUseError: `clip_norm` is not above 0, this is no optimizer, or the last micro-batch is still to come.
        """
        check_has(EngineUseError, "optimizer", optimizer, ("step", "zero_grad", "param_groups"), "an optimizer")
        if clip_norm is not None:
            check_number(EngineUseError, "clip_norm", clip_norm, wanted="a number above 0, or None not to clip")
        return self._updates.update(optimizer, clip_norm)

    def add_logger(self, logger: Logger) -> None:
        """Send this rank's lines of metrics, means over all ranks, to `wandb.Run.log` or `mlflow.log_metrics` too.

        As a rule on the first rank alone: `if engine.is_first: engine.add_logger(wandb.init().log)`. It is called on
        the main thread between two steps; what it raises ends the training.

        Raises:
            EngineUseError: It is no function.
        """
        self._loop.add_logger(logger)

    def is_due(self, every: str) -> bool:
        """Return whether the running step completes a multiple of so many steps or epochs: the same on every rank.

        Args:
            every: "200 steps" or "1 epoch".

        Raises:
            CadenceError: `every` is no such text.
        """
        return self._loop.is_due(parse_cadence(every, Unit.STEP, Unit.EPOCH))

    def stop(self) -> None:
        """Ask all ranks to end `steps` soon, behind an update and a checkpoint; one rank's wish is enough."""
        self._loop.wants_stop = True

    @contextmanager
    def _in_micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        self._micro_batch = micro_batch
        self._updates.take(micro_batch)
        try:
            with accumulate(*self._models, is_last=micro_batch.is_last):
                yield
        finally:
            self._micro_batch = None
