"""Ranks in a tenth of a second: each is forked from a process that has imported torch, and the test, already.

    def add_up(value: int) -> float:            # runs in every rank, with torchrun's variables and a gloo group
        total = torch.tensor([float(value + dist.get_rank())])
        dist.all_reduce(total)
        return total.item()

    def test_sums() -> None:
        assert run_ranks(add_up, 4, 10) == [46.0] * 4

A rank function is a top-level function of any file; arguments and results are pickled (within a test, nothing else).
torchrun itself is in `tests/support/ranks.py`: use that where launching is the subject.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.ranks import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

PATIENCE_S = 120.0
"""What takes a second on an idle machine, and what hangs."""
START_S = 60.0
"""torch's import on a busy machine."""


@dataclass(frozen=True)
class Outcome:
    """How one rank has ended.

    Attributes:
        error: "TypeName: message" of what it raised, or "".
        error_type: The raised exception's qualified name, or "".
        trace: The traceback, or "".
        status: The wait status as `os.waitstatus_to_exitcode` gives it: 0, or minus the signal that ended the rank.
        log: What the rank has printed, stdout and stderr.
        returned: What the function returned in a tuple of one, or an empty tuple if it did not return.
    """

    error: str
    error_type: str
    trace: str
    status: int
    log: str
    returned: tuple[Any, ...]

    @property
    def value(self) -> Any:
        """What the function returned; the test fails with what the rank has told if it did not return."""
        assert self.returned, f"the rank has not returned, exit status {self.status}\n{self.trace}\n{self.log[-3000:]}"
        return self.returned[0]


class WarmRanks:
    """The ranks of one test, killed by the end of the `with` block. They run in `directory`, which goes with them.

    Args:
        function: Runs in every rank; top-level in its file.
        world_size: How many ranks.
        args: Of the function.
        env: More variables for every rank.
        num_nodes: Pretended nodes: local ranks count within world_size / num_nodes.
        has_group: False leaves the opening of the process group to the function.
        group_timeout_s: Of the opened group.
    """

    def __init__(
        self,
        function: Callable[..., object],
        world_size: int,
        *args: object,
        env: Mapping[str, str] | None = None,
        num_nodes: int = 1,
        has_group: bool = True,
        group_timeout_s: float = PATIENCE_S,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rd-"))
        request = {
            "file": function.__code__.co_filename,
            "name": function.__qualname__,
            "directory": str(self.directory),
            "world_size": world_size,
            "num_nodes": num_nodes,
            "env": dict(env or {}),
            "group_timeout_s": group_timeout_s if has_group else 0.0,
        }
        (self.directory / "args.pickle").write_bytes(pickle.dumps(args))
        self._template = _template()
        self._template.ask(request)
        try:
            self.pids: list[int] = self._template.answer(START_S)["pids"]
        except BaseException:
            # Its late answers would be taken for those of the next test.
            self._template.kill()
            shutil.rmtree(self.directory)
            raise
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.pids:
            if pid not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._collect(PATIENCE_S)
        if len(self._statuses) < len(self.pids):
            self._template.kill()
        else:
            self._template.ask({"done": True})
        shutil.rmtree(self.directory)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], number)

    def log(self, rank: int) -> str:
        """Return what a rank has printed."""
        path = self.directory / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_file(self, name: str, timeout_s: float = PATIENCE_S) -> Path:
        """Wait until a rank has made this file in its working directory: how a rank tells the test where it is."""
        deadline_s = time.monotonic() + timeout_s
        while not (self.directory / name).exists():
            logs = "\n".join(self.log(rank) for rank in range(len(self.pids)))
            assert time.monotonic() < deadline_s, f"no file {name} within {timeout_s} s\n{logs}"
            time.sleep(0.005)
        return self.directory / name

    def status(self, rank: int, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of one rank, and return how it has ended (see `Outcome.status`)."""
        status = self.status_if_ended(rank, timeout_s)
        assert status is not None, f"rank {rank} has not ended within {timeout_s} s\n{self.log(rank)[-4000:]}"
        return status

    def status_if_ended(self, rank: int, within_s: float) -> int | None:
        """Wait for the end of one rank, but not for long: None if it has not ended."""
        deadline_s = time.monotonic() + within_s
        while self.pids[rank] not in self._statuses and time.monotonic() < deadline_s:
            self._take_answer(deadline_s - time.monotonic())
        return self._statuses.get(self.pids[rank])

    def outcomes(self, timeout_s: float = PATIENCE_S) -> list[Outcome]:
        """Wait for the end of every rank."""
        self._collect(timeout_s)
        alive = [rank for rank, pid in enumerate(self.pids) if pid not in self._statuses]
        if alive:
            for rank in alive:
                # Ranks that hang say where: the template has registered faulthandler for this signal.
                os.kill(self.pids[rank], signal.SIGUSR2)
            self._collect(1.0)
            logs = "\n".join(f"--- rank {rank}\n{self.log(rank)[-4000:]}" for rank in range(len(self.pids)))
            raise AssertionError(f"ranks {alive} have not ended within {timeout_s} s\n{logs}")
        return [self._outcome(rank) for rank in range(len(self.pids))]

    def _collect(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self._statuses) < len(self.pids):
            if not self._take_answer(deadline_s - time.monotonic()):
                return

    def _take_answer(self, timeout_s: float) -> bool:
        try:
            ended = self._template.answer(max(0.0, timeout_s))
        except TimeoutError:
            return False
        self._statuses[ended["pid"]] = ended["status"]
        return True

    def _outcome(self, rank: int) -> Outcome:
        path = self.directory / f"result-{rank}.pickle"
        result = pickle.loads(path.read_bytes()) if path.exists() else {}
        return Outcome(
            error=result.get("error", ""),
            error_type=result.get("error_type", ""),
            trace=result.get("trace", ""),
            status=self._statuses[self.pids[rank]],
            log=self.log(rank),
            returned=(result["value"],) if "value" in result else (),
        )


def run_ranks(function: Callable[..., object], world_size: int, *args: object, **options: Any) -> list[Any]:
    """Return what the function returned in each rank; fail the test if one did not return.

    Args:
        function: Runs in every rank; top-level in its file.
        world_size: How many ranks.
        args: Of the function.
        options: Of `WarmRanks`, and `timeout_s`.
    """
    outcomes = try_ranks(function, world_size, *args, **options)
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error or outcome.status]
    report = "\n".join(
        f"--- rank {rank}, exit status {outcome.status}\n{outcome.trace}\n{outcome.log[-3000:]}"
        for rank, outcome in failed
    )
    assert not failed, report
    return [outcome.value for outcome in outcomes]


def try_ranks(function: Callable[..., object], world_size: int, *args: object, **options: Any) -> Sequence[Outcome]:
    """Return how each rank has ended, well or not."""
    timeout_s = options.pop("timeout_s", PATIENCE_S)
    with WarmRanks(function, world_size, *args, **options) as ranks:
        return ranks.outcomes(timeout_s)


class _Template:
    """The process that ranks are forked from: one for all tests of a session."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_FR_BUFFER_SIZE": "64"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.rank_template", str(theirs.fileno())],
                cwd=Path(__file__).parents[2],
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._buffer = b""

    def ask(self, request: Mapping[str, object]) -> None:
        self._ours.sendall(json.dumps(request).encode() + b"\n")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._ours.settimeout(max(0.001, deadline_s - time.monotonic()))
            chunk = self._ours.recv(65_536)
            assert chunk, "the ranks' template process has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._ours.close()
        self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """End it with its ranks: the next test has another one."""
        self.process.kill()
        self.end()


_the_template: _Template | None = None


def _template() -> _Template:
    global _the_template  # noqa: PLW0603 - one for all tests of a session
    if _the_template is None or not is_alive(_the_template.process.pid):
        _the_template = _Template()
        atexit.register(_the_template.end)
    return _the_template


def template_pid() -> int | None:
    """Return the template's pid: it outlives a test, its children must not."""
    return _the_template.process.pid if _the_template is not None else None
