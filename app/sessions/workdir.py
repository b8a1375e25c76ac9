"""Where a program runs on a host."""

from __future__ import annotations

import os

from app.errors import UsageError
from app.ssh.config import THIS_MACHINE


def workdir_on(host: str, workdir: str) -> str:
    """Return where a program runs: the home of a host, and on this machine where the person is.

    Raises:
        UsageError: That directory is gone.
    """
    if host != THIS_MACHINE:
        return workdir or "~"
    try:
        return os.path.abspath(os.path.expanduser(workdir))  # noqa: PTH100, PTH111 - `..` of a link is the person's
    except FileNotFoundError as error:
        raise UsageError("this directory is gone", "name one: --workdir") from error
