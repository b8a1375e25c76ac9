"""Signals go to the processes that were seen, and to no other."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from app.errors import HostUnreachableError, SessionError
from app.fleet.local_link import LocalLink
from app.inspect import inspector, on_host, signal_on_host
from app.inspect.inspector import last_line
from app.inspect.outside_view import Target
from app.inspect.signal_on_host import ANOTHER, GONE, SENT, send, start_of
from app.inspect.signals import send_signal
from app.ssh.config import THIS_MACHINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def target_of(pid: int, rank: int = 0, start: int | None = None) -> Target:
    return Target(THIS_MACHINE, pid, start_of(pid) if start is None else start, os.getuid(), rank, is_stopped=False)


def test_the_process_that_was_seen_gets_the_signal(child: subprocess.Popen[bytes]) -> None:
    assert send(signal.SIGTERM, child.pid, start_of(child.pid), os.getuid()) == SENT
    assert child.wait() == -signal.SIGTERM


def test_another_process_under_its_pid_gets_none(child: subprocess.Popen[bytes]) -> None:
    assert send(signal.SIGKILL, child.pid, start_of(child.pid) - 1, os.getuid()) == ANOTHER
    assert send(signal.SIGKILL, child.pid, start_of(child.pid), os.getuid() + 1) == ANOTHER
    assert child.poll() is None
    child.communicate(b"\n")
    assert child.returncode == 0, "no signal has ended it"


def test_one_that_is_gone_gets_none(child: subprocess.Popen[bytes]) -> None:
    start = start_of(child.pid)
    child.communicate(b"\n")
    assert send(signal.SIGKILL, child.pid, start, os.getuid()) == GONE


def test_the_outcome_on_a_host_is_a_sentence(child: subprocess.Popen[bytes]) -> None:
    text = send_signal([LocalLink()], [target_of(child.pid, rank=3)], signal.SIGTERM)
    assert text == "SIGTERM sent to 1 of 1 processes of rank 3 on localhost"
    assert child.wait() == -signal.SIGTERM


def test_what_was_not_signalled_is_named(child: subprocess.Popen[bytes]) -> None:
    others = [target_of(child.pid, rank=0, start=1), target_of(2**22 + 1, rank=1, start=1)]
    with pytest.raises(SessionError) as refused:
        send_signal([LocalLink()], others, signal.SIGKILL)
    assert str(refused.value) == (
        "SIGKILL sent to 0 of 2 processes of ranks 0-1 on localhost; 1 had ended; "
        f"pid {child.pid} on localhost: is another process by now, and was left alone"
    )
    assert child.poll() is None


def test_a_host_whose_python_fails_is_named() -> None:
    target = target_of(os.getpid())
    with pytest.raises(SessionError, match=r"SIGCONT sent to 0 of 1 .*; localhost: "):
        send_signal([LocalLink("/bin/false")], [target], signal.SIGCONT)


def test_a_host_whose_python_is_too_old_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "OLDEST", (99, 1))
    with pytest.raises(HostUnreachableError) as refused:
        last_line(LocalLink(), "print('a later syntax'")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert str(refused.value).endswith(f" is {version}, and inspect needs 99.1 or newer")
    assert refused.value.hint == "name a newer one: --python"


@pytest.mark.parametrize("module", [on_host, signal_on_host], ids=lambda module: module.__name__)
def test_what_runs_on_a_host_is_of_its_python_and_the_standard_library_alone(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module), feature_version=inspector.OLDEST)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
