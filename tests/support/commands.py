"""The command `rankdeck`, as a person calls it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def run_rankdeck(
    *arguments: str, cwd: Path, environ: Mapping[str, str], interpreter: str = sys.executable, timeout_s: float = 150
) -> tuple[int, str, str]:
    """Return the exit code and what was said, which is never a traceback."""
    done = subprocess.run(
        [interpreter, "-P", "-m", "app", *arguments],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr
