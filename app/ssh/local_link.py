"""This machine in a host's place: the same agent and the same commands, without SSH between."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import HostUnreachableError
from app.safe_text import LINE_LIMIT, clean
from app.ssh.agent_link import EXIT_NO_COMMAND, VERB_TIMEOUT_S, AgentLink
from app.ssh.config import THIS_MACHINE
from app.ssh.remote_command import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LocalLink(AgentLink):
    """The agent of this user on this machine: its sockets are here already."""

    def __init__(self, python: str = "") -> None:
        """`python` runs the agent's verbs; empty is the one that runs this."""
        super().__init__(THIS_MACHINE, str(Path(python).expanduser()) if python else sys.executable)

    @property
    def directory(self) -> Path:
        """The agent's own directory; once it is found."""
        assert self.place is not None
        return Path(self.place.dir)

    @property
    def is_alive(self) -> bool:
        """True: what becomes of the agent is seen in its row."""
        return True

    def connect(self) -> None:
        """Do nothing: we are here."""

    def open_road(self, on_frame: Callable[[bytes], None]) -> None:
        """Do nothing: the sockets are here."""

    def reconnect(self) -> None:
        """Do nothing: no connection was lost."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def send_file(self, near: Path, far: str) -> bool:
        """Copy a file."""
        try:
            shutil.copyfile(near, far)
        except OSError as error:
            raise HostUnreachableError(self.host, f"{far}: {error.strerror}") from error
        return True

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        try:
            done = subprocess.run(
                argv, input=given, capture_output=True, timeout=timeout_s or VERB_TIMEOUT_S, check=False
            )
        except OSError:
            return Finished(EXIT_NO_COMMAND, b"", "")
        except subprocess.TimeoutExpired as error:
            raise HostUnreachableError(self.host, f"{argv[0]} does not end") from error
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        return Finished(done.returncode, done.stdout, clean(lines[-1], LINE_LIMIT))
