"""Fixtures of the console's tests."""

import pytest
import textual.app
import textual.pilot

from tests.support.screens import fail_what_is_written_anew, style_sheets_are_parsed_once, until_the_loop_rests

__all__ = ["fail_what_is_written_anew", "keys_wait_for_no_clock", "style_sheets_are_parsed_once"]


@pytest.fixture(autouse=True)
def keys_wait_for_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a key be over when the loop has nothing more to do, not when this process has been idle for a while."""
    for module in (textual.app, textual.pilot):
        monkeypatch.setattr(module, "wait_for_idle", until_the_loop_rests)
