"""How things look: colours, glyphs and words of states and severities, also without colour or UTF-8.

Colour is never alone: a state is a glyph, a word and a colour. The colours are those of Okabe and Ito, which stay apart
for colour-blind eyes, here on a dark ground; every style carries its ground, since live views paint whole lines.

Source: Okabe and Ito, Color Universal Design (2008); https://no-color.org.
"""

from __future__ import annotations

import locale
import sys
from typing import TYPE_CHECKING, NamedTuple

from rich.style import Style
from textual.theme import Theme

from app.rows import RankState, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUND = "#0f1318"
RAISED = "#1a212a"
SELECTED = "#26384a"
INK = "#d5dbe3"
MUTED = "#8b98a7"
FAINT = "#56626f"
SKY = "#56b4e9"
GREEN = "#2bbf91"
AMBER = "#f0b040"
VERMILLION = "#ff7a45"
PURPLE = "#d58fc0"
YELLOW = "#f0e442"
BLUE = "#5aa0e0"
ALARM_GROUND = "#4a1a0d"
WARNING_GROUND = "#3a2c0c"

RANK_INKS = (SKY, AMBER, GREEN, PURPLE, YELLOW, BLUE, VERMILLION)
"""Colours of ranks in the log, in turn; the number stands beside them."""


class Palette(NamedTuple):
    """Every style that is used to paint, by meaning."""

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
    """What somebody has chosen to see or to leave out, in a heading."""
    found: Style
    """What was looked for, in a line."""
    cell: Style
    """Laid over the selected cell of a grid."""
    raised: Style
    """Laid over what stands in a heading."""
    selected: Style
    """Laid over a line's own styles."""
    ok: Style
    busy: Style
    warning: Style
    critical: Style
    alarm: Style
    """The headline's band when something is critical."""
    caution: Style
    """The headline's band when something is odd."""
    ranks: tuple[Style, ...]


def coloured_palette() -> Palette:
    """Return the palette of a terminal with colours."""
    return Palette(
        ink=Style(color=INK, bgcolor=GROUND),
        strong=Style(color="#ffffff", bgcolor=GROUND, bold=True),
        muted=Style(color=MUTED, bgcolor=GROUND),
        faint=Style(color=FAINT, bgcolor=GROUND),
        accent=Style(color=SKY, bgcolor=GROUND),
        heading=Style(color=MUTED, bgcolor=RAISED),
        brand=Style(color="#ffffff", bgcolor=RAISED, bold=True),
        bar=Style(color=INK, bgcolor=RAISED),
        bar_muted=Style(color=MUTED, bgcolor=RAISED),
        tab=Style(color=GROUND, bgcolor=SKY, bold=True),
        key=Style(color=SKY, bgcolor=RAISED, bold=True),
        chosen=Style(color=GROUND, bgcolor=AMBER, bold=True),
        found=Style(color=GROUND, bgcolor=YELLOW),
        cell=Style(color=GROUND, bgcolor="#ffffff"),
        raised=Style(bgcolor=RAISED),
        selected=Style(bgcolor=SELECTED),
        ok=Style(color=GREEN, bgcolor=GROUND),
        busy=Style(color=SKY, bgcolor=GROUND),
        warning=Style(color=AMBER, bgcolor=GROUND),
        critical=Style(color=VERMILLION, bgcolor=GROUND, bold=True),
        alarm=Style(color="#ffe3d6", bgcolor=ALARM_GROUND, bold=True),
        caution=Style(color="#ffe7b8", bgcolor=WARNING_GROUND, bold=True),
        ranks=tuple(Style(color=ink, bgcolor=GROUND) for ink in RANK_INKS),
    )


def plain_palette() -> Palette:
    """Return the palette of a terminal that asked for no colour: weight and reversal only."""
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


class Glyphs(NamedTuple):
    """Every character beyond ASCII that the console itself paints, or its stand-in."""

    states: Mapping[RankState, str]
    severities: Mapping[Severity, str]
    bar_full: str
    bar_half: str
    bar_empty: str
    mark: str
    pointer: str
    more: str
    arrow: str
    dot: str
    dash: str
    scroll_thumb: str
    scroll_track: str
    stderr: str
    ellipsis: str
    spinner: str
    line: str
    corner: str
    side: str
    tick: str
    guide: str
    attempt: str
    thick: str
    dotted: str


UNICODE_GLYPHS = Glyphs(
    states={
        RankState.STARTING: "\u25cc",
        RankState.UNPROBED: "\u25ce",
        RankState.RUNNING: "\u25cf",
        RankState.WAITING: "\u25cb",
        RankState.MISSING: "\u25c6",
        RankState.FROZEN: "\u25a0",
        RankState.SILENT: "\u25c7",
        RankState.EXITED: "\u2716",
        RankState.DONE: "\u2714",
        RankState.LOST: "\u25b2",
    },
    severities={
        Severity.OK: "\u25cf",
        Severity.QUIET: "\u25cc",
        Severity.WARNING: "\u25b2",
        Severity.CRITICAL: "\u2716",
    },
    bar_full="\u2501",
    bar_half="\u257e",
    bar_empty="\u2500",
    mark="\u2503",
    pointer="\u25b8",
    more="\u25b4",
    arrow="\u2192",
    dot="\u00b7",
    dash="\u2013",
    scroll_thumb="\u2503",
    scroll_track="\u2502",
    stderr="\u258c",
    ellipsis="\u2026",
    spinner="\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f",
    line="\u2500",
    corner="\u2514",
    side="\u2502",
    tick="\u2534",
    guide="\u250a",
    attempt="\u21bb",
    thick="\u2836\u2836",
    dotted="\u2802\u2802",
)
ASCII_GLYPHS = Glyphs(
    states={
        RankState.STARTING: ".",
        RankState.UNPROBED: "*",
        RankState.RUNNING: "+",
        RankState.WAITING: "o",
        RankState.MISSING: "?",
        RankState.FROZEN: "#",
        RankState.SILENT: "~",
        RankState.EXITED: "x",
        RankState.DONE: "=",
        RankState.LOST: "!",
    },
    severities={Severity.OK: "+", Severity.QUIET: ".", Severity.WARNING: "!", Severity.CRITICAL: "X"},
    bar_full="#",
    bar_half=">",
    bar_empty="-",
    mark="|",
    pointer=">",
    more="+",
    arrow="->",
    dot="-",
    dash="-",
    scroll_thumb="#",
    scroll_track="|",
    stderr="!",
    ellipsis="~",
    spinner="|/-\\",
    line="-",
    corner="+",
    side="|",
    tick="+",
    guide=":",
    attempt="A",
    thick="**",
    dotted="..",
)

SEVERITY_WORDS = {
    Severity.OK: "OK",
    Severity.QUIET: "INFO",
    Severity.WARNING: "WARNING",
    Severity.CRITICAL: "CRITICAL",
}

_TERMINAL_VARIABLES = (
    "ansi-background",
    "ansi-foreground",
    "border-blurred",
    "block-cursor-background",
    "block-cursor-foreground",
    "input-cursor-background",
    "input-cursor-foreground",
    "input-selection-background",
    "input-selection-foreground",
    "screen-selection-background",
    "screen-selection-foreground",
)


class Look:
    """A palette and a set of glyphs, chosen once for this terminal."""

    def __init__(self, *, has_colour: bool = True, is_ascii: bool = False) -> None:
        self.has_colour = has_colour
        self.is_ascii = is_ascii
        self.palette = coloured_palette() if has_colour else plain_palette()
        self.glyphs = ASCII_GLYPHS if is_ascii else UNICODE_GLYPHS
        palette = self.palette
        self._severity_styles = {
            Severity.OK: palette.ok,
            Severity.QUIET: palette.muted,
            Severity.WARNING: palette.warning,
            Severity.CRITICAL: palette.critical,
        }
        self._state_styles = {
            RankState.STARTING: palette.muted,
            RankState.UNPROBED: palette.muted,
            RankState.RUNNING: palette.ok,
            RankState.WAITING: palette.busy,
            RankState.MISSING: palette.warning,
            RankState.FROZEN: palette.critical,
            RankState.SILENT: palette.warning,
            RankState.EXITED: palette.critical,
            RankState.DONE: palette.muted,
            RankState.LOST: palette.critical,
        }

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Look:
        """Return the look that this terminal can show, as `NO_COLOR`, `RANKDECK_ASCII` and the encoding say."""
        encoding = getattr(sys.__stderr__, "encoding", None) or locale.getpreferredencoding()
        is_ascii = environ.get("RANKDECK_ASCII", "") == "1" or encoding.lower().replace("-", "") != "utf8"
        return cls(has_colour=not environ.get("NO_COLOR"), is_ascii=is_ascii)

    def severity_style(self, severity: Severity) -> Style:
        """Return the style of a severity's glyph and word."""
        return self._severity_styles[severity]

    def state_style(self, state: RankState) -> Style:
        """Return the style of a state's glyph and word."""
        return self._state_styles[state]

    def rank_style(self, rank: int) -> Style:
        """Return the style of a rank's prefix in the log; the launcher's is muted."""
        return self.palette.ranks[rank % len(self.palette.ranks)] if rank >= 0 else self.palette.muted

    def shown(self, text: str) -> str:
        """Return text as this terminal can print it: in an ASCII look, other characters as escapes."""
        if not self.is_ascii or text.isascii():
            return text
        return text.encode("ascii", "backslashreplace").decode()


def textual_theme(look: Look) -> Theme:
    """Return the theme of the stock widgets (dialogs, palette) that fits the look."""
    if not look.has_colour:
        default = "ansi_default"
        return Theme(
            name="rankdeck",
            ansi=True,
            primary=default,
            secondary=default,
            warning=default,
            error=default,
            success=default,
            accent=default,
            foreground=default,
            background=default,
            surface=default,
            panel=default,
            boost=default,
            # Textual's own style sheets ask for these of every theme of terminal colours.
            variables=dict.fromkeys(_TERMINAL_VARIABLES, default) | {"input-cursor-text-style": "reverse"},
        )
    return Theme(
        name="rankdeck",
        primary=SKY,
        secondary=BLUE,
        warning=AMBER,
        error=VERMILLION,
        success=GREEN,
        accent=SKY,
        foreground=INK,
        background=GROUND,
        surface=RAISED,
        panel=RAISED,
        dark=True,
        variables={"block-cursor-background": SKY, "block-cursor-foreground": GROUND, "footer-key-foreground": SKY},
    )
