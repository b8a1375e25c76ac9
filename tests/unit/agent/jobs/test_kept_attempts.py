"""A job of a name that this node has forgotten begins beside the logs that it has kept of it."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

from agent.jobs.preflight import check_kept, make_job_dir
from agent.processes.shim_process import SHIM_LOCK
from agent.wire.commands import RefusalReason, Refused, decode_reply, encode_reply

if TYPE_CHECKING:
    from pathlib import Path


def test_a_refusal_names_the_attempt_after_all_that_are_kept(tmp_path: Path) -> None:
    for name in ("0", "2", "10", "x"):
        (tmp_path / "gpt" / name).mkdir(parents=True)
    refused = make_job_dir(tmp_path / "gpt" / "0", 1)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.next_attempt) == (RefusalReason.JOB_EXISTS, 11)
    assert decode_reply(encode_reply(refused)) == refused
    assert make_job_dir(tmp_path / "gpt" / "11", 1) is None


def test_an_attempt_below_one_that_is_kept_is_refused_so_that_those_after_it_are_free(tmp_path: Path) -> None:
    assert check_kept(tmp_path / "gpt" / "0") is None
    for name in ("0", "5"):
        (tmp_path / "gpt" / name).mkdir(parents=True)

    refused = check_kept(tmp_path / "gpt" / "3")

    assert refused is not None
    assert (refused.reason, refused.next_attempt) == (RefusalReason.JOB_EXISTS, 6)
    assert "gpt/5 exists already: choose attempt 6" in refused.message
    assert check_kept(tmp_path / "gpt" / "6") is None


def test_no_attempt_is_free_beside_one_that_still_runs(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    with (tmp_path / "0" / SHIM_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = make_job_dir(tmp_path / "0", 1)
        assert refused is not None
        assert (refused.next_attempt, "still runs" in refused.message) == (None, True)
