"""What a job would run: the same files have the same digest on every node, and looking has bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from agent.doctor import source_code
from agent.doctor.source_code import MAX_FILE_BYTES, code_rows, look_at_code
from agent.wire.examination import Code, Health

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def seen(root: Path) -> Code:
    code = look_at_code(str(root))
    assert code is not None
    return code


def test_the_same_files_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, b="2", a__c="3", a="1") for name in ("x", "y"))

    assert seen(first).digest == seen(second).digest
    assert [file.path for file in seen(first).files] == ["a.py", "b.py", "a/c.py"]
    write(second, b="other")
    assert seen(first).digest != seen(second).digest
    (second / "b.py").unlink()
    assert seen(first).digest != seen(second).digest


def test_what_is_no_source_does_not_count(tmp_path: Path) -> None:
    before = seen(write(tmp_path, train="1")).digest
    for name in ("checkpoint.pt", "run.log", ".hidden/x.py", "__pycache__/x.py", "venv/pyvenv.cfg", "venv/lib.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("anything")
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "loop").symlink_to(tmp_path)

    code = seen(tmp_path)

    assert [(file.path, file.digest) for file in code.files if file.path != "train.py"] == [("pipe.sh", "unreadable")]
    (tmp_path / "pipe.sh").unlink()
    assert seen(tmp_path).digest == before


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    linked = write(tmp_path / "a", lib="1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/lib.py").symlink_to(linked / "lib.py")

    assert seen(linked).digest == seen(tmp_path / "b").digest


def test_of_a_large_file_the_size_counts(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_bytes(bytes(MAX_FILE_BYTES + 1))

    assert [file.digest for file in seen(tmp_path).files] == [f"{MAX_FILE_BYTES + 1} bytes"]


def test_a_name_that_is_not_utf_8_is_told_as_far_as_it_can_be(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("1")

    assert [file.path for file in seen(tmp_path).files] == ["\N{REPLACEMENT CHARACTER}.py"]


@pytest.mark.parametrize("bound", ["MAX_SOURCE_FILES", "MAX_SOURCE_BYTES", "MAX_DIRECTORIES"])
def test_more_than_can_be_looked_at_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(source_code, bound, 1)

    code = seen(write(tmp_path, a="12", b="34", c__d="56"))

    assert (code.digest, code.files) == ("", [])
    assert "too many files to compare" in next(iter(code_rows("x", code))).detail


def test_more_files_than_can_be_told_still_have_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_code, "MAX_PATH_CHARS", 5)

    code = seen(write(tmp_path, a="1", b="2"))

    assert (bool(code.digest), code.files) == (True, [])


def test_time_is_a_bound_too(tmp_path: Path) -> None:
    code = look_at_code(str(write(tmp_path, a="1")), look_s=0.0)

    assert code is not None
    assert code.digest == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_tells_the_commit_and_what_has_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/somewhere/else")
    write(tmp_path, train="1", model="1")
    for argv in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        subprocess.run(["git", *argv], cwd=tmp_path, env=environ, check=True)

    clean = seen(tmp_path)
    write(tmp_path, train="2", new="1")
    changed = seen(tmp_path)

    assert (len(clean.commit), clean.num_changed) == (40, 0)
    assert (changed.commit, changed.num_changed) == (clean.commit, 1)
    assert changed.digest != clean.digest
    (row,) = code_rows("x", changed)
    assert f"commit {clean.commit[:12]}, 1 file changed since" in row.detail


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    code = seen(tmp_path)

    assert (code.commit, code.num_changed) == ("", 0)


def test_a_directory_that_is_not_there_is_bad(tmp_path: Path) -> None:
    assert look_at_code(str(tmp_path / "none")) is None
    (row,) = code_rows("/none", None)
    assert row.status is Health.BAD
    assert [*code_rows("", None)] == []
