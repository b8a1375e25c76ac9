"""The hosts that a person's configuration of ssh names."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from app.ssh.aliases import host_aliases

if TYPE_CHECKING:
    from collections.abc import Iterator

SSH_CONFIG = "~/.ssh/config"
SSH_CONFIG_VARIABLE = "RANKDECK_SSH_CONFIG"
MAX_CONFIG_FILES = 256
MAX_CONFIG_BYTES = 1 << 20


def ssh_config_file() -> str:
    """Return the configuration of ssh that is read here, as a person writes its name."""
    return os.environ.get(SSH_CONFIG_VARIABLE) or SSH_CONFIG


def expanded(path: str) -> Path:
    """Return a path with `~` for what it stands for, where it stands for something."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises for a user who is not there


def known_hosts(config_file: Path) -> tuple[str, ...] | None:
    """Return the hosts that a configuration of ssh names, and those it includes; None where it cannot be read."""
    num_left = MAX_CONFIG_FILES

    def included(pattern: str) -> Iterator[str]:
        nonlocal num_left
        place = expanded(pattern)
        # As ssh does for a person's own file, whichever that is.
        for path in sorted(glob.glob(str(expanded("~/.ssh") / place))):  # noqa: PTH207 - it may be absolute
            if num_left and (text := _text(Path(path))) is not None:
                num_left -= 1
                yield text

    text = _text(config_file)
    return None if text is None else tuple(host_aliases(text, included))


def _text(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None  # a pipe would be waited for
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CONFIG_BYTES)
    except OSError:
        return None
