"""What a terminal shows that is too small for the views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.line_view import LineView

if TYPE_CHECKING:
    from textual.geometry import Size

    from app.tui.stage import Stage

MIN_WIDTH = 60
MIN_HEIGHT = 15


def is_too_small(size: Size) -> bool:
    """Return whether the views do not fit a terminal."""
    return size.width < MIN_WIDTH or size.height < MIN_HEIGHT


class TooSmall(LineView):
    """What is there, what is needed, and how to leave."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "too-small")

    def build(self) -> None:
        """Say what is there and what is needed."""
        size = self.app.size
        lines = [
            self.line().put(f"{MIN_WIDTH}x{MIN_HEIGHT} needed, this is {size.width}x{size.height}"),
            self.line().put(f"({self.stage.keymap.first('quit')} quits)", self.look.palette.muted),
        ]
        self.lines = lines[: size.height]
