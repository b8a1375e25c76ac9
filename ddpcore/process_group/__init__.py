"""The job's process group: opened with all ranks or an error that names what is wrong, closed without a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from ddpcore.process_group.open_group import OpenGroup, open_process_group

__all__ = ["OpenGroup", "open_process_group"]

__getattr__ = lazy_names(
    __name__,
    {
        "OpenGroup": "open_group",
        "open_process_group": "open_group",
    },
)
