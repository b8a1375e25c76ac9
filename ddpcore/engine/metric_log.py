"""Metrics: means over micro-batches, steps and ranks, written to JSON lines and to TensorBoard by rank 0.

What a step logs stays a tensor where it was computed: nothing waits for an accelerator until a line is due.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpcore.agreement import common_problem
from ddpcore.barriers import exchange
from ddpcore.errors import EngineUseError, MetricMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class MetricMeans:
    """Weighted sums of what was logged since the last line. Main thread."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor | float]] = {}

    def add(self, name: str, value: Tensor | float, weight: float) -> None:
        """Take a value: a number or a tensor with one element.

        Args:
            name: Of the metric, the same on every rank.
            value: Already a mean over this rank's samples.
            weight: Those samples' number; 0 keeps the value out of the mean.
        """
        value = value.detach() if isinstance(value, torch.Tensor) else float(value)
        # A stand-in batch may well yield NaN, and NaN times nothing is NaN.
        weighted = value * weight if weight else 0.0
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] = entry[0] + weighted
        entry[1] = entry[1] + weight

    def take(self, group: ProcessGroup | None) -> dict[str, float]:
        """Return the mean of each metric over all ranks, and begin anew. Every rank calls it; blocks.

        Args:
            group: A gloo group of all ranks; None for a job of one rank.

        Raises:
            MetricMismatchError: The ranks have not logged the same metrics.
        """
        names = sorted(self._sums)
        sums_N2 = torch.tensor(  # noqa: N806 - N metrics; sum and weight
            [[float(part) for part in self._sums[name]] for name in names], dtype=torch.float64
        )
        self._sums = {}
        if group is not None:
            _check_names(names, group)
            dist.all_reduce(sums_N2, group=group)
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, sums_N2.tolist(), strict=True)
        }


def _check_names(names: list[str], group: ProcessGroup) -> None:
    """Keep ranks that log different things from adding up what does not belong together, or from hanging."""
    digest = zlib.crc32("\0".join(names).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] == -extremes[1]:
        return
    names_of_ranks = [set(json.loads(text)) for text in exchange("metrics", json.dumps(names))]
    everywhere = set.intersection(*names_of_ranks)
    for rank, own in enumerate(names_of_ranks):
        if own - everywhere:
            raise MetricMismatchError(
                f"rank {rank} has logged {', '.join(sorted(own - everywhere))} and other ranks have not: "
                "log on every rank, the means are taken over all of them"
            )


class MetricLog:
    """Where lines go: `metrics.jsonl` and TensorBoard's event files in one directory.

    Only rank 0 opens it. A resumed run appends.

    Args:
        directory: Made if absent.

    Raises:
        OSError: The directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = (directory / METRICS_FILE).open("a", encoding="utf-8")
        self._board = _open_board(directory)

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write one line. JSON knows no NaN: such a value is written as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "epoch": epoch, "wall_time": time.time(), **finite}  # noqa: TID251 - for people
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()
        if self._board is not None:
            self._board.close()


def open_log(log_dir: str | Path | None, *, is_first: bool) -> MetricLog | None:
    """Return rank 0's metrics, None on other ranks. Every rank calls it; blocks.

    Raises:
        EngineUseError: Rank 0 cannot write there; every rank hears of it.
    """
    if log_dir is None:
        return None
    log, problem = None, ""
    if is_first:
        try:
            log = MetricLog(Path(log_dir))
        except OSError as error:
            problem = f"metrics cannot be written to {log_dir}: {error.strerror}; give another log_dir"
    problem = common_problem(exchange("engine: log_dir", problem))
    if problem:
        raise EngineUseError(problem)
    return log


def _open_board(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        _log.info("no TensorBoard files: install rankdeck[tensorboard] for them; %s has the metrics", METRICS_FILE)
        return None
    return SummaryWriter(str(directory))
