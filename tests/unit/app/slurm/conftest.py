"""Commands of Slurm that print what a test wants."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has a command print some text from then on; each call adds a byte to NAME.calls.

    NAME.words has the arguments of the last call.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answers(text: str, name: str = "squeue", code: int = 0) -> None:
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / f"{name}.calls").write_text("")
        stream = " >&2" if code else ""
        (tmp_path / name).write_text(
            f'#!/bin/sh\nprintf . >> {tmp_path}/{name}.calls; printf %s "$*" > {tmp_path}/{name}.words\n'
            f"cat {tmp_path}/{name}.txt{stream}; exit {code}\n"
        )
        (tmp_path / name).chmod(0o755)

    return answers
