"""The programs that take half an hour together run when they are asked for: `pytest -m reported`."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave them out of runs whose `-m` does not name them."""
    if "reported" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("reported")]
    items[:] = [item for item in items if not item.get_closest_marker("reported")]
    config.hook.pytest_deselected(items=left_out)
