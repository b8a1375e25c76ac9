"""Wheels for tests: small ones made here, which pip takes as any other."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def write_wheel(
    directory: Path, name: str, version: str, requires: Sequence[str] = (), source: str = "", module: str = "deck"
) -> Path:
    """Write a wheel with one module, and return where."""
    info = f"{name}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    headers += [f"Requires-Dist: {text}" for text in requires]
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": "\n".join(headers) + "\n\nREADME\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{file},," for file in (*files, f"{info}/RECORD")]
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return path
