"""The paint styles by meaning, made from a theme."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.style import Style

from app.settings.themes import THEMES

if TYPE_CHECKING:
    from app.settings.themes import Colours, Ink


class Palette(NamedTuple):
    """The paint styles by meaning."""

    ink: Style
    strong: Style
    muted: Style
    faint: Style
    accent: Style
    heading: Style
    brand: Style
    bar: Style
    bar_muted: Style
    tab: Style
    key: Style
    chosen: Style
    """Style of a user's choice in a heading, such as a filter."""
    found: Style
    """Style of a match in a line."""
    cell: Style
    """Style laid over the selected cell of a grid."""
    raised: Style
    """Style laid over the text of a heading."""
    selected: Style
    """Style laid over a line's own styles."""
    ok: Style
    busy: Style
    warning: Style
    critical: Style
    alarm: Style
    """Style of the headline's band at severity critical."""
    caution: Style
    """Style of the headline's band at severity warning."""
    ranks: tuple[Style, ...]


def palette_of(theme: str) -> Palette:
    """Return the palette of a theme, given its name."""
    chosen = THEMES[theme]
    if chosen.colours is not None:
        return _coloured_palette(chosen.colours)
    return _terminal_palette() if chosen.has_colour else plain_palette()


def _coloured_palette(colours: Colours) -> Palette:
    """Return a palette of true colours; every style sets its background, since live views paint whole lines."""

    def on_ground(colour: str, *, bold: bool = False) -> Style:
        return Style(color=colour, bgcolor=colours.ground, bold=bold or None)

    def on_raised(colour: str, *, bold: bool = False) -> Style:
        return Style(color=colour, bgcolor=colours.raised, bold=bold or None)

    def of(ink: Ink, *, bold: bool = False) -> Style:
        return Style(color=ink.colour, bgcolor=ink.ground, bold=bold or None)

    return Palette(
        ink=on_ground(colours.ink),
        strong=on_ground(colours.strong, bold=True),
        muted=on_ground(colours.muted),
        faint=on_ground(colours.faint),
        accent=on_ground(colours.accent),
        heading=on_raised(colours.muted),
        brand=on_raised(colours.strong, bold=True),
        bar=on_raised(colours.ink),
        bar_muted=on_raised(colours.muted),
        tab=of(colours.tab, bold=True),
        key=on_raised(colours.accent, bold=True),
        chosen=of(colours.chosen, bold=True),
        found=of(colours.found),
        cell=of(colours.cell),
        raised=Style(bgcolor=colours.raised),
        selected=Style(bgcolor=colours.selected),
        ok=on_ground(colours.ok),
        busy=on_ground(colours.busy),
        warning=on_ground(colours.warning),
        critical=on_ground(colours.critical, bold=True),
        alarm=of(colours.alarm, bold=True),
        caution=of(colours.caution, bold=True),
        ranks=tuple(map(on_ground, colours.ranks)),
    )


def _terminal_palette() -> Palette:
    """Return a palette of the terminal's own colours, for any background.

    Of the first eight only red and magenta are readable on black and on white alike (xterm's: 3.6 and 5.8 to 1, 4.5 and
    4.7 to 1), and the bright ones are greys in some palettes: the rest uses weight, reversal and default colours.
    """
    plain = plain_palette()
    magenta, red = Style(color="magenta"), Style(color="red")
    return plain._replace(
        tab=Style(reverse=True, bold=True),
        chosen=magenta + Style(reverse=True, bold=True),
        warning=magenta + Style(bold=True),
        critical=red + Style(bold=True),
        alarm=red + Style(reverse=True, bold=True),
        caution=magenta + Style(reverse=True, bold=True),
    )


def plain_palette() -> Palette:
    """Return the palette of a terminal without colour: weight and reversal only."""
    normal, bold, dim = Style(), Style(bold=True), Style(dim=True)
    return Palette(
        ink=normal,
        strong=bold,
        muted=normal,
        faint=dim,
        accent=normal,
        heading=Style(underline=True),
        brand=bold,
        bar=normal,
        bar_muted=dim,
        tab=Style(reverse=True, bold=True),
        key=bold,
        chosen=Style(reverse=True),
        found=Style(bold=True, underline=True),
        cell=Style(reverse=True),
        raised=Style(underline=True),
        selected=Style(reverse=True),
        ok=normal,
        busy=normal,
        warning=bold,
        critical=bold,
        alarm=Style(reverse=True, bold=True),
        caution=bold,
        ranks=(normal,),
    )
