"""What is logged of a deadline that Slurm does not give; `tests.integration.test_slurm_deadline` has the rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ddpcore.engine import stop_signals
from ddpcore.engine.stop_signals import Deadline
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "squeue cannot be run (No such file or directory) on "),
        ("echo first >&2; printf 'no contr\\033oller\\n' >&2; exit 1", "squeue fails (no controller) on "),
        ("exit 3", "squeue fails (3) on "),
        ("exec sleep 100", "squeue does not answer in 0.3 s on "),
        ("echo", "squeue shows no end on "),
        ("echo UNLIMITED", ""),
        ("echo 1", ""),
    ],
)
@pytest.mark.parametrize("end", ["", "1000"])
def test_an_end_that_slurm_does_not_tell_is_one_warning(
    answer: str | None,
    words: str,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value_s in (("ANSWER_S", 0.3), ("ASK_S", 0.02), ("LEAST_ASK_S", 0.02)):
        monkeypatch.setattr(stop_signals, name, value_s)
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answer else str(tmp_path))
    if answer:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\n{answer}\n")
        (tmp_path / "squeue").chmod(0o755)

    def has_asked() -> bool:
        calls = tmp_path / "calls"
        return not answer or (calls.exists() and len(calls.read_text()) > 2)

    with Deadline(None, is_asking=True):
        until(has_asked, within_s=60, what="three questions")
        time.sleep(0.1)

    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(words and not end)
    assert all(text.startswith("the end of Slurm job 4711 is not known") and words in text for text in texts)
