"""Where this console keeps what is to stay: `$XDG_STATE_HOME/rankdeck`."""

from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """Return it; it need not exist. Source: XDG base directory specification."""
    home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return state / "rankdeck"
