"""The probe in real torchrun ranks on gloo: what it says of programs that wait for each other in every way.

Two jobs serve all tests of this file; a test opens the gates up to its own stage, so tests go in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from ddpcore.wire import (
    BARRIER_GROUP,
    DEFAULT_GROUP,
    ENV_INBOX,
    GroupReport,
    Phase,
    RankReport,
    SlowDown,
)
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from tests.support.ranks import PROGRAMS, RealRanks, Reports, group, is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

MEETINGS = PROGRAMS / "meetings.py"
NAMED_BARRIERS = PROGRAMS / "named_barriers.py"


GATES = {
    MEETINGS: ("backward", "barrier", "subgroup", "send"),
    NAMED_BARRIERS: ("arrive", "checkpoint"),
}


def open_gates(job: RealRanks, program: Path, last: str) -> None:
    for name in GATES[program]:
        (job.directory / name).touch()
        if name == last:
            return


def running(program: Path) -> Iterator[RealRanks]:
    with RealRanks([program], 3) as job:
        job.wait_until(lambda _: True, "the first report of each rank")
        yield job


@pytest.fixture(scope="module")
def meetings() -> Iterator[RealRanks]:
    yield from running(MEETINGS)


@pytest.fixture(scope="module")
def named_barriers() -> Iterator[RealRanks]:
    yield from running(NAMED_BARRIERS)


def line_of(program: Path, marker: str) -> int:
    return next(number for number, line in enumerate(program.read_text().splitlines(), 1) if line.endswith(marker))


def standing(report: RankReport, name: str) -> GroupReport:
    found = group(report, name)
    assert found is not None, f"rank {report.rank} knows no group {name}"
    return found


def waiting_in(name: str, *ranks: int) -> Callable[[Reports], bool]:
    def condition(reports: Reports) -> bool:
        found = [group(reports[rank], name) for rank in ranks]
        return all(one is not None and one.is_waiting and one.waiting_s > 0.3 for one in found)

    return condition


def standing_at(program: Path, marker: str, *ranks: int) -> Callable[[Reports], bool]:
    line = line_of(program, marker)

    def condition(reports: Reports) -> bool:
        places = [reports[rank].place for rank in ranks]
        return all(place is not None and place.line == line and place.file == str(program) for place in places)

    return condition


def wait_in_backward(reports: Reports) -> bool:
    """Say whether ranks 0 and 2 wait for rank 1 there, and not in what came before, for a rank that was slow."""
    return waiting_in(DEFAULT_GROUP, 0, 2)(reports) and standing_at(MEETINGS, "# WAITS IN BACKWARD", 0, 2)(reports)


def subgroup_name(report: RankReport) -> str:
    return next(group.group for group in report.groups if group.ranks)


def test_a_wait_in_backward_shows_ddp_s_own_collective_and_the_line_of_each_rank(meetings: RealRanks) -> None:
    reports = meetings.wait_until(wait_in_backward, "ranks 0 and 2 wait in backward")

    for rank in (0, 2):
        waiting = standing(reports[rank], DEFAULT_GROUP)
        assert waiting.op == "all_reduce"
        assert waiting.sizes == [[41]]
        assert waiting.completed_seq == waiting.enqueued_seq - 1
        assert reports[rank].phase is Phase.BACKWARD
    reports = meetings.wait_until(standing_at(MEETINGS, "# LINGERS HERE", 1), "the missing rank's line")
    assert reports[1].place is not None
    assert reports[1].place.function == "linger"


def test_seqs_align_across_ranks_and_the_missing_one_is_behind(meetings: RealRanks) -> None:
    reports = meetings.wait_until(wait_in_backward, "ranks 0 and 2 wait")
    seq = standing(reports[0], DEFAULT_GROUP).enqueued_seq

    reports = meetings.wait_until(
        lambda reports: (
            standing_at(MEETINGS, "# LINGERS HERE", 1)(reports)
            and standing(reports[1], DEFAULT_GROUP).enqueued_seq == seq - 1
        ),
        "rank 1's last seq",
    )

    assert standing(reports[2], DEFAULT_GROUP).enqueued_seq == seq
    assert not standing(reports[1], DEFAULT_GROUP).is_waiting
    assert standing(reports[1], DEFAULT_GROUP).waiting_s == 0.0


def test_waiting_time_grows_with_the_clock_and_is_shared_by_those_who_wait(meetings: RealRanks) -> None:
    lingers = standing_at(MEETINGS, "# LINGERS HERE", 1)
    before = dict(meetings.wait_until(lambda reports: wait_in_backward(reports) and lingers(reports), "0 and 2 wait"))

    def is_a_second_later(reports: Reports) -> bool:
        return all(reports[rank].observed_s > before[rank].observed_s + 1.0 for rank in (0, 1))

    after = meetings.wait_until(is_a_second_later, "a second later")

    waited_s = standing(after[0], DEFAULT_GROUP).waiting_s - standing(before[0], DEFAULT_GROUP).waiting_s
    assert waited_s == pytest.approx(after[0].observed_s - before[0].observed_s, abs=0.01)
    assert after[0].waited_s - before[0].waited_s == pytest.approx(waited_s, abs=0.01)
    assert after[1].waited_s == before[1].waited_s


def test_a_call_of_barrier_is_seen_as_one(meetings: RealRanks) -> None:
    open_gates(meetings, MEETINGS, "backward")

    reports = meetings.wait_until(
        lambda reports: (
            waiting_in(DEFAULT_GROUP, 0, 2)(reports)
            and all(standing(reports[rank], DEFAULT_GROUP).op == "barrier" for rank in (0, 2))
        ),
        "ranks 0 and 2 wait in dist.barrier",
    )

    assert standing(reports[0], DEFAULT_GROUP).enqueued_seq == standing(reports[2], DEFAULT_GROUP).enqueued_seq
    reports = meetings.wait_until(standing_at(MEETINGS, "# WAITS IN BARRIER", 0, 2), "their line")
    assert reports[0].phase is Phase.BARRIER


def test_a_wait_in_a_subgroup_names_its_members_and_its_own_seq(meetings: RealRanks) -> None:
    open_gates(meetings, MEETINGS, "barrier")

    meetings.wait_until(standing_at(MEETINGS, "# WAITS IN SUBGROUP", 0), "rank 0 is in the subgroup")
    reports = meetings.wait_until(lambda reports: any(group.ranks for group in reports[0].groups), "the subgroup")
    name = subgroup_name(reports[0])
    reports = meetings.wait_until(waiting_in(name, 0), "rank 0 waits")

    waiting = standing(reports[0], name)
    assert (waiting.enqueued_seq, waiting.completed_seq, waiting.ranks) == (1, 0, [0, 2])
    assert not standing(reports[0], DEFAULT_GROUP).is_waiting


def test_a_blocked_receive_is_not_a_collective_but_its_line_is_known(meetings: RealRanks) -> None:
    open_gates(meetings, MEETINGS, "subgroup")

    reports = meetings.wait_until(
        lambda reports: (
            standing_at(MEETINGS, "# WAITS IN RECEIVE", 0)(reports)
            and waiting_in(DEFAULT_GROUP, 2)(reports)
            and not standing(reports[0], DEFAULT_GROUP).is_waiting
            # A report has the stack of one moment and the calls of another.
            and standing(reports[2], DEFAULT_GROUP).enqueued_seq == standing(reports[0], DEFAULT_GROUP).enqueued_seq + 1
        ),
        "rank 0 receives while rank 2 waits in the last barrier, its next call",
    )

    assert reports[0].phase is Phase.BARRIER


def test_the_store_listens_on_loopback_only(meetings: RealRanks) -> None:
    launcher = psutil.Process(meetings.launcher.pid)

    listening = [connection.laddr for connection in launcher.net_connections() if connection.status == "LISTEN"]

    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", meetings.port)]


def test_an_uncaught_error_reaches_torchrun_s_own_report(meetings: RealRanks) -> None:
    open_gates(meetings, MEETINGS, "send")

    assert meetings.wait_for_end() == 1

    error = json.loads((meetings.directory / "rank-1.error.json").read_text())["message"]
    assert error["message"] == "ValueError: boom"
    assert "in main" in error["extraInfo"]["py_callstack"]
    assert "ValueError: boom" in meetings.log(1, "stderr")
    assert "ValueError: boom" in (meetings.directory / "launcher.log").read_text()


def test_a_named_barrier_says_who_waits_where_and_under_which_name(named_barriers: RealRanks) -> None:
    reports = named_barriers.wait_until(waiting_in(BARRIER_GROUP, 0, 2), "ranks 0 and 2 wait at the named barrier")

    for rank in (0, 2):
        waiting = standing(reports[rank], BARRIER_GROUP)
        assert (waiting.label, waiting.op) == ("load data", "barrier")
        assert (waiting.enqueued_seq, waiting.completed_seq) == (1, 0)
        assert reports[rank].phase is Phase.BARRIER
    assert standing_at(NAMED_BARRIERS, "# WAITS AT LOAD", 0, 2)(reports)
    assert group(reports[1], BARRIER_GROUP) is None


def test_a_barrier_that_times_out_names_the_missing_and_the_next_one_holds(named_barriers: RealRanks) -> None:
    open_gates(named_barriers, NAMED_BARRIERS, "arrive")

    named_barriers.wait_until(lambda reports: all(report.step == 7 for report in reports.values()), "step 7")

    assert "missing [1, 2]: ranks 1-2 did not reach barrier 'only rank 0 comes' in 0.3 s" in named_barriers.log(0)


def test_marks_of_the_program_are_reported(named_barriers: RealRanks) -> None:
    open_gates(named_barriers, NAMED_BARRIERS, "arrive")

    reports = named_barriers.wait_until(
        lambda reports: all(report.phase is Phase.CHECKPOINT for report in reports.values()), "the checkpoint's mark"
    )

    for report in reports.values():
        assert (report.step, report.epoch, report.loss, report.loss_first, report.steps_done) == (7, 2, 1.5, 1.5, 1)


def test_a_request_is_carried_out_and_answered(named_barriers: RealRanks) -> None:
    named_barriers.ask(1, SlowDown(request_id=5, factor=2.0))
    named_barriers.wait_until(lambda reports: reports[1].answered_request_id == 5, "the answer")
    assert named_barriers.reports[1].slow_factor == 2.0

    named_barriers.ask(1, SlowDown(request_id=6, factor=1.0))
    named_barriers.wait_until(lambda reports: reports[1].answered_request_id == 6, "the answer")
    assert named_barriers.reports[1].slow_factor == 1.0


def test_a_forked_child_has_no_probe(named_barriers: RealRanks) -> None:
    open_gates(named_barriers, NAMED_BARRIERS, "checkpoint")

    named_barriers.wait_until(
        lambda reports: all(report.step == 8 for report in reports.values()), "the step after the fork"
    )

    assert {report.pid for report in named_barriers.history} == {
        report.pid for report in named_barriers.reports.values()
    }
    assert all(report.step != 99 for report in named_barriers.history)


def test_a_killed_launcher_leaves_no_rank_behind(named_barriers: RealRanks) -> None:
    pids = [report.pid for report in named_barriers.reports.values()]
    assert all(is_alive(pid) for pid in pids)

    os.kill(named_barriers.launcher.pid, signal.SIGKILL)

    until(lambda: not any(is_alive(pid) for pid in pids), within_s=60, what="the ranks die with torchrun")


BROKEN_DDPCORES = {
    "no ddpcore at all": "raise ModuleNotFoundError('No module named ddpcore')",
    "one that exits": "raise SystemExit(7)",
    "one that is interrupted": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=() if name == "one that exits" else pytest.mark.slow)
        for name, source in BROKEN_DDPCORES.items()
    ],
)
def test_nothing_that_goes_wrong_in_the_plug_in_breaks_import_torch(source: str, tmp_path: Path) -> None:
    (tmp_path / "ddpcore.py").write_text(source)
    environment = os.environ | {
        "PYTHONPATH": f"{LAUNCH_PLUGIN_DIR}:{tmp_path}",
        "RANK": "0",
        ENV_INBOX: "/nowhere/inbox.sock",
    }

    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(2).sum().item())"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.stdout, done.returncode) == ("2.0\n", 0), done.stderr
