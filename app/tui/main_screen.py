"""The screen below every dialog."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen

from app.tui.actions import screen_bindings

if TYPE_CHECKING:
    from textual.binding import BindingType


class MainScreen(Screen[None], inherit_bindings=False):
    """Its keys are the action table's, and no others."""

    BINDINGS: ClassVar[list[BindingType]] = list(screen_bindings())
