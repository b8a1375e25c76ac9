"""What is done on a host: it is looked at, staged on, installed into, and left tidy."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from app.install import on_host

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = (3, 10, 4)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def ask(*argv: str) -> dict[str, Any]:
        on_host.main(argv)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


def test_a_python_too_old_for_rankdeck_understands_it_and_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse(inspect.getsource(on_host), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", VERSION)

    assert on_host.survey() == {"version": [3, 10, 4], "executable": sys.executable}


def test_a_survey_says_what_this_python_has(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("survey")

    assert found["version"] == list(sys.version_info[:3])
    assert found["has_pip"] is True
    assert found["installed"]["textual"]["version"]
    assert [text for text in found["installed"]["textual"]["requires"] if text.startswith("rich")]
    assert not [text for text in found["installed"]["rankdeck"]["requires"] if "extra" in text]
    assert found["rankdeck"]
    assert found["missing"] == []
    assert found["free_bytes"] > 0


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_python_of_the_operating_system_is_known_by_its_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_marked: bool
) -> None:
    real = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else real(name))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    if is_marked:
        (tmp_path / "EXTERNALLY-MANAGED").touch()

    assert on_host.survey()["is_managed"] is is_marked


def test_a_digest_is_of_what_a_distribution_does_alone() -> None:
    files = {
        "app/cli/main.py": b"one",
        "a-1.dist-info/METADATA": b"Name: a\nRequires-Dist: b\n\nthe README",
        "a-1.dist-info/RECORD": b"1",
        "app/__pycache__/cli.cpython-311.pyc": b"1",
        "../../../bin/a": b"1",
    }
    digest = on_host.content_digest(files, files.__getitem__)

    for name, content, is_same in (
        ("a-1.dist-info/RECORD", b"2", True),
        ("../../../bin/a", b"2", True),
        ("app/__pycache__/cli.cpython-311.pyc", b"2", True),
        ("a-1.dist-info/METADATA", b"Name: a\nRequires-Dist: b\n\nanother README", True),
        ("a-1.dist-info/METADATA", b"Name: a\nRequires-Dist: c\n\nthe README", False),
        ("app/cli/main.py", b"two", False),
        ("app/new.py", b"", False),
    ):
        changed = {**files, name: content}
        assert (on_host.content_digest(changed, changed.__getitem__) == digest) is is_same, (name, content)


def test_the_staging_directory_is_nobody_elses_and_old_ones_go(
    temporary: Path, answer: Callable[..., dict[str, Any]]
) -> None:
    old, young, foreign = (temporary / f"{on_host.STAGING_PREFIX}{name}" for name in ("old", "young", "link"))
    for directory in (old, young):
        directory.mkdir()
        (directory / "wheel").touch()
    long_ago = time.time() - 2 * on_host.OLD_STAGING_S  # noqa: TID251 - of files
    os.utime(old, (long_ago, long_ago))
    foreign.symlink_to(temporary)

    staged = Path(answer("stage")["directory"])

    assert staged.stat().st_mode & 0o777 == 0o700
    assert set(temporary.iterdir()) == {staged, young, foreign}
    answer("unstage", str(staged))
    assert not staged.exists()


def test_what_comes_by_standard_input_becomes_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., dict[str, Any]]
) -> None:
    path = tmp_path / "a.whl"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\0content")))

    assert answer("receive", str(path)) == {}
    assert path.read_bytes() == b"\0content"
    assert answer("receive", str(path)) == {"refused": f"{path}: File exists", "hint": ""}


def test_the_staging_directory_goes_whatever_pip_says(temporary: Path, answer: Callable[..., dict[str, Any]]) -> None:
    directory = temporary / "staged"
    directory.mkdir()
    (directory / "rankdeck-9-py3-none-any.whl").write_text("no wheel")

    done = answer("install", str(directory), "rankdeck-9-py3-none-any.whl", "digest", "60", "1")

    assert done["code"] != 0
    assert any(line.startswith("ERROR:") for line in done["lines"]), done
    assert not directory.exists()


def test_pip_is_ended_when_its_time_is_over(temporary: Path, answer: Callable[..., dict[str, Any]]) -> None:
    directory = temporary / "staged"
    directory.mkdir()

    done = answer("install", str(directory), "rankdeck-9-py3-none-any.whl", "digest", "0.01", "1")

    assert done["code"] is None
    assert not directory.exists()


def test_a_venv_is_made_where_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., dict[str, Any]]
) -> None:
    occupied, file = tmp_path / "occupied", tmp_path / "file"
    occupied.mkdir()
    (occupied / "thesis.tex").touch()
    file.touch()
    assert answer("make_venv", str(occupied), "60")["refused"] == f"{occupied} is not empty, and no venv"
    assert (occupied / "thesis.tex").exists()
    assert answer("make_venv", str(file), "60")["refused"] == f"{file} is no directory"
    assert answer("make_venv", f"{file}/rd", "60")["refused"] == f"{file}/rd: Not a directory"

    there = tmp_path / "there" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert answer("make_venv", "~/there", "60") == {"python": str(there), "is_new": False}

    monkeypatch.setattr(on_host, "_is_without_ensurepip", lambda: True)
    refused = answer("make_venv", str(tmp_path / "new"), "60")
    assert "ensurepip is missing" in refused["refused"]
    assert refused["hint"] == f"apt install python3.{sys.version_info.minor}-venv there"
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert "does not end" in answer("make_venv", str(tmp_path / "new"), "0.01")["refused"]
    assert not (tmp_path / "new").exists()


def test_only_one_host_of_those_that_share_a_python_installs_into_it(tmp_path: Path) -> None:
    with on_host._alone_in(tmp_path, time.monotonic() + 60):
        fd = os.open(tmp_path / on_host.LOCK_FILE, os.O_RDWR)
        try:
            assert not on_host._is_locked(fd)
        finally:
            os.close(fd)
        began_s = time.monotonic()
        with on_host._alone_in(tmp_path, began_s + 0.1):
            assert time.monotonic() > began_s + 0.1
    with on_host._alone_in(tmp_path / "missing", 0.0):
        pass


@pytest.mark.parametrize(("written", "is_older"), [(1.0, False), (4e9, True)])
def test_an_agent_that_began_before_the_files_were_written_is_an_older_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[..., dict[str, Any]],
    written: float,
    is_older: bool,
) -> None:
    record = tmp_path / "rankdeck-9.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("rankdeck-9.dist-info/RECORD,,\n")
    os.utime(record, (written, written))
    monkeypatch.syspath_prepend(str(tmp_path))

    assert answer("agent_age", str(os.getpid())) == {"is_older": is_older}
    assert answer("agent_age", "4194303") == {"is_older": False}, "there is no such process"
