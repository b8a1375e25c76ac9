"""How many cores a process keeps busy, from samples of its CPU time. Pure."""

from __future__ import annotations

WINDOW_S = 1.0
"""At least: the kernel counts in hundredths of a second, and a step of the training should fit in."""


class CpuUse:
    """Of one process.

    Attributes:
        cores: Over the last window that is complete, one to two of `WINDOW_S` long; 0 before the first.
    """

    __slots__ = ("_since", "cores")

    def __init__(self) -> None:
        self.cores = 0.0
        self._since: tuple[float, float] | None = None

    def take(self, cpu_s: float, now_s: float) -> None:
        """Take a sample of the CPU time."""
        if self._since is None:
            self._since = (now_s, cpu_s)
            return
        since_s, before_s = self._since
        if now_s - since_s >= WINDOW_S:
            self.cores = max(0.0, cpu_s - before_s) / (now_s - since_s)
            self._since = (now_s, cpu_s)
