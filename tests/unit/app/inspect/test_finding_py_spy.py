"""Where py-spy is looked for, here and on a host: pip has more than one place for programs. It pauses nothing."""

from __future__ import annotations

import inspect
import site
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.errors import SessionError
from app.inspect import on_host
from app.inspect.inspector import _FIND_SPY, own_py_spy, py_spy_here


def test_it_is_found_beside_the_python_and_where_pip_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / name for name in ("venv/bin", "target/bin", "user/bin", "path")]
    for place in places:
        place.mkdir(parents=True)
        (place / "py-spy").touch(mode=0o700)
    venv, target, user, path = places
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(target.parent)])
    monkeypatch.setattr(site, "getuserbase", lambda: str(user.parent))
    monkeypatch.setenv("PATH", str(path))

    for place in places:
        assert own_py_spy() == str(place / "py-spy")
        (place / "py-spy").unlink()
    with pytest.raises(SessionError, match="py-spy is not installed, which reads the stacks"):
        own_py_spy()


def test_a_host_s_python_looks_in_the_same_places(tmp_path: Path) -> None:
    spy = tmp_path / "venv/bin/py-spy"
    spy.parent.mkdir(parents=True)
    spy.touch(mode=0o700)
    python = spy.with_name("python")
    python.symlink_to(sys.executable)

    program = _FIND_SPY.format(inspect.getsource(py_spy_here))
    done = subprocess.run([str(python), "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split()[2] == str(spy)


def test_the_target_is_never_stopped_by_a_look() -> None:
    program = "print(flush=True)\nwhile True:\n    sum(range(1000))"
    target = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    seen: set[bytes] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            status = Path(f"/proc/{target.pid}/status").read_bytes()
            seen.update(line for line in status.splitlines() if line.startswith((b"State:", b"TracerPid:")))

    watching = threading.Thread(target=watch)
    try:
        assert target.stdout is not None
        target.stdout.readline()
        watching.start()
        looks = [on_host.look_at(target.pid, own_py_spy()) for _ in range(20)]
    finally:
        is_over.set()
        watching.join()
        target.kill()
        target.communicate()

    assert {look["trouble"] for look in looks} == {""}
    # A reader that pauses shows `T (stopped)`, `t (tracing stop)` or its own pid here for a part of each look.
    assert seen <= {b"State:\tR (running)", b"State:\tS (sleeping)", b"TracerPid:\t0"}
