"""The console as a person sees it: a real terminal (tmux), real keys, real ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 120.0
"""Two torchruns and four ranks on two cores, in a fresh environment whose modules are not compiled yet."""

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"),
]


class Terminal:
    """A tmux server of its own with the demo in its only pane."""

    def __init__(self, house: DemoHouse, width: int, height: int, *options: str) -> None:
        self._socket = str(house.directory / "tmux")
        self._environment = {**house.environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        command = " ".join([*house.argv(*options), "; echo exit code $?; exec cat"])
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), command)

    def tmux(self, *arguments: str) -> str:
        argv = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, check=True, timeout=10
        ).stdout

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def until_it_shows(self, words: str, within_s: float) -> str:
        until(lambda: words in self.text(), within_s, f"the screen shows {words!r}:\n{self.text()}")
        return self.text()

    def until_it_no_longer_shows(self, words: str, within_s: float) -> None:
        until(lambda: words not in self.text(), within_s, f"the screen no longer shows {words!r}:\n{self.text()}")


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house
        subprocess.run(["tmux", "-S", str(house.directory / "tmux"), "kill-server"], capture_output=True, check=False)


def test_a_person_freezes_a_rank_sees_it_named_thaws_it_and_quits(house: DemoHouse) -> None:
    terminal = Terminal(house, 120, 35)
    terminal.until_it_shows("step", START_S)
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")
    terminal.until_it_shows("training", START_S)

    house.ranks()[2].send_signal(signal.SIGSTOP)
    screen = terminal.until_it_shows("rank 2 on demo-1 is frozen", 2.5)
    assert "bytegpt.py:" in screen

    house.ranks()[2].send_signal(signal.SIGCONT)
    terminal.until_it_no_longer_shows("is frozen", 3)

    terminal.keys("q")
    terminal.until_it_shows("exit code 0", 10)
    subprocess.run(["tmux", "-S", str(house.directory / "tmux"), "kill-server"], capture_output=True, check=False)
    house.assert_nothing_is_left()


def test_a_closed_terminal_ends_the_demo(house: DemoHouse) -> None:
    terminal = Terminal(house, 80, 24)
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")

    terminal.tmux("kill-server")

    house.assert_nothing_is_left(within_s=10)
