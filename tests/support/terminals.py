"""A real terminal for tests: what a person would see, and real keys."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING

from tests.support.waiting import Answer, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOCKET = "tmux"
TMUX_S = 60.0


class Terminal:
    """A tmux server of its own with a command in its only pane; what it exits with is shown when it has ended."""

    def __init__(self, directory: Path, environment: dict[str, str], argv: list[str], width: int, height: int) -> None:
        self._socket = str(directory / SOCKET)
        self._environment = {**environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        command = f"{shlex.join(argv)}; echo exit code $?; exec cat"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), command)

    def tmux(self, *arguments: str) -> str:
        argv = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, check=True, timeout=TMUX_S
        ).stdout

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def key_that_marks(self, key: str, words: str, within_s: float) -> None:
        """Press a key, and wait until a line looks otherwise: a key that is pressed sooner would go where it was."""
        before = self._look_of(words)
        self.keys(key)
        until(lambda: self._look_of(words) != before, within_s, f"{key} marks {words!r}")

    def key_until_it_shows(self, key: str, words: str, within_s: float) -> None:
        """Press a key that may be pressed twice, until it is heard: a dialog that opens takes keys a moment later."""

        def press() -> bool:
            self.keys(key)
            return words in self.text()

        until(press, within_s, f"{key} shows {words!r}")

    def _look_of(self, words: str) -> list[str]:
        """Return the lines that hold some words, with their colours."""
        return [line for line in self.tmux("capture-pane", "-e", "-p").splitlines() if words in line]

    def until_it_shows(self, words: str, within_s: float, *others: str) -> str:
        """Return the first screen that shows all of some words: what comes together is not painted in one go."""

        def look() -> str:
            text = self.text()
            return text if all(one in text for one in (words, *others)) else ""

        return self._until(look, within_s, f"the screen shows {', '.join(map(repr, (words, *others)))}")

    def until_it_no_longer_shows(self, words: str, within_s: float) -> None:
        self._until(lambda: words not in self.text(), within_s, f"the screen no longer shows {words!r}")

    def _until(self, condition: Callable[[], Answer], within_s: float, what: str) -> Answer:
        try:
            return until(condition, within_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text()}") from None


def end_terminals(directory: Path) -> None:
    """End the server that was started in a directory, if it still runs."""
    subprocess.run(["tmux", "-S", str(directory / SOCKET), "kill-server"], capture_output=True, check=False)
