"""The last reports of an ended job's ranks are on disk for the next agent, and nothing suffers where they are not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import strategies as st

from agent.jobs import record
from agent.jobs.job import Job
from agent.jobs.launch import Launch
from agent.jobs.lifecycle import CommitReceived, LauncherFailed, LauncherStarted
from agent.jobs.record import SETTLED_S, JobRecord, current_boot_id, keep_ranks, read_ranks, record_of
from agent.node_state.job_state import later
from agent.node_state.node_state import NodeState
from agent.node_state.observations import JobAdmitted, RankReported, RanksRestored, WorkerEnded, WorkerSeen
from agent.state_dir import RANKS_NAME
from agent.wire.reports import (
    MAX_NODE_REPORT_BYTES,
    WIRE_VERSION,
    ExitReport,
    NodeReport,
    OutsideLook,
    ProcessState,
    WorkerReport,
    decode_node_report,
    encode_node_report,
)
from ddpcore.wire import Place, RankReport
from tests.support.any_message import messages
from tests.support.examples import few_and_many
from tests.support.filesystems import small_disk
from tests.support.jobs import make_local_spec
from tests.support.node_reports import dead_worker, group_report, worker_report
from tests.support.node_reports import rank_report as of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

END_S = 1000.0
"""Time of the job's end."""
PLACE = Place("/data/train.py", 13, "<module>")
AN_END = st.builds(ExitReport, code=st.integers(0, 255), age_s=st.floats(0.0, 1e10), error=st.text(max_size=20))


def rank_report(rank: int, **fields: Any) -> RankReport:
    facts = {"job_id": "train", "local_rank": rank, "wire_version": 1}
    return of_rank(rank, world_size=2, **(facts | fields))


def ended_job(job_dir: Path, began_s: float = END_S - 30.0, end_s: float = END_S) -> Launch:
    job = Job(make_local_spec(job_dir), began_s)
    for event in (CommitReceived(), LauncherStarted()):
        job.handle(event, began_s)
    job.handle(LauncherFailed(1), end_s)
    return Launch(job, job_dir, None)


def dead(rank: int, **fields: Any) -> WorkerReport:
    return msgspec.structs.replace(dead_worker(rank, rank_report(rank), job_id="train", code=1), **fields)


def node_report(state: NodeState, now_s: float) -> NodeReport:
    state.validate()
    return state.report(now_s, report_seq=1, jobs=[], log_seq=0, malformed_datagrams=0)


def state_of(launch: Launch) -> NodeState:
    state = NodeState("a", "e0", "host", 7, 16)
    state.apply(JobAdmitted(launch.job.status(END_S)), END_S)
    return state


def end_of_both_ranks(state: NodeState) -> None:
    for rank in (0, 1):
        state.apply(WorkerSeen("train", rank, 4000 + rank), END_S - 20.0)
        waiting = group_report(80, 7.5, op=("all_reduce", "broadcast")[rank])
        state.apply(RankReported(rank_report(rank, step=40, place=PLACE, groups=[waiting])), END_S - 1.0 + rank / 10)
    # What the agent learns of an end may come after the end of the launcher.
    state.apply(WorkerEnded("train", 1, ExitReport(1, error="RuntimeError: timed out")), END_S - 0.5)
    state.apply(WorkerEnded("train", 0, ExitReport(None, 15)), END_S + 0.25)


@pytest.mark.parametrize("later_s", [0.5, 5.0, 59.0, 90_000.0])
def test_the_next_agent_reports_the_ranks_as_the_last_one_would(tmp_path: Path, later_s: float) -> None:
    launch = ended_job(tmp_path)
    first = state_of(launch)
    end_of_both_ranks(first)
    keep_ranks(launch, first.ended_ranks("train", END_S + SETTLED_S))

    second = state_of(launch)
    second.apply(RanksRestored("train", read_ranks(ended_job(tmp_path))), END_S + SETTLED_S)

    before, after = (node_report(state, END_S + later_s) for state in (first, second))
    assert [worker.rank for worker in after.workers] == [0, 1]
    for was, is_now in zip(before.workers, after.workers, strict=True):
        assert (was.report, was.metrics, was.pid) == (is_now.report, is_now.metrics, is_now.pid)
        for name in ("process_s", "seen_s", "quiet_s", "report_age_s"):
            assert getattr(is_now, name) == pytest.approx(getattr(was, name), abs=1e-6)
        assert was.exit is not None
        assert is_now.exit is not None
        assert is_now.exit.age_s == pytest.approx(was.exit.age_s, abs=1e-6)
        assert msgspec.structs.replace(is_now.exit, age_s=was.exit.age_s) == was.exit


def test_a_new_attempt_begins_without_the_ranks_of_the_last_one(tmp_path: Path) -> None:
    launch = ended_job(tmp_path)
    state = state_of(launch)
    state.apply(RanksRestored("train", [dead(0)]), END_S)
    state.apply(JobAdmitted(msgspec.structs.replace(launch.job.status(END_S), attempt=1)), END_S)
    assert node_report(state, END_S).workers == []


def test_the_file_is_written_again_when_more_is_known_and_only_then(tmp_path: Path) -> None:
    launch, path = ended_job(tmp_path), tmp_path / RANKS_NAME
    state = state_of(launch)

    def is_written() -> bool:
        number = path.stat().st_ino if path.exists() else 0
        keep_ranks(launch, state.ended_ranks("train", END_S + SETTLED_S))
        return path.exists() and path.stat().st_ino != number

    assert not is_written(), "no rank has ended"
    end_of_both_ranks(state)
    assert is_written()
    assert not is_written()
    state.apply(RankReported(rank_report(0, report_seq=2, raised="RuntimeError: timed out")), END_S + 0.5)
    assert is_written(), "a datagram has waited"

    launch.kept_ranks = b""
    read_ranks(launch)
    assert not is_written(), "the next agent knows what is on the disk"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_rank_that_has_not_ended_is_not_kept(tmp_path: Path) -> None:
    state = state_of(ended_job(tmp_path))
    state.apply(WorkerSeen("train", 0, 4000), END_S - 20.0)
    assert state.ended_ranks("train", END_S) == []


@few_and_many(
    20,
    100,
    workers=st.lists(messages(WorkerReport, job_id="train", process=ProcessState.EXITED), max_size=3),
    end=AN_END,
    by_s=st.floats(-100.0, 1e10),
)
def test_whatever_a_file_holds_makes_a_report_that_can_be_read(
    workers: list[WorkerReport], end: ExitReport, by_s: float
) -> None:
    with TemporaryDirectory() as directory:
        launch = ended_job(Path(directory))
        ended = [msgspec.structs.replace(worker, exit=end) for worker in workers]
        keep_ranks(launch, ended)

        restored = read_ranks(launch)

        own = [worker for worker in ended if worker.attempt == 0 and worker.rank in {0, 1}]
        assert {worker.rank for worker in restored} == {worker.rank for worker in own}
        state = state_of(launch)
        state.apply(RanksRestored("train", restored), END_S)
        found = decode_node_report(encode_node_report(node_report(state, END_S + by_s)))
        assert [worker.rank for worker in found.workers] == sorted({worker.rank for worker in own})


@few_and_many(30, 200, data=st.binary(max_size=200), place=st.integers(0, 400))
def test_a_damaged_file_is_as_none(data: bytes, place: int) -> None:
    with TemporaryDirectory() as directory:
        launch, path = ended_job(Path(directory)), Path(directory, RANKS_NAME)
        keep_ranks(launch, [dead(0), dead(1)])
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + data)
        restored = read_ranks(launch)
        assert {worker.rank for worker in restored} <= {0, 1}
        assert all(worker.exit is not None for worker in restored)
        path.write_bytes(whole[: place % len(whole)])
        assert read_ranks(launch) == []


@pytest.mark.parametrize(
    "stranger",
    [
        dead(0, attempt=1),
        dead(0, job_id="other"),
        dead(2),
        worker_report(0, job_id="train"),
        dead(0, process=ProcessState.RUNNING),
    ],
    ids=["attempt", "job", "rank", "not ended", "contradictory"],
)
def test_what_is_no_ended_rank_of_this_job_is_left_out(tmp_path: Path, stranger: WorkerReport) -> None:
    launch = ended_job(tmp_path)
    keep_ranks(launch, [stranger, dead(1)])
    assert [worker.rank for worker in read_ranks(launch)] == [1]


@pytest.mark.parametrize("kind", ["another version", "garbage", "too large", "link", "pipe", "directory"])
def test_what_cannot_be_read_is_logged_and_as_none(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, path = ended_job(tmp_path), tmp_path / RANKS_NAME
    assert read_ranks(launch) == []
    assert capsys.readouterr().err == "", "of a job of an older agent"
    keep_ranks(launch, [dead(0)])
    whole = path.read_bytes()
    path.unlink()
    match kind:
        case "another version":
            fields = msgspec.msgpack.decode(whole)
            path.write_bytes(msgspec.msgpack.encode(fields | {"wire_version": WIRE_VERSION + 1}))
        case "garbage":
            path.write_bytes(b"\xc1" + whole)
        case "too large":
            path.write_bytes(whole + bytes(MAX_NODE_REPORT_BYTES))
        case "link":
            (tmp_path / "planted").write_bytes(whole)
            path.symlink_to(tmp_path / "planted")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()

    assert read_ranks(launch) == []

    assert f"{path} cannot be read, what the ranks of job train did last is lost: " in capsys.readouterr().err


def test_too_many_bytes_are_not_written(tmp_path: Path) -> None:
    launch = ended_job(tmp_path)
    keep_ranks(launch, [dead(0, exit=ExitReport(1, error="x" * MAX_NODE_REPORT_BYTES))])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64 * 1024) as directory:
        (directory / "filler").write_bytes(bytes(56 * 1024))
        yield directory


def test_a_full_disk_costs_what_is_new_and_one_line(full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = ended_job(full_disk)
    keep_ranks(launch, [dead(0)])
    assert [worker.rank for worker in read_ranks(launch)] == [0]
    (full_disk / "more").write_bytes(bytes(4096 - 300))
    large = dead(1, exit=ExitReport(1, error="x" * 4000, last_line="y" * 4000))

    for _ in range(3):
        keep_ranks(launch, [dead(0), large])

    assert capsys.readouterr().err.count("cannot be written: No space left on device") == 1
    assert [worker.rank for worker in read_ranks(launch)] == [0]


def test_a_planted_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / f"{RANKS_NAME}.tmp")
    keep_ranks(ended_job(tmp_path), [dead(0)])
    assert "the next agent will not know what the ranks of job train did last" in capsys.readouterr().err


def test_ages_grow_and_end_at_what_a_report_may_hold() -> None:
    ended = dead(0, process_s=3.0, report_age_s=4.0, outside=OutsideLook(7, age_s=5.0), exit=ExitReport(1, age_s=3.0))
    assert later(ended, 0.0) == ended
    grown = later(ended, 10.0)
    assert (grown.process_s, grown.report_age_s, grown.exit, grown.outside) == (
        13.0,
        14.0,
        ExitReport(1, age_s=13.0),
        OutsideLook(7, age_s=15.0),
    )
    assert later(ended, -3.5).report_age_s == 0.5
    assert later(ended, -30.0).report_age_s == 0.0
    assert later(ended, 1e11).report_age_s == 1e10


def of_another_boot(launch: Launch, clock_began_s: float | None) -> JobRecord:
    return msgspec.structs.replace(record_of(launch), boot_id="another", clock_began_s=clock_began_s)


def test_a_record_of_this_boot_has_its_own_times(tmp_path: Path) -> None:
    written = record_of(ended_job(tmp_path))
    assert written.boot_id == current_boot_id()
    assert written.job_now() is written.job


def test_after_a_reboot_the_wall_clock_shows_how_long_a_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_clock_began_s", lambda: 5_000_000.0)
    launch = ended_job(tmp_path)
    now_s = time.monotonic()

    # The other boot's clock read 0 so long before this one's that the job ended two hours ago.
    job = of_another_boot(launch, 5_000_000.0 + now_s - 7200.0 - END_S).job_now()
    assert job.status(now_s).state_s == pytest.approx(7200.0, abs=60.0)
    assert job.failure is not None
    assert launch.job.failure is not None
    assert job.since_s - job.failure.at_s == pytest.approx(launch.job.since_s - launch.job.failure.at_s)

    for clock_began_s in (None, 6_000_000.0):  # an old record, and a clock that was set back since
        job = of_another_boot(launch, clock_began_s).job_now()
        assert job.status(time.monotonic()).state_s == pytest.approx(0.0, abs=60.0)
