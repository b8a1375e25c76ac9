"""The agent under systemd: notifications to the service manager, and the unit file.

`ServiceManager` reports to a service manager, where there is one: ready, status, alive, stopping.

Source: sd_notify(3), sd_watchdog_enabled(3): one datagram of lines to the socket in $NOTIFY_SOCKET; a name that begins
with `@` is abstract.

`unit_text` is the systemd unit that ships with the package, with this interpreter and this state directory filled in.

Source: systemd.service(5), systemd.exec(5), "Command lines" and "Specifiers" (`%` and `$` are doubled, quotes escaped).
"""

from __future__ import annotations

import contextlib
import os
import socket
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PATIENCE_S = 1.0
"""Seconds to wait for a manager that does not read: nothing else is served in that time."""
READY_PATIENCE_S = 30.0
"""Seconds to wait with the message that is sent once, and without which the manager ends us."""
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """Connection to the manager at $NOTIFY_SOCKET; without one nothing is sent."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the manager's variables out of `environ`: the jobs are not its service and must not write to it."""
        values = {name: environ.pop(name, "") for name in _VARIABLES}
        path = values["NOTIFY_SOCKET"]
        self._address = "\0" + path[1:] if path.startswith("@") else path
        is_ours = values["WATCHDOG_PID"] in ("", str(os.getpid()))
        usec = values["WATCHDOG_USEC"]
        self.watchdog_s = int(usec) / 1e6 if path and is_ours and usec.isascii() and usec.isdigit() else 0.0
        """The manager ends us when we are silent for so long; 0 if it does not watch."""

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_line(status)}\nMAINPID={os.getpid()}", READY_PATIENCE_S)

    def status(self, status: str) -> None:
        self._send(f"STATUS={_line(status)}")

    def alive(self) -> None:
        """Report that the event loop runs."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def _send(self, text: str, patience_s: float = PATIENCE_S) -> None:
        if not self._address:
            return
        # A manager that does not listen, or not now, is no reason not to serve.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.settimeout(patience_s)
            sender.sendto(text.encode(), self._address)


def _line(text: str) -> str:
    return " ".join(text.split())


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
