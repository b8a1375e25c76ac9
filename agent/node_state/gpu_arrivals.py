"""When ranks come to collectives on their GPUs, from how long each GPU is in them.

Pure.

A main thread calls long before its GPU comes to the call, so the times of the calls show no slow GPU. NCCL's kernel
runs on each member until the last one has come: they end together, and a GPU that was in the call for a shorter time
has come later by the difference. Those of one group run one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

Key = tuple[str, int]
"""Group and seq of a collective."""


class GpuArrivals:
    """Times of arrival by the machine's clock: roughly those of the calls, and exactly as far apart as on the GPUs."""

    def __init__(self) -> None:
        self._ends_us: dict[Key, int] = {}
        """When the collectives of the last comparison ended: a ring shows some of them again."""

    def place(self, calls: MutableMapping[Key, dict[int, int]], on_gpu_us: Mapping[Key, Mapping[int, int]]) -> None:
        """Replace the times of calls, by rank, by those of arrival on the GPU where these are known of all ranks."""
        before, self._ends_us = self._ends_us, {}
        latest_us: dict[str, int] = {}
        for key in sorted(on_gpu_us, key=lambda key: max(calls[key].values())):
            called_us, lasted_us = calls[key], on_gpu_us[key]
            if called_us.keys() != lasted_us.keys():
                continue
            group, _ = key
            began_us = max(latest_us.get(group, 0), *called_us.values())
            end_us = before.get(key, began_us + max(lasted_us.values()))
            self._ends_us[key] = latest_us[group] = end_us
            calls[key] = {rank: end_us - for_us for rank, for_us in lasted_us.items()}
