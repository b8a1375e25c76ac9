"""The look of the console: colours, glyphs and names of states and severities, also without colour or UTF-8.

Colour is never alone: a state is a glyph, a name and a colour. The colours are defined in app/settings/themes.py.

`OwnColours` is a filter for a terminal's own colours: stock widgets' colours that may be unreadable become the
default.
"""

from __future__ import annotations

import locale
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.filter import LineFilter
from textual.theme import Theme

from app.diagnosis.causes import RankState, Severity
from app.settings.themes import DECK, PLAIN, THEMES
from app.tui.palette import palette_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.color import Color as TextualColor

    from app.settings.schema import ConsoleSettings


class Glyphs(NamedTuple):
    """The characters beyond ASCII that the console itself paints, or their ASCII replacements."""

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
    levels: str
    """Bars from low to full; none touches the line above."""


UNICODE_GLYPHS = Glyphs(
    states={
        RankState.STARTING: "\u25cc",
        RankState.UNPROBED: "\u25ce",
        RankState.RUNNING: "\u25cf",
        RankState.SLOW: "\u25d0",
        RankState.WAITING: "\u25cb",
        RankState.MISSING: "\u25c6",
        RankState.FROZEN: "\u25a0",
        RankState.SILENT: "\u25c7",
        RankState.EXITED: "\u2716",
        RankState.DONE: "\u2714",
        RankState.STOPPED: "\u25a1",
        RankState.ENDED: "\u25e6",
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
    levels="\u2581\u2582\u2583\u2584\u2585\u2586\u2587",
)
ASCII_GLYPHS = Glyphs(
    states={
        RankState.STARTING: ".",
        RankState.UNPROBED: "*",
        RankState.RUNNING: "+",
        RankState.SLOW: "s",
        RankState.WAITING: "o",
        RankState.MISSING: "?",
        RankState.FROZEN: "#",
        RankState.SILENT: "~",
        RankState.EXITED: "x",
        RankState.DONE: "=",
        RankState.STOPPED: "-",
        RankState.ENDED: "_",
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
    levels="123456789",
)

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
    """A theme and a set of glyphs for this terminal; views read their styles from here on every build."""

    def __init__(self, *, theme: str = DECK, has_colour: bool = True, is_ascii: bool = False) -> None:
        """Use a theme by its name; without colour the plain one."""
        self.is_ascii = is_ascii
        self.glyphs = ASCII_GLYPHS if is_ascii else UNICODE_GLYPHS
        self.wear(theme if has_colour else PLAIN)

    def wear(self, theme: str) -> None:
        self.theme = theme
        self.has_colour = THEMES[theme].has_colour
        self.palette = palette = palette_of(theme)
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
            RankState.SLOW: palette.warning,
            RankState.WAITING: palette.busy,
            RankState.MISSING: palette.warning,
            RankState.FROZEN: palette.critical,
            RankState.SILENT: palette.warning,
            RankState.EXITED: palette.critical,
            RankState.DONE: palette.muted,
            RankState.STOPPED: palette.muted,
            RankState.ENDED: palette.muted,
            RankState.LOST: palette.critical,
        }

    @classmethod
    def chosen(cls, settings: ConsoleSettings) -> Look:
        """Return the look of the user's settings; `auto` follows the terminal's encoding."""
        if settings.ascii == "auto":
            encoding = getattr(sys.__stderr__, "encoding", None) or locale.getpreferredencoding()
            return cls(theme=settings.theme, is_ascii=encoding.lower().replace("-", "") != "utf8")
        return cls(theme=settings.theme, is_ascii=settings.ascii == "true")

    def severity_style(self, severity: Severity) -> Style:
        """Return the style of a severity's glyph and name."""
        return self._severity_styles[severity]

    def state_style(self, state: RankState) -> Style:
        """Return the style of a state's glyph and name."""
        return self._state_styles[state]

    def rank_style(self, rank: int) -> Style:
        """Return the style of a rank's prefix in the log; the launcher's is muted."""
        return self.palette.ranks[rank % len(self.palette.ranks)] if rank >= 0 else self.palette.muted

    def shown(self, text: str) -> str:
        """Return text as this terminal can print it: an ASCII look shows other characters as escapes."""
        if not self.is_ascii or text.isascii():
            return text
        return text.encode("ascii", "backslashreplace").decode()


def textual_theme(name: str) -> Theme:
    """Return the theme of the stock widgets (dialogs, palette) that matches one of the console's."""
    chosen = THEMES[name]
    if chosen.colours is None:
        default = "ansi_default"
        red, magenta = ("ansi_red", "ansi_magenta") if chosen.has_colour else (default, default)
        return Theme(
            name=name,
            ansi=True,
            primary=default,
            secondary=default,
            warning=magenta,
            error=red,
            success=default,
            accent=default,
            foreground=default,
            background=default,
            surface=default,
            panel=default,
            boost=default,
            # Textual's own style sheets need these variables in every theme of terminal colours.
            variables=dict.fromkeys(_TERMINAL_VARIABLES, default) | {"input-cursor-text-style": "reverse"},
        )
    colours = chosen.colours
    return Theme(
        name=name,
        primary=colours.accent,
        secondary=colours.accent,
        warning=colours.warning,
        error=colours.critical,
        success=colours.ok,
        accent=colours.accent,
        foreground=colours.ink,
        background=colours.ground,
        surface=colours.raised,
        panel=colours.raised,
        dark=chosen.is_dark,
        variables={
            "block-cursor-background": colours.accent,
            "block-cursor-foreground": colours.ground,
            "footer-key-foreground": colours.accent,
        },
    )


DEFAULT = Color.default()
READABLE = frozenset({1, 5})
"""Red and magenta: see `app.tui.palette`."""


class OwnColours(LineFilter):
    """Filters every painted line."""

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:  # noqa: ARG002 (Textual's)
        """Return the segments in colours that are readable on any background."""
        return [Segment(text, style and _in_own_colours(style), control) for text, style, control in segments]


@lru_cache(1024)
def _in_own_colours(style: Style) -> Style:
    colour, ground = (
        one if one is None or one.is_default or one.number in READABLE else DEFAULT
        for one in (style.color, style.bgcolor)
    )
    return style if (colour, ground) == (style.color, style.bgcolor) else style + Style.from_color(colour, ground)
