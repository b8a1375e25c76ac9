"""Where rank 0 writes metrics: JSON lines, and TensorBoard's files if tensorboard is installed."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddpcore.agreement import common_problem
from ddpcore.barriers.gates import exchange
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Mapping

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class Logger(Protocol):
    """What takes a line of metrics: `wandb.Run.log` and `mlflow.log_metrics` do, as they are."""

    def __call__(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Take a line."""


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
