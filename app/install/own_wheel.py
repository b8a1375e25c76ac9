"""The wheel of the rankdeck that runs here, and wheels that the user names, read from their files.

A checkout is built by pip. An installed rankdeck is packed again from its own files, since pip keeps no wheel.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import msgspec

import app
from app.errors import SessionError, UsageError
from app.install.on_host import DISTRIBUTION, content_digest, normalised
from app.install.wheels import Wheel, error_line_of, wheel_of
from app.text import LINE_LIMIT, clean

BUILD_TIMEOUT_S = 300.0
"""Seconds for pip, which may have to fetch the build backend over a slow line."""
WITH_BYTECODE = 2.7
"""Size of a source file with its bytecode as a multiple, measured on rankdeck: 2.4 MB become 6.5."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""First moment of the zip format, so that the same files make the same wheel."""
_NOT_OF_A_WHEEL = frozenset({"RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Files that an installer of a wheel adds."""
_UNBUILT = "build it elsewhere, and name it: --wheel FILE"


class OwnWheel(msgspec.Struct, frozen=True):
    """What is installed on hosts."""

    wheel: Wheel
    digest: str
    """See `app.install.on_host.content_digest`."""


def checkout() -> Path | None:
    """Return the source tree that this runs from; None for an installed rankdeck."""
    root = Path(str(app.__file__)).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def own_wheel(directory: Path) -> OwnWheel:
    """Make the wheel of the rankdeck that runs here.

    Args:
        directory: Where it is written.

    Raises:
        SessionError: It cannot be made.
    """
    root = checkout()
    path = repacked(DISTRIBUTION, directory) if root is None else _built(root, directory)
    return named_wheel(path)


def named_wheel(path: Path) -> OwnWheel:
    """Return the wheel of rankdeck in a file.

    Raises:
        UsageError: It is none.
    """
    wheel = read_wheel(path)
    if wheel.name != DISTRIBUTION:
        raise UsageError(f"{clean(str(path), LINE_LIMIT)} is a wheel of {clean(wheel.name)}, not of {DISTRIBUTION}")
    with zipfile.ZipFile(path) as archive:
        return OwnWheel(wheel, content_digest(archive.namelist(), archive.read))


def wheels_in(directory: Path) -> list[Wheel]:
    """Return all wheels of a directory, but none of rankdeck.

    Raises:
        UsageError: It cannot be read, or holds none.
    """
    shown = clean(str(directory), LINE_LIMIT)
    try:
        paths = sorted(path for path in directory.iterdir() if wheel_of(str(path)))
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}") from error
    if not paths:
        raise UsageError(f"no wheel is in {shown}", f"python3 -m pip wheel -w {shown} {checkout() or DISTRIBUTION}")
    return [wheel for path in paths if (wheel := read_wheel(path)).name != DISTRIBUTION]


def read_wheel(path: Path) -> Wheel:
    """Return a wheel with what it requires and how large it is.

    Raises:
        UsageError: It is none, or cannot be read.
    """
    shown = clean(str(path), LINE_LIMIT)
    wheel = wheel_of(str(path))
    if wheel is None:
        raise UsageError(f"{shown} is not called as a wheel is", "NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (
                name
                for name in archive.namelist()
                if name.count("/") == 1
                and name.endswith(".dist-info/METADATA")
                and normalised(name.split("-")[0]) == wheel.name
            )
            headers = metadata.PathDistribution(zipfile.Path(archive, name.rpartition("/")[0] + "/")).metadata
            installed = sum(_installed_bytes(info) for info in archive.infolist())
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, ValueError) as error:
        raise UsageError(f"{shown} is a broken wheel: {clean(str(error))}", "copy or build it again") from error
    requires = tuple(headers.get_all("Requires-Dist") or ())
    return msgspec.structs.replace(wheel, requires=requires, num_bytes=path.stat().st_size, installed_bytes=installed)


def _installed_bytes(info: zipfile.ZipInfo) -> int:
    return int(info.file_size * (WITH_BYTECODE if info.filename.endswith(".py") else 1))


def repacked(name: str, directory: Path) -> Path:
    """Pack an installed distribution into a wheel again, from the files that are listed in its RECORD.

    Raises:
        SessionError: They are not listed, or one is gone.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise SessionError(f"{name} is not installed here", _UNBUILT) from None
    files = {file.as_posix(): Path(str(file.locate())) for file in distribution.files or () if _is_packed(file)}
    info = {file.split("/")[0] for file in files if file.endswith(".dist-info/WHEEL")}
    if len(info) != 1:
        raise SessionError(f"the files of the installed {name} are not listed with it", _UNBUILT)
    (info_directory,) = info
    path = directory / f"{info_directory.removesuffix('.dist-info')}-{_tags(distribution)}.whl"
    record = []
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, source in sorted(files.items()):
                content = source.read_bytes()
                entry = zipfile.ZipInfo(file, _EPOCH)
                entry.external_attr = source.stat().st_mode << 16
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                record.append(f'"{file}",sha256={digest},{len(content)}\n')
            record.append(f'"{info_directory}/RECORD",,\n')
            archive.writestr(zipfile.ZipInfo(f"{info_directory}/RECORD", _EPOCH), "".join(record))
    except OSError as error:
        raise SessionError(f"the installed {name} cannot be packed: {error}", _UNBUILT) from error
    return path


def _is_packed(file: metadata.PackagePath) -> bool:
    """Return whether a wheel holds a file; files made at installation, as bytecode and commands, are left out."""
    is_made = "__pycache__" in file.parts or ".." in file.parts or file.is_absolute()
    return not is_made and not (file.parent.name.endswith(".dist-info") and file.name in _NOT_OF_A_WHEEL)


def _tags(distribution: metadata.Distribution) -> str:
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip().split("-") for line in lines if line.startswith("Tag:")]
    return "-".join(".".join(sorted(set(column))) for column in zip(*tags, strict=True))


def _built(root: Path, directory: Path) -> Path:
    argv = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-input", "--disable-pip-version-check"]
    if importlib.util.find_spec("hatchling") is not None:
        argv.append("--no-build-isolation")  # use the installed backend, without an index
    try:
        done = subprocess.run(
            [*argv, "--wheel-dir", str(directory), str(root)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SessionError(f"the wheel of {root} is not built in {BUILD_TIMEOUT_S:g} s", _UNBUILT) from None
    built = list(directory.glob("*.whl"))
    if done.returncode or len(built) != 1:
        error_line = error_line_of(done.stderr.splitlines())
        raise SessionError(f"the wheel of {clean(str(root), LINE_LIMIT)} cannot be built: {error_line}", _UNBUILT)
    return built[0]
