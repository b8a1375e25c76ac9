"""Wheels of this machine: of what is installed here, of a directory, of a file that a person names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.errors import SessionError, UsageError
from app.install import own_wheel
from app.install.on_host import content_digest
from app.install.own_wheel import checkout, named_wheel, read_wheel, repacked, wheels_in
from tests.support.wheels import write_wheel


def test_an_installed_distribution_becomes_a_wheel_that_pip_takes(tmp_path: Path) -> None:
    path = repacked("click", tmp_path)

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        record = archive.read(f"{info}/RECORD").decode()
    assert path.name == f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    assert "click/core.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(("INSTALLER", "direct_url.json"))]
    assert len(record.splitlines()) == len(names)
    pip = [sys.executable, "-P", "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, str(tmp_path / "out"), str(path)], check=True, timeout=60)
    assert (tmp_path / "out/click/core.py").exists()
    assert read_wheel(path).installed_bytes > read_wheel(path).num_bytes


def test_what_is_packed_twice_is_the_same(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        contents.append(repacked("msgspec", tmp_path / name).read_bytes())

    assert contents[0] == contents[1]


def test_what_cannot_be_packed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SessionError, match="nothing-of-this-name is not installed here"):
        repacked("nothing-of-this-name", tmp_path)
    (tmp_path / "unlisted-1.dist-info").mkdir()
    (tmp_path / "unlisted-1.dist-info/METADATA").write_text("Name: unlisted\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SessionError, match="files of the installed unlisted are not listed") as caught:
        repacked("unlisted", tmp_path)
    assert "--wheel FILE" in caught.value.hint
    (tmp_path / "unlisted-1.dist-info/RECORD").write_text("unlisted-1.dist-info/WHEEL,,\ngone.py,,\n")
    (tmp_path / "unlisted-1.dist-info/WHEEL").write_text("Tag: py3-none-any\n")
    with pytest.raises(SessionError, match=r"cannot be packed: .*gone\.py"):
        repacked("unlisted", tmp_path)


def test_a_wheel_of_rankdeck_is_known_by_its_content(tmp_path: Path) -> None:
    own = named_wheel(write_wheel(tmp_path, "rankdeck", "9.1", ("click>=8.2", "numpy"), "pass"))

    headers = (
        b"Metadata-Version: 2.1\nName: rankdeck\nVersion: 9.1\nRequires-Dist: click>=8.2\nRequires-Dist: numpy\n\n"
    )
    files = {"deck.py": b"pass", "rankdeck-9.1.dist-info/METADATA": headers}
    assert own.digest == content_digest(files, files.__getitem__)
    assert (own.wheel.version, own.wheel.requires) == ("9.1", ("click>=8.2", "numpy"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rankdeck.whl", b"", "is not called as a wheel is"),
        ("rankdeck-1-py3-none-any.whl", b"no zip", "is a broken wheel"),
        ("rankdeck-2-py3-none-any.whl", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(UsageError, match=words):
        named_wheel(tmp_path / name)


def test_the_wheel_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a wheel of other, not of rankdeck"):
        named_wheel(write_wheel(tmp_path, "other", "1"))
    empty = tmp_path / "rankdeck-1-py3-none-any.whl"
    with zipfile.ZipFile(empty, "w"):
        pass
    with pytest.raises(UsageError, match="is a broken wheel"):
        named_wheel(empty)


def test_a_wheelhouse_is_read_without_rankdeck(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no wheel is in") as caught:
        wheels_in(tmp_path)
    assert f"pip wheel -w {tmp_path}" in caught.value.hint
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        wheels_in(tmp_path / "none")

    write_wheel(tmp_path, "rankdeck", "9.1")
    write_wheel(tmp_path, "other", "1", ("more",))
    (tmp_path / "notes.txt").touch()
    assert [(wheel.name, wheel.requires) for wheel in wheels_in(tmp_path)] == [("other", ("more",))]


def test_a_checkout_that_cannot_be_built_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout() == Path(__file__).parents[4]
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'nothing_there'\n")
    monkeypatch.setattr(own_wheel, "checkout", lambda: tmp_path)
    (tmp_path / "out").mkdir()

    with pytest.raises(SessionError, match=r"cannot be built: .*nothing_there"):
        own_wheel.own_wheel(tmp_path / "out")
