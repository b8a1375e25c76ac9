"""Where rank 0 writes metrics: JSON lines, and TensorBoard's files if tensorboard is installed."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddpcore.agreement import common_problem
from ddpcore.barriers.named_barriers import exchange
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class Logger(Protocol):
    """Function that takes a line of metrics: `wandb.Run.log` and `mlflow.log_metrics` do, as they are."""

    def __call__(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Take a line."""


class MetricLog:
    """Writes lines to `metrics.jsonl` and TensorBoard's event files in one directory, which is made if absent.

    Only rank 0 opens it; raises OSError if it cannot be written to. A resumed run appends. A full disk does not end
    training: what could not be written is logged as an error, and the next line is tried.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._lines = FileIO(directory / METRICS_FILE, "ab", opener=_without_waiting)
        self._board = _open_board(directory)
        self._has_failed = False

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write one line. JSON knows no NaN: such a value is written as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "epoch": epoch, "wall_time": time.time(), **finite}  # noqa: TID251 - for people
        with self._forgiving():
            self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)
            self._has_failed = False

    def close(self) -> None:
        with self._forgiving():
            self._lines.close()
            if self._board is not None:
                self._board.close()

    def _append(self, line: bytes) -> None:
        num_bytes = os.fstat(self._lines.fileno()).st_size
        if (self._lines.write(line) or 0) < len(line):
            with contextlib.suppress(OSError):
                self._lines.truncate(num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Log the first error of several in a row."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                _log.error("training goes on without metrics in %s: %s", self._directory, error.strerror or error)
            self._has_failed = True


def open_log(log_dir: str | Path | None, *, is_first: bool) -> MetricLog | None:
    """Return rank 0's log, None on other ranks. Every rank calls it; blocks.

    Raises EngineUseError on every rank if rank 0 cannot write there.
    """
    if log_dir is None:
        return None
    log, problem = None, ""
    if is_first:
        try:
            log = MetricLog(Path(log_dir).expanduser())
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            problem = f"metrics cannot be written to {log_dir}: {why}; give another log_dir"
    problem = common_problem(exchange("engine: log_dir", problem))
    if problem:
        raise EngineUseError(problem)
    return log


def _without_waiting(path: str, flags: int) -> int:
    # A pipe under that name must not hang the training.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _open_board(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        _log.info("no TensorBoard files: install rankdeck[tensorboard] for them; %s has the metrics", METRICS_FILE)
        return None
    return SummaryWriter(str(directory))
