"""The words for a failure that has been read from a job's files."""

from __future__ import annotations

import msgspec

from agent.wire.logs import LAUNCHER_RANK


class FailureText(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a failed rank has said; see `agent.wire.logs.RootCause` for the fields."""

    exception: str = ""
    outer: str = ""
    where: str = ""
    traceback: str = ""
    last_line: str = ""
    """Of standard error, where there is no exception: what `sys.exit("...")` and argparse say."""


class FoundFailure(msgspec.Struct, frozen=True):
    """What the files of a job say of a failure."""

    text: FailureText
    rank: int = LAUNCHER_RANK
    failed_s: float | None = None
    """When, if that was written too."""
