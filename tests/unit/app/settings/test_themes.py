"""Themes can be read, by everybody: contrast and colour blindness, computed."""

from __future__ import annotations

from itertools import combinations

import pytest

from app.settings.themes import ANSI, CONTRAST, DECK, PLAIN, THEMES, Colours

READABLE, FAINT = 4.5, 3.0
"""Contrast of text, and of what may be missed. Source: WCAG 2.2, 1.4.3 and 1.4.11."""
MOST = 7.0
"""Source: WCAG 2.2, 1.4.6."""
APART = 10.0
"""In CIELAB (CIE76): seen at a glance."""
COLOURED = {name: theme.colours for name, theme in THEMES.items() if theme.colours is not None}
LABEL = ("ink", "strong", "muted", "accent", "ok", "busy", "warning", "critical")
GROUNDS = ("ground", "raised", "selected")
STATES = ("ok", "busy", "warning", "critical")
SEEN_BY = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopes": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""Source: Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency
(2009), severity 1.0."""

Triple = tuple[float, float, float]


def linear(colour: str) -> Triple:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(times((0.2126, 0.7152, 0.0722), linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def times(row: Triple, colour: Triple) -> float:
    return sum(weight * part for weight, part in zip(row, colour, strict=True))


def lab(colour: Triple) -> Triple:
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.95047, 1.0, 1.08883)
    ratios = [times(row, colour) / part for row, part in zip(to_xyz, white, strict=True)]
    x, y, z = (ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116 for ratio in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, who: str) -> Triple:
    first, second, third = (min(1.0, max(0.0, times(row, linear(colour)))) for row in SEEN_BY[who])
    return lab((first, second, third))


def test_there_are_five_themes_and_what_is_compared_is_theirs() -> None:
    assert list(THEMES) == [DECK, "light", CONTRAST, ANSI, PLAIN]
    assert list(COLOURED) == [DECK, "light", CONTRAST]
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(("name", "colours"), COLOURED.items())
def test_every_ink_can_be_read_on_every_ground_it_stands_on(name: str, colours: Colours) -> None:
    least = MOST if name == CONTRAST else READABLE
    for ground in GROUNDS:
        below = getattr(colours, ground)
        for word in LABEL:
            assert contrast(getattr(colours, word), below) >= least, (word, ground)
        assert contrast(colours.faint, below) >= FAINT, ground
        for rank in colours.ranks:
            assert contrast(rank, below) >= READABLE, (rank, ground)
    for word in ("tab", "chosen", "found", "cell", "alarm", "caution"):
        assert contrast(*getattr(colours, word)) >= least, word


@pytest.mark.parametrize("who", SEEN_BY)
@pytest.mark.parametrize(("name", "colours"), COLOURED.items())
def test_states_stay_apart_for_colour_blind_eyes(name: str, colours: Colours, who: str) -> None:
    for one, other in combinations(STATES, 2):
        lights = [seen(getattr(colours, word), who) for word in (one, other)]
        distance = sum((left - right) ** 2 for left, right in zip(*lights, strict=True)) ** 0.5
        assert distance >= APART, (one, other, round(distance, 1))


@pytest.mark.parametrize(("name", "colours"), COLOURED.items())
def test_the_inks_of_ranks_are_not_twice_the_same(name: str, colours: Colours) -> None:
    assert len(set(colours.ranks)) == len(colours.ranks)


def test_of_a_terminals_own_colours_only_red_and_magenta_can_be_read_on_black_and_on_white() -> None:
    xterm = {
        "black": "#000000",
        "red": "#cd0000",
        "green": "#00cd00",
        "yellow": "#cdcd00",
        "blue": "#0000ee",
        "magenta": "#cd00cd",
        "cyan": "#00cdcd",
        "white": "#e5e5e5",
    }

    readable = [name for name, rgb in xterm.items() if min(contrast(rgb, "#000000"), contrast(rgb, "#ffffff")) >= 3.5]

    assert readable == ["red", "magenta"]


def test_only_the_light_theme_calls_itself_light_and_its_ground_is() -> None:
    for name, colours in COLOURED.items():
        assert THEMES[name].is_dark is (contrast(colours.ground, "#000000") < contrast(colours.ground, "#ffffff"))
    assert THEMES[PLAIN].has_colour is False
    assert THEMES[ANSI].has_colour is True
