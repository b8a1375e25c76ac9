from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.logs.disk_space import PERIOD_S, LogSpace, space_text
from agent.wire.jobs import JobState
from tests.support.filesystems import small_disk
from tests.support.node_reports import job_status

if TYPE_CHECKING:
    from pathlib import Path


def test_a_disk_with_room_has_nothing_to_say(tmp_path: Path) -> None:
    assert space_text(tmp_path) == ""
    space = LogSpace(tmp_path)
    space.look(0.0)
    status = job_status()
    assert space.with_warning(status) is status
    assert space.failure_of(0) is None


def test_a_place_that_is_gone_is_said(tmp_path: Path) -> None:
    assert space_text(tmp_path / "gone").startswith("the disk of the logs cannot be looked at (No such file")
    space = LogSpace(tmp_path / "gone")
    space.look(0.0)
    assert space.warning == ""  # there is no job yet


def test_running_jobs_say_that_a_disk_fills_up_and_ended_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        space = LogSpace(disk)
        space.look(0.0)
        assert space.warning == f"disk nearly full: 1 MiB left for logs at {disk}"
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(b"x" * 2**21)
        space.look(PERIOD_S / 2)
        assert space.warning.startswith("disk nearly full")
        space.look(PERIOD_S)
        assert space.with_warning(job_status()).detail.startswith("disk full: what ranks print is lost")
        busy = space.with_warning(job_status(detail="all ranks have ended"))
        assert busy.detail.startswith("all ranks have ended; disk full")
        assert space.with_warning(job_status(state=JobState.FAILED)).detail == ""
        found = space.failure_of(3)
        assert found is not None
        assert (found.rank, found.text.exception) == (3, "disk full: what it wrote of its end is lost")
        (disk / "filler").unlink()
        space.look(2 * PERIOD_S)
        assert space.warning.startswith("disk nearly full")
    assert capsys.readouterr().err.count("agent: disk nearly full") == 1
