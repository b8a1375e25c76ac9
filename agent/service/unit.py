"""The systemd unit that ships with the package, with this interpreter and this state directory filled in.

Source: systemd.service(5), systemd.exec(5), "Command lines" and "Specifiers" (`%` and `$` are doubled, quotes escaped).
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

UNIT_FILE = "rankdeck-agent.service"


def unit_text(python: str, environ: Mapping[str, str]) -> str:
    """Return the unit for an interpreter; a state home that is not the usual one goes into it."""
    state_home = environ.get("XDG_STATE_HOME", "")
    environment = f"Environment={_quoted(f'XDG_STATE_HOME={state_home}')}\n" if state_home.startswith("/") else ""
    template = files("agent.service").joinpath(UNIT_FILE).read_text(encoding="utf-8")
    # `$` is expanded in command lines only, not in Environment=.
    command = _quoted(python).replace("$", "$$")
    return template.replace("@PYTHON@", command).replace("@ENVIRONMENT@\n", environment)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if any(character in escaped for character in " \t'\"\\") else escaped
