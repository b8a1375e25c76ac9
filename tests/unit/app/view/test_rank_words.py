"""How a rank ended, in words."""

from __future__ import annotations

import pytest

from agent.wire.reports import ExitReport
from app.view.ranks import exit_text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ExitReport(signal=9), "killed by SIGKILL"),
        (ExitReport(), "ended, it is not known how"),
        (ExitReport(code=0), "finished"),
        (ExitReport(code=2), "exited with code 2"),
        (ExitReport(code=1, error="ValueError: boom"), "exited with code 1: ValueError: boom"),
        (ExitReport(code=2, last_line="error: no data"), "exited with code 2; its last line: error: no data"),
    ],
)
def test_the_end_of_a_rank_is_told_with_what_it_said(end: ExitReport, words: str) -> None:
    assert exit_text(end) == words
