"""The interpreter of the jobs, whatever it is: asked within bounds, and told in rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from agent.doctor.interpreter import Interpreter, ask_interpreter, interpreter_rows
from agent.wire.examination import Health

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_S = 60.0


def rows_of(found: Interpreter) -> dict[str, tuple[Health, str, str]]:
    return {row.name: (row.status, row.detail, row.todo) for row in interpreter_rows("python3", found)}


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def with_torch(path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a torch before the real one."""
    (path / "torch").mkdir()
    (path / "torch/__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(path))


def test_this_interpreter_tells_its_versions() -> None:
    found = ask_interpreter(sys.executable, ANSWER_S)

    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert (found.is_imported, found.error) == (True, "")
    assert found.torch[:1].isdigit()
    assert {status for status, _, _ in rows_of(found).values()} == {Health.OK}


def test_an_interpreter_that_is_not_there_is_bad() -> None:
    rows = rows_of(ask_interpreter("/no/such/python"))

    assert [*rows] == ["job_python"]
    assert rows["job_python"][0] is Health.BAD
    assert "does not run" in rows["job_python"][1]


@pytest.mark.parametrize(
    "text", ["exit 7", "echo what >&2; exit 1", "echo '{\"python\": 3}'", "kill -9 $$", "echo '[1]'"]
)
def test_what_is_no_python_is_bad(tmp_path: Path, text: str) -> None:
    rows = rows_of(ask_interpreter(program(tmp_path / "python", text)))

    assert rows["job_python"][0] is Health.BAD
    assert "is no Python" in rows["job_python"][1]


def test_an_interpreter_without_torch_is_bad(tmp_path: Path) -> None:
    bare = program(tmp_path / "python", f'echo hello from the site; exec "{sys.executable}" -I -S "$@"')

    found = ask_interpreter(bare, ANSWER_S)

    assert (found.is_missing, found.is_imported) == (True, False)
    assert rows_of(found)["torch"] == (Health.BAD, "python3 has no torch", "python3 -m pip install torch")


def test_a_torch_that_cannot_be_imported_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(tmp_path, monkeypatch, "raise ImportError('libcudart.so.13: cannot open')")

    rows = rows_of(ask_interpreter(sys.executable, ANSWER_S))

    assert rows["torch"][0] is Health.BAD
    assert "cannot be imported: ImportError: libcudart.so.13: cannot open" in rows["torch"][1]


def test_a_torch_that_ends_the_interpreter_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(tmp_path, monkeypatch, "import os; os._exit(3)")

    rows = rows_of(ask_interpreter(sys.executable, ANSWER_S))

    assert rows["torch"][0] is Health.BAD
    assert "cannot be imported: exit code 3" in rows["torch"][1]


def test_a_slow_import_is_not_waited_for_and_what_was_said_counts(tmp_path: Path) -> None:
    slow = program(tmp_path / "python", 'echo \'{"python": "3.11.9", "torch": "2.13.0"}\'; sleep 600 & wait')

    found = ask_interpreter(slow, 0.5)

    assert (found.python, found.torch, found.error) == ("3.11.9", "2.13.0", "no answer within 0 s")
    status, detail, _ = rows_of(found)["torch"]
    assert status is Health.WARN
    assert detail.startswith("torch 2.13.0 cannot be imported")


@pytest.mark.parametrize(("import_s", "status"), [(2.0, Health.BAD), (25.0, Health.WARN)])
def test_gpus_that_torch_waits_for_are_no_fault_of_its_import(tmp_path: Path, import_s: float, status: Health) -> None:
    said = f'{{"python": "3.11.9", "torch": "2.13.0", "is_imported": true, "import_s": {import_s}}}'
    hangs = program(tmp_path / "python", f"echo '{said}'; sleep 600 & wait")

    rows = rows_of(ask_interpreter(hangs, 0.5))

    assert rows["torch"][0] is Health.OK
    assert rows["torch_gpus"][:2] == (status, "torch cannot look at the GPUs: no answer within 0 s")


def test_gpus_that_end_the_interpreter_are_no_fault_of_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = """
import os
from types import SimpleNamespace as Some
__version__ = "2.13.0"
version, distributed = Some(cuda="12.9", hip=None), Some(is_available=lambda: False)
cuda = Some(is_available=lambda: os._exit(3))
"""
    with_torch(tmp_path, monkeypatch, fake)

    rows = rows_of(ask_interpreter(sys.executable, ANSWER_S))

    assert "cannot be imported" not in rows["torch"][1]
    assert rows["torch_gpus"][:2] == (Health.BAD, "torch cannot look at the GPUs: exit code 3")


@pytest.mark.parametrize(
    ("found", "row", "status"),
    [
        (Interpreter("3.10.1", "2.13.0", is_imported=True), "job_python", Health.WARN),
        (Interpreter("3.11.1", "2.7.1", is_imported=True), "torch", Health.WARN),
        (Interpreter("3.11.1", "2.13.0", is_distributed=False, is_imported=True), "torch", Health.BAD),
        (Interpreter("3.11.1", "2.8.0a0+git", nccl="2.27.5", is_imported=True), "torch", Health.OK),
    ],
)
def test_versions_are_judged(found: Interpreter, row: str, status: Health) -> None:
    assert rows_of(found)[row][0] is status
