"""Where py-spy is looked for, here and on a host: pip has more than one place for programs."""

from __future__ import annotations

import inspect
import site
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from app.errors import SessionError
from app.inspect.inspector import _FIND_SPY, own_py_spy, py_spy_here

if TYPE_CHECKING:
    from pathlib import Path


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
