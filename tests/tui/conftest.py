"""Fixtures of the console's tests."""

from tests.support.screens import fail_what_is_written_anew

__all__ = ["fail_what_is_written_anew"]
