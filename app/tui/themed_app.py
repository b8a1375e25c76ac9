"""An app in one of our themes: what the stock widgets wear beside the views."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Generic

from textual.app import ReturnType
from textual.filter import NoColor

from app.settings.themes import THEMES
from app.tui.key_order import KeysInOrder
from app.tui.own_colours import OwnColours
from app.tui.theme import textual_theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.filter import LineFilter

    from app.tui.theme import Look


class ThemedApp(KeysInOrder[ReturnType], Generic[ReturnType]):
    """An app that wears a look.

    Attributes:
        look: The stock widgets wear the theme of the same name.
    """

    def __init__(self, look: Look) -> None:
        # The settings have heeded it already; Textual would gray out a theme that a person has named all the same.
        os.environ.pop("NO_COLOR", None)
        super().__init__()
        self.look = look
        self._no_colours, self._own_colours = NoColor(), OwnColours()
        for name in THEMES:
            self.register_theme(textual_theme(name))
        self.wear(look.theme)
        self.set_class(look.is_ascii, "ascii")

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Take away the colours that a stock widget brings and the theme does not."""
        filters, theme = super().get_line_filters(), THEMES[self.look.theme]
        if theme.colours is not None:
            return filters
        return [*filters, self._own_colours if theme.has_colour else self._no_colours]

    def wear(self, theme: str) -> None:
        """Change the theme; what is painted already has to be painted anew."""
        self.look.wear(theme)
        self.no_color = not self.look.has_colour
        self.theme = theme
