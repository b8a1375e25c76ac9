"""Saves one checkpoint on all ranks together, through a writer process beside each trainer.

`Saver`: every rank takes its state apart; all meet, and wait until no writer is at work any more; the leader of each
site makes the temporary directory; all meet once more and know that it is there; each rank copies its part and gives it
to its writer. Whatever goes wrong before the copy is raised by this call, on every rank; what goes wrong after it, by
the next one.

`WriterProcess` is the trainer's side of a writer process: it starts the writer, gives it jobs, and receives how they
ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcore.agreement import common_problem
from ddpcore.checkpoint.formats import MAX_COUNT, file_name
from ddpcore.checkpoint.save_plan import SavePlan
from ddpcore.checkpoint.snapshot import Snapshot
from ddpcore.errors import CheckpointCallError, CheckpointDirectoryError, CheckpointError, CheckpointWriteError
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpcore.checkpoint.catalog import Catalog
    from ddpcore.checkpoint.meeting import Meeting, Site

WRITER = Path(__file__).with_name("writer.py")

END_S = 600.0
"""Seconds that the end of a program waits for its last checkpoint. A disk that needs more for one share hangs."""


class WriterProcess:
    """Keeps one writer process, replaced if it has died. It does one job at a time.

    Methods do not block unless documented. `memory_fd` is the memfd that holds its jobs.
    """

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._job_number = 0
        self._problem: str | None = ""
        self._follows = False
        self._undeleted: list[str] = []

    @property
    def is_busy(self) -> bool:
        """True from a job on until its result has been taken (`poll`)."""
        return self._problem is None

    @property
    def only_follows(self) -> bool:
        """True if the last job failed because something else had, most likely in another rank."""
        return self._follows

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a writer unless one lives, or is at work: `poll` notices whether that one has died. Raises OSError."""
        if self.is_busy or (self._process is not None and self._process.poll() is None):
            return
        self._drop()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: signals for the trainer's group and the terminal's Ctrl-C are not for it. No
            # inherited output: who reads the trainer's to its end would wait for the writer.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WRITER), str(self._memory_fd), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._memory_fd],
                start_new_session=True,
                cwd="/",
                # Whoever looks for a rank by its environment must not find the writer.
                env={name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK"}},
            )
        self._socket = ours
        self._buffer = b""

    def submit(self, job: dict[str, Any]) -> None:
        """Give the writer, which is started and not busy, a job."""
        assert self._socket is not None
        assert not self.is_busy
        self._job_number += 1
        self._problem = None
        self._follows = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A writer that has just died is found out by `poll`.
            self._socket.sendall(json.dumps({"number": self._job_number, **job}).encode() + b"\n")

    def poll(self, timeout_s: float = 0.0) -> str | None:
        """Return the last job's result: "" is success, None is that it is running. Blocks for the time-out."""
        deadline_s = time.monotonic() + timeout_s
        while self._listen(0.0 if not self.is_busy else max(0.0, deadline_s - time.monotonic())):
            pass
        return self._problem

    def take_undeleted(self) -> list[str]:
        """Return what the writer could not delete since the last call, and why."""
        taken, self._undeleted = self._undeleted, []
        return taken

    def refuse(self, problem: str) -> None:
        """Note a problem that came before the writer could get its job."""
        self._problem = problem

    def forget(self, patience_s: float) -> None:
        """Give up the present job; blocks until it is over, or kills the writer in time."""
        if self._socket is not None and self.is_busy:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(json.dumps({"abandon": self._job_number}).encode() + b"\n")
            if self.poll(patience_s) is None:
                self._kill()
        self._problem = ""

    def end(self, patience_s: float = END_S) -> None:
        """Let the writer finish and end; blocks until it has, or kills it in time."""
        self.poll()
        if self._process is None:
            return
        if self._socket is not None:
            # Closing alone tells the writer nothing while a forked child, a data loader's worker, has the socket too.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._close_socket()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._kill()
        self._drop()

    def _listen(self, timeout_s: float) -> bool:
        """Take one message, or the news that the writer has died; return whether there may be more."""
        if self._socket is None:
            return False
        # Not select(), which knows only the first 1,024 files that a program has open.
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(timeout_s * 1000.0):
            return False
        try:
            chunk = self._socket.recv(65_536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self._bury()
            return False
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._undeleted += message.get("undeleted", [])
            if message["number"] == self._job_number and "problem" in message:
                self._problem = message["problem"]
                self._follows = message.get("follows", False)
        return True

    def _bury(self) -> None:
        """Take note of a writer's death, and leave no zombie."""
        assert self._process is not None
        status = self._process.wait()
        how = f"was ended by {signal.strsignal(-status)}" if status < 0 else f"has ended with status {status}"
        if self._problem is None:
            self._problem = f"its writer process {how} before it was done"
        self._drop()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._drop()

    def _drop(self) -> None:
        self._close_socket()
        self._process = None

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_log = logging.getLogger(__name__)

SLICE_S = 0.1
"""How long ranks look at their writers before they exchange the results again."""

ABANDON_S = 10.0
"""How long a writer may take to give up; one that hangs in the disk is killed."""

MANIFEST_ROOM_BYTES = 4 << 20


class Saver:
    """One rank's part in all saves of a run.

    `catalog` is None on all ranks but the leader of a site. `run` is the same on all ranks, and no other run's.
    `last_sequence` is the highest sequence number in any directory of this run. `last_step` is the step of the last
    checkpoint known to be published on every site, `since` the sequence number of the first checkpoint of this
    training; None before it has loaded or saved one.
    """

    def __init__(
        self, root: Path, site: Site, meeting: Meeting, *, catalog: Catalog | None, run: str, last_sequence: int
    ) -> None:
        self._root = root
        self._site = site
        self._meeting = meeting
        self._catalog = catalog
        self._run = run
        self._sequence = last_sequence
        self._world_size = current_placement().world_size
        self._snapshot = Snapshot()
        self._writer = WriterProcess(self._snapshot.fd)
        self._step_in_flight: int | None = None
        self.last_step: int | None = None
        self.since: int | None = None

    @property
    def sequence(self) -> int:
        """Sequence number of the last checkpoint that was begun, in this run or before it."""
        return self._sequence

    def go_on(self, since: int) -> None:
        """Count what is saved to the training whose first checkpoint has this sequence number."""
        self.since = since
        if self._catalog is not None:
            self._catalog.since = since

    def prepare(self, state: object, per_rank: object) -> None:
        """Make ready for a save of such states; see `Checkpointer.prepare`."""
        content = SavePlan(state, per_rank, self._site).content()
        self._start_writer()
        try:
            self._snapshot.prepare(content.num_bytes + MANIFEST_ROOM_BYTES, content.cuda_device())
        except (OSError, MemoryError) as error:
            _log.warning("memory for checkpoints could not be made ready: %s", error)

    def save(self, step: int, state: object, per_rank: object, metrics: Mapping[str, float]) -> None:
        """Save; see `Checkpointer.save`."""
        call = f"save(step={step})"
        plan, error = None, None
        try:
            check_step(step)
            plan = SavePlan(state, per_rank, self._site)
            self._start_writer()
        except CheckpointError as problem:
            error = problem
        own = {"digest": plan.digest if plan else "", "metrics": dict(metrics)}
        answers = self.settle(call, error, own)
        assert plan is not None
        self._meeting.compare(call, [answer["digest"] for answer in answers], plan.flat.listing)
        self._sequence += 1
        if self.since is None:
            self.go_on(self._sequence)
        checkpoint_id = f"{self._run}.{self._sequence}"
        # Rank 0's on all sites, which are to keep the same checkpoints.
        measured: dict[str, float] = answers[0]["metrics"]
        temporary = self._begin(call, step, checkpoint_id, measured)
        self._step_in_flight = step
        failure = "its share could not be copied"
        try:
            self._take(plan, temporary, checkpoint_id, measured)
            failure = ""
        except (OSError, MemoryError, CheckpointDirectoryError) as error:
            failure += f": {error}"
        finally:
            if failure:
                # The others go on, and hear of it at their next call; so does this one, unless it is about to end.
                self._writer.refuse(failure)

    def settle(self, call: str, error: CheckpointError | None, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Meet until no rank's writer is at work; blocks. Return each rank's value.

        Raises CheckpointWriteError if a write has failed on any rank, and the error of any rank's call.
        """
        while True:
            status = self._writer.poll()
            own = {**value, "status": status, "follows": self._writer.only_follows}
            answers = self._meeting.agree(call, error, own)
            problems = [answer["status"] or "" for answer in answers]
            causes = ["" if answer["follows"] else problem for answer, problem in zip(answers, problems, strict=True)]
            # Who only follows may report before the one that it follows, whose writer then is still at work.
            is_busy = any(answer["status"] is None for answer in answers)
            if any(causes) or (any(problems) and not is_busy):
                self._fail(causes if any(causes) else problems)
            if all(answer["status"] == "" for answer in answers):
                self._finish()
                return answers
            self._writer.poll(SLICE_S)

    def settle_alone(self) -> None:
        """Wait for this rank's writer where there is no group left; blocks. Raises CheckpointWriteError."""
        while (status := self._writer.poll(SLICE_S)) is None:
            pass
        if status:
            self._fail([status])
        self._finish()

    def finalizer(self) -> tuple[Any, ...]:
        """Return a function that lets the writer finish and lets go of everything, and its arguments."""
        return _end, os.getpid(), self._writer, self._snapshot, self._catalog

    def _start_writer(self) -> None:
        try:
            self._writer.start()
        except OSError as error:
            raise CheckpointDirectoryError(f"no process can be started to write checkpoints: {error}") from error

    def _begin(self, call: str, step: int, checkpoint_id: str, metrics: Mapping[str, float]) -> str:
        """Return the name of the new checkpoint's temporary directory, once all ranks know that there is one."""
        name, error = "", None
        if self._catalog is not None:
            try:
                name = self._catalog.begin(step, self._sequence, checkpoint_id, metrics)
            except CheckpointDirectoryError as problem:
                error = problem
        has_met = False
        try:
            answers = self._meeting.agree(call, error, {"temporary": name})
            has_met = True
        finally:
            if self._catalog is not None and not has_met:
                self._catalog.drop()
        return str(answers[self._site.ranks[0]]["temporary"])

    def _take(self, plan: SavePlan, temporary: str, checkpoint_id: str, metrics: Mapping[str, float]) -> None:
        """Copy this rank's share and give it to the writer."""
        assert self._step_in_flight is not None
        content, body = plan.content(), b""
        if self._catalog is not None:
            body = plan.manifest_body(
                self._step_in_flight, self._sequence, checkpoint_id, self._world_size, metrics, self.since or 0
            )
        self._snapshot.reserve(content.num_bytes + len(body))
        self._snapshot.write(0, content.header)
        self._snapshot.copy(content.items)
        self._snapshot.write(content.num_bytes, body)
        # Again: while the ranks have met, and while this one has copied, the kernel may have killed it for its memory.
        self._start_writer()
        self._writer.submit(
            {
                "directory": str(self._root / temporary),
                "file": file_name(self._site.rank),
                "bytes": content.num_bytes,
                "publish": self._catalog.order(plan.file_names(), len(body)) if self._catalog is not None else None,
            }
        )

    def _finish(self) -> None:
        if self._catalog is not None:
            self._catalog.finish(self._writer.take_undeleted())
        if self._step_in_flight is not None:
            self.last_step = self._step_in_flight
        self._step_in_flight = None

    def _fail(self, problems: list[str]) -> None:
        """Give up what is in flight, on every rank, and raise the reason."""
        step = self._step_in_flight
        self._step_in_flight = None
        self._writer.forget(ABANDON_S)
        if self._catalog is not None:
            self._catalog.drop()
        assert step is not None
        raise CheckpointWriteError(step, [common_problem(problems)])


def check_step(step: int) -> None:
    """Raise CheckpointCallError for what is no step."""
    if type(step) is not int or not 0 <= step <= MAX_COUNT:
        raise CheckpointCallError(f"{step!r} is no step: give the number of steps done")


def _end(pid: int, writer: WriterProcess, snapshot: Snapshot, catalog: Catalog | None) -> None:
    # A forked child holds copies of all this, which are the parent's to end.
    if os.getpid() == pid:
        writer.end()
        snapshot.close()
        if catalog is not None:
            catalog.lock.release()
