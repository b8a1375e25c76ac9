"""The probe in one process: its thread, its sockets, and the marks of the program."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ddpcore.env import ProbeEnv, TorchrunEnv
from ddpcore.errors import UnknownPhaseError
from ddpcore.probe import probe, reporting, samples
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.stack import code_roots
from ddpcore.wire import (
    ENV_FAULTS,
    ENV_INBOX,
    DumpStacks,
    Fault,
    FaultKind,
    Phase,
    RankReport,
    SlowDown,
    decode_report,
    encode_faults,
    encode_request,
)
from ddpcore.wire_stacks import decode_stack_dump
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpcore.probe.samples import Counters

WAIT_S = 30.0
TORCHRUN = TorchrunEnv(
    rank=3,
    local_rank=1,
    world_size=4,
    local_world_size=2,
    node_rank=1,
    restart_count=0,
    master_addr="127.0.0.1",
    master_port=1,
)


class Inbox:
    """The agent's end: takes reports, keeps the newest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reports: list[RankReport] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(directory / "inbox.sock"))

    def newest(self) -> RankReport | None:
        while True:
            try:
                self.reports.append(decode_report(self._socket.recv(65_536)))
            except BlockingIOError:
                return self.reports[-1] if self.reports else None

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(autouse=True)
def fresh_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "marks", probe.Marks())


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def inbox(directory: Path) -> Iterator[Inbox]:
    inbox = Inbox(directory)
    yield inbox
    inbox.close()


def probe_env(directory: Path, faults: tuple[Fault, ...] = ()) -> ProbeEnv:
    return ProbeEnv(
        inbox=str(directory / "inbox.sock"),
        request_dir=str(directory),
        job_id="job",
        attempt=1,
        launcher_pid=None,
        launcher_namespace="",
        probed_pid=None,
        faults=faults,
    )


@pytest.fixture
def started(directory: Path, inbox: Inbox) -> Iterator[probe.Probe]:
    one = probe.Probe(TORCHRUN, probe_env(directory), code_roots(), FlightRecorder())
    one.start()
    yield one
    one.end()


def reported(inbox: Inbox, field: str, value: object) -> RankReport:
    """Return the first report that says so: by the time it is looked at there may be newer ones."""

    def found() -> RankReport | None:
        inbox.newest()
        return next((report for report in inbox.reports if getattr(report, field) == value), None)

    report = until(found, within_s=WAIT_S, what=f"a report with {field} == {value!r}")
    assert report is not None
    return report


def test_a_report_says_who_and_where_at_once(started: probe.Probe, inbox: Inbox) -> None:
    report = reported(inbox, "rank", 3)
    assert (report.pid, report.job_id, report.local_rank, report.world_size) == (os.getpid(), "job", 1, 4)
    assert report.phase is Phase.STARTING
    assert not report.recorder_missing
    # The first report may be of the moment before: pytest sets the test up, and is no place of a program.
    until(lambda: "tests" in str(getattr(inbox.newest(), "place", "")), within_s=WAIT_S, what="the line of this test")


def test_reports_keep_coming_and_count_on(started: probe.Probe, inbox: Inbox) -> None:
    third = reported(inbox, "report_seq", 3)

    assert [report.report_seq for report in inbox.reports[:3]] == [1, 2, 3]
    assert third.observed_s > 0.1
    assert third.probe_cpu_s > 0.0


def test_a_step_is_reported_with_its_loss(started: probe.Probe, inbox: Inbox) -> None:
    started.step(1, 5.5, 0)
    started.step(2, 4.5, 0)
    started.step(3, None, 1)

    report = reported(inbox, "step", 3)
    assert (report.loss, report.loss_first, report.epoch, report.steps_done) == (4.5, 5.5, 1, 3)


def test_optimizers_are_counted_from_the_second_step_on(started: probe.Probe, inbox: Inbox) -> None:
    started.count_step(1)
    assert probe.marks.step is None
    started.count_step(2)
    started.count_step(1)

    report = reported(inbox, "step", 2)
    assert (report.is_step_counted, report.steps_done, report.loss, report.epoch) == (True, 2, None, None)


def test_a_fault_at_the_first_counted_step_strikes_when_that_is_told(started: probe.Probe) -> None:
    started.faults.add(Fault(FaultKind.SLOW, rank=3, at_step=1, factor=1.5))
    started.count_step(1)
    assert started.faults.slow_factor == 1.0
    started.count_step(1)
    assert started.faults.slow_factor == 1.5


def test_a_program_that_resumes_behind_a_fault_is_not_struck_though_its_optimizer_was_heard_first(
    started: probe.Probe,
) -> None:
    started.faults.add(Fault(FaultKind.SLOW, rank=3, at_step=100, factor=1.5))
    for _ in range(9):
        started.count_step(1)
    started.step(5010, None, None)
    assert started.faults.slow_factor == 1.0


def test_what_a_fault_does_it_does_on_the_main_thread_alone(started: probe.Probe) -> None:
    started.faults.add(Fault(FaultKind.SLOW, rank=3, at_step=None, factor=1.5))
    trainer = threading.Thread(target=started.step, args=(1, None, None))
    trainer.start()
    trainer.join()
    assert started.faults.slow_factor == 1.0
    started.step(2, None, None)
    assert started.faults.slow_factor == 1.5


def test_a_program_that_says_its_steps_is_believed_for_good(started: probe.Probe, inbox: Inbox) -> None:
    for _ in range(3):
        started.count_step(1)
    started.step(1000, 5.5, 0)
    started.count_step(1)

    report = reported(inbox, "step", 1000)
    assert (report.is_step_counted, report.steps_done, report.loss_first) == (False, 1, 5.5)


def test_a_request_is_answered_and_rubbish_is_not(started: probe.Probe, inbox: Inbox, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        for datagram in (b"rubbish", encode_request(SlowDown(request_id=9, factor=3.0))):
            agent.sendto(datagram, str(directory / "rank-3.sock"))

    assert reported(inbox, "answered_request_id", 9).slow_factor == 3.0


def test_without_an_agent_it_drops_reports_and_goes_on(directory: Path) -> None:
    lonely = probe.Probe(TORCHRUN, probe_env(directory), code_roots(), FlightRecorder())
    lonely.start()
    until(lambda: lonely.num_dropped >= 2, within_s=WAIT_S, what="two dropped reports")

    inbox = Inbox(directory)
    assert reported(inbox, "rank", 3).report_seq >= 3
    lonely.end()
    inbox.close()


def test_its_end_sends_a_last_report_and_removes_its_socket(
    started: probe.Probe, inbox: Inbox, directory: Path
) -> None:
    reported(inbox, "rank", 3)
    started.step(41, None, None)

    started.end()

    newest = inbox.newest()
    assert newest is not None
    assert newest.step == 41
    assert not (directory / "rank-3.sock").exists()


def test_stacks_are_written_before_the_request_is_answered(started: probe.Probe, inbox: Inbox, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.sendto(encode_request(DumpStacks(request_id=4)), str(directory / "rank-3.sock"))

    reported(inbox, "answered_request_id", 4)

    dump = decode_stack_dump((directory / "rank-3.stacks.json").read_bytes())
    assert (dump.request_id, dump.rank, dump.pid) == (4, 3, os.getpid())
    assert dump.threads[0].name == "MainThread"
    assert "rankdeck-probe" not in [thread.name for thread in dump.threads]


def test_stacks_that_cannot_be_written_cost_the_probe_nothing(
    started: probe.Probe, inbox: Inbox, directory: Path
) -> None:
    (directory / "rank-3.stacks.new").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.sendto(encode_request(DumpStacks(request_id=4)), str(directory / "rank-3.sock"))

    reported(inbox, "answered_request_id", 4)
    reported(inbox, "report_seq", inbox.reports[-1].report_seq + 2)
    assert not (directory / "rank-3.stacks.json").exists()


def test_a_request_directory_that_cannot_be_costs_only_requests(directory: Path, inbox: Inbox) -> None:
    env = ProbeEnv(str(directory / "inbox.sock"), "/nowhere" * 20, "job", 1, None, "", None, ())
    one = probe.Probe(TORCHRUN, env, code_roots(), FlightRecorder())
    one.start()

    reported(inbox, "rank", 3)
    one.end()


class BrokenRecorder(FlightRecorder):
    """A recorder of a torch to come, whose private parts raise what they like."""

    def counters(self) -> Counters:
        raise ValueError("renamed")


def test_a_recorder_that_raises_ends_the_probe_and_nothing_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "TICK_S", 0.001)
    one = probe.Probe(TORCHRUN, probe_env(directory), code_roots(), BrokenRecorder())
    one.start()

    one._thread.join(WAIT_S)

    assert not one._thread.is_alive()


class StuckRecorder(FlightRecorder):
    """A recorder that takes longer than the interpreter's exit waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def counters(self) -> Counters:
        self.is_asked.set()
        self.may_answer.wait(WAIT_S)
        return super().counters()


def test_a_probe_that_is_stuck_while_the_program_ends_prints_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(probe, "EXIT_PATIENCE_S", 0.01)
    recorder = StuckRecorder()
    one = probe.Probe(TORCHRUN, probe_env(directory), code_roots(), recorder)
    one.start()
    assert recorder.is_asked.wait(WAIT_S)

    one.end()
    recorder.may_answer.set()
    one._thread.join(WAIT_S)

    assert (one._thread.is_alive(), printed) == (False, [])


def test_a_slow_fault_begins_at_its_step(directory: Path) -> None:
    fault = Fault(kind=FaultKind.SLOW, rank=3, at_step=2, factor=5.0)
    one = probe.Probe(TORCHRUN, probe_env(directory, (fault,)), code_roots(), FlightRecorder())

    one.step(1, None, None)
    assert one.faults.slow_factor == 1.0
    one.step(2, None, None)
    assert one.faults.slow_factor == 5.0
    one.start()
    one.end()


FREEZES = """
import sys, torch
from ddpcore.probe import bootstrap, probe
bootstrap.start_in_rank()
for step in range(1, 9):
    probe.report_step(step, 1.0)
print("went on")
"""


def test_a_freeze_strikes_after_its_step_has_been_reported(directory: Path, inbox: Inbox) -> None:
    fault = Fault(kind=FaultKind.FREEZE, rank=3, at_step=5)
    environment = os.environ | rank_environment(directory, fault)
    with subprocess.Popen([sys.executable, "-c", FREEZES], env=environment, stdout=subprocess.PIPE, text=True) as rank:
        _, status = os.waitpid(rank.pid, os.WUNTRACED)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        report = inbox.newest()
        assert report is not None
        assert (report.step, report.pid) == (5, rank.pid)
        assert report.place is not None
        assert (report.place.file, report.place.line) == ("<string>", 6)

        rank.send_signal(signal.SIGCONT)
        assert rank.communicate(timeout=30)[0] == "went on\n"
    newest = inbox.newest()
    assert newest is not None
    assert newest.step == 8


AWAITS_SIGNAL = """
import os, signal, torch
from ddpcore.probe import bootstrap
bootstrap.start_in_rank()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigtimedwait({signal.SIGUSR1}, 9).si_signo)
"""


def test_a_signal_that_the_program_waits_for_is_not_taken_by_the_probe(directory: Path) -> None:
    # As torchrun sets it: else numpy has a thread that takes signals.
    environment = os.environ | rank_environment(directory) | {"OMP_NUM_THREADS": "1"}
    rank = subprocess.run([sys.executable, "-c", AWAITS_SIGNAL], env=environment, stdout=subprocess.PIPE, check=False)
    assert (rank.returncode, rank.stdout) == (0, b"%d\n" % signal.SIGUSR1)


CLOSES_ALL = """
import os, sys, time, torch
from ddpcore.probe import bootstrap
bootstrap.start_in_rank()
time.sleep(0.5)
os.closerange(3, 256)
files = [open(f"{sys.argv[1]}/{name}", "w+b") for name in range(9)]
for file in files:
    file.write(b"own")
    file.flush()
    file.seek(0)
time.sleep(float(sys.argv[2]))
print(*{file.read() for file in files})
for file in files:
    file.write(b"own")
"""


@pytest.mark.parametrize("pause_s", [0, 1])
def test_the_files_of_a_program_that_has_closed_all_are_its_own(directory: Path, pause_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSES_ALL, str(directory), str(pause_s)],
        env=os.environ | rank_environment(directory),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'own'\n", "")
    assert {(directory / str(name)).read_bytes() for name in range(9)} == {b"ownown"}


def test_a_descriptor_that_the_program_has_closed_by_mistake_ends_the_probe(directory: Path) -> None:
    one = probe.Probe(TORCHRUN, probe_env(directory), code_roots(), FlightRecorder())
    one.start()

    assert one._requests.fd is not None
    os.close(one._requests.fd)
    one._thread.join(WAIT_S)

    assert not one._thread.is_alive()
    one.end()


STOPS_ITS_CHILD_AT_EXIT = """
import atexit, multiprocessing
context = multiprocessing.get_context("fork")
is_over = context.Event()
atexit.register(is_over.set)
import torch
from ddpcore.probe import bootstrap
bootstrap.start_in_rank()
context.Process(target=is_over.wait).start()
"""


def test_exit_handlers_that_stop_children_run_before_these_are_joined_and_the_last_report_comes_then(
    directory: Path, inbox: Inbox
) -> None:
    environment = os.environ | rank_environment(directory)
    subprocess.run([sys.executable, "-c", STOPS_ITS_CHILD_AT_EXIT], env=environment, timeout=WAIT_S, check=True)
    newest = inbox.newest()
    assert newest is not None
    assert newest.is_ending


def rank_environment(directory: Path, *faults: Fault) -> dict[str, str]:
    return {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        ENV_INBOX: str(directory / "inbox.sock"),
        ENV_FAULTS: encode_faults(list(faults)),
    }


def test_without_a_probe_a_step_is_nothing_and_never_an_error() -> None:
    probe.report_step(1, 2.0)
    probe.report_step(2, torch.ones(3), epoch=1)


@pytest.mark.parametrize(
    ("loss", "taken"),
    [
        (None, None),
        (2, 2.0),
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (torch.tensor([1.5]), 1.5),
        (torch.ones(3), None),
        ("no number", None),
        (10**400, None),
        (float("inf"), float("inf")),
    ],
)
def test_a_loss_that_is_no_number_is_left_out(loss: object, taken: float | None) -> None:
    assert samples.to_float(loss) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [float("inf"), float("nan"), np.float64("-inf"), "no number", torch.ones(3)])
def test_a_step_or_an_epoch_that_is_no_number_is_left_out(number: object) -> None:
    assert samples.to_int(number) is None  # type: ignore[arg-type]


def current_phases() -> tuple[Phase, ...]:
    return probe.marks.phases


def test_phases_nest_and_end_with_their_block() -> None:
    with probe.phase("eval"):
        with probe.phase(Phase.CHECKPOINT):
            assert current_phases() == (Phase.EVAL, Phase.CHECKPOINT)
        with pytest.raises(KeyError), probe.phase("data"):
            raise KeyError
        assert current_phases() == (Phase.EVAL,)
    assert current_phases() == ()


def test_an_unknown_phase_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPhaseError, match=r"no phase is called 'evl': use one of starting, .*data, .*eval"):
        probe.phase("evl")
