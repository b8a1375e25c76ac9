"""What the doctor says of a node that is unlike most."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agent.service.doctor import Status, _linger

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_user_without_a_name_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 3_999_999_999)

    row = _linger(tmp_path, tmp_path)

    assert row.status is Status.OK
    assert "has no name here" in row.detail
