from __future__ import annotations

from agent.jobs.root_cause import signal_name


def test_signals_have_names_where_there_are_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(50) == "signal 50"
