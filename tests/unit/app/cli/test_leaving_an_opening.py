"""Who leaves while hosts are reached or examined reads that nothing was started, and nothing of what fails after."""

from __future__ import annotations

import threading
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import pytest

from app.cli import chosen_hosts
from app.cli.chosen_hosts import HostsWanted, Watch, watch
from app.cli.headless import print_line, quiet_after
from app.errors import ExitCode, HostUnreachableError
from app.inventory.inventory import HostEntry
from app.settings.schema import Settings
from app.ssh.config import THIS_MACHINE
from app.tui.console import Console
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.pilot import Pilot

    from app.preflight.findings import Step
    from app.session.hosts import Hosts

WANTED = HostsWanted(
    (HostEntry(THIS_MACHINE),), "", is_named=True, include=(), exclude=(), python="", named_python="", ssh_config=""
)


class Doctor:
    """Examines a host until the user has left, and then finds the connection broken."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.has_ended = threading.Event(), threading.Event(), threading.Event()

    def look(self, _hosts: Hosts, _notify: Callable[[str, Step], None]) -> None:
        self.has_begun.set()
        self.may_end.wait(60)
        print_line("rankdeck: h1: reachable: the connection broke while python ran there")
        self.has_ended.set()
        raise HostUnreachableError("h1", "the connection broke")

    def make(self, _hosts: Hosts) -> Any:
        raise AssertionError("the user has left")


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_nothing_was_started_is_all_that_is_printed(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = Doctor()

    async def leave(pilot: Pilot[None]) -> None:
        while not doctor.has_begun.is_set():
            await pilot.pause(0.05)
        await pilot.press(key)

    monkeypatch.setattr(Console, "run_async", partialmethod(Console.run_async, headless=True, auto_pilot=leave))
    monkeypatch.setattr(chosen_hosts, "is_terminal", lambda: True)
    job = Watch(lambda _link: None, needs_all=True, look=doctor.look, make=doctor.make)

    with pytest.raises(SystemExit) as ended:
        watch(WANTED, job, Settings(), is_json=False, is_headless=False)
    assert ended.value.code == ExitCode.INTERRUPTED
    doctor.may_end.set()
    until(doctor.has_ended.is_set, 10, "the examination ends")
    assert capsys.readouterr().err == "rankdeck: nothing was started\n"


def test_only_the_thread_of_who_has_left_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    has_left = False
    with quiet_after(lambda: has_left):
        print_line("before")
        has_left = True
        print_line("after")
        other = threading.Thread(target=print_line, args=("another thread",))
        other.start()
        other.join()
    print_line("outside")
    assert capsys.readouterr().err.splitlines() == ["before", "another thread", "outside"]
