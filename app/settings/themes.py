"""The themes by name: the colours of those that bring their own, by meaning.

The colours are those of Okabe and Ito, which stay apart for colour-blind eyes, made lighter or darker for the ground
that they stand on; tests compute their contrast (WCAG 2.2) and how far apart they are for colour-blind eyes.

Source: Okabe and Ito, Color Universal Design (2008).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Ink(NamedTuple):
    """A colour on a ground of its own, as `#rrggbb`."""

    colour: str
    ground: str


class Colours(NamedTuple):
    """Colours of a theme; one without a ground of its own stands on `ground`, in headings on `raised`."""

    ground: str
    raised: str
    selected: str
    """The ground of the selected line, under the line's own inks."""
    ink: str
    strong: str
    muted: str
    faint: str
    """Colour of lines and empty bars, and of text that may be missed."""
    accent: str
    ok: str
    busy: str
    warning: str
    critical: str
    tab: Ink
    chosen: Ink
    found: Ink
    cell: Ink
    alarm: Ink
    caution: Ink
    ranks: tuple[str, ...]
    """Colours of ranks in the log, in turn; the number stands beside them."""


class Theme(NamedTuple):
    """A look that the user may choose.

    Attributes:
        sentence: Description for users.
        colours: None where the terminal's own serve, or none.
        is_dark: Whether its ground is dark.
        has_colour: False for weight and reversal alone.
    """

    sentence: str
    colours: Colours | None
    is_dark: bool = True
    has_colour: bool = True


DECK, LIGHT, CONTRAST, ANSI, PLAIN = "deck", "light", "contrast", "ansi", "plain"

_DECK = Colours(
    ground="#0f1318",
    raised="#1a212a",
    selected="#203040",
    ink="#d5dbe3",
    strong="#ffffff",
    muted="#98a5b4",
    faint="#6d7a87",
    accent="#56b4e9",
    ok="#2bc191",
    busy="#56b4e9",
    warning="#f0b040",
    critical="#ff7a45",
    tab=Ink("#0f1318", "#56b4e9"),
    chosen=Ink("#0f1318", "#f0b040"),
    found=Ink("#0f1318", "#f0e442"),
    cell=Ink("#0f1318", "#ffffff"),
    alarm=Ink("#ffe3d6", "#4a1a0d"),
    caution=Ink("#ffe7b8", "#3a2c0c"),
    ranks=("#56b4e9", "#f0b040", "#2bc191", "#d58fc0", "#f0e442", "#5aa0e0", "#ff7a45"),
)
_LIGHT = Colours(
    ground="#fcfbf8",
    raised="#ebe8e1",
    selected="#cfe2f3",
    ink="#1f2933",
    strong="#000000",
    muted="#4c5966",
    faint="#727d88",
    accent="#0a5a96",
    ok="#006b4f",
    busy="#0a5a96",
    warning="#805700",
    critical="#a8002f",
    tab=Ink("#ffffff", "#0a5a96"),
    chosen=Ink("#1f2933", "#f0b040"),
    found=Ink("#1f2933", "#f0e442"),
    cell=Ink("#ffffff", "#000000"),
    alarm=Ink("#ffffff", "#a32600"),
    caution=Ink("#3d2900", "#ffdf99"),
    ranks=("#0a5a96", "#805700", "#006b4f", "#8b3a73", "#5f5700", "#3b4fa0", "#a8002f"),
)
_CONTRAST = Colours(
    ground="#000000",
    raised="#202020",
    selected="#00264a",
    ink="#ffffff",
    strong="#ffffff",
    muted="#d8d8d8",
    faint="#b0b0b0",
    accent="#8fd6ff",
    ok="#4ce0a8",
    busy="#8fd6ff",
    warning="#ffd23f",
    critical="#ff9c78",
    tab=Ink("#000000", "#8fd6ff"),
    chosen=Ink("#000000", "#ffd23f"),
    found=Ink("#000000", "#fff799"),
    cell=Ink("#000000", "#ffffff"),
    alarm=Ink("#ffffff", "#8a1f00"),
    caution=Ink("#000000", "#ffd23f"),
    ranks=("#8fd6ff", "#ffd23f", "#4ce0a8", "#f5b8e0", "#fff799", "#b3c8ff", "#ff9c78"),
)

THEMES: Mapping[str, Theme] = {
    DECK: Theme("dark, for long looks", _DECK),
    LIGHT: Theme("dark on light", _LIGHT, is_dark=False),
    CONTRAST: Theme("as much contrast as there is", _CONTRAST),
    ANSI: Theme("the terminal's own colours, sixteen are enough", None),
    PLAIN: Theme("no colour", None, has_colour=False),
}
