"""One chart: a title with the current value, curves, and their scale on the left.

`chart_lines` draws a figure over time, `loss_panel` the loss over the steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.text import bytes_text, loss_text, percent_text, rate_text
from app.tui.widgets.charts import Box, Curve, bounds, drawing, nice_above
from app.tui.widgets.drawing import Line
from app.view.rows import METRIC_PREFIX, FigureKey
from app.view.summary import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.style import Style

    from app.recording.history import Window
    from app.tui.theme import Look
    from app.tui.ui_state import UiState
    from app.view.rows import Figure
    from app.view.view import View

SCALE_WIDTH = 7
PLOT_INDENT = SCALE_WIDTH + 1
"""Cells left of the curves."""


class Extreme(NamedTuple):
    """The lowest or the highest of the values that a figure is the mean of."""

    word: str
    value_of: Callable[[Figure], float | None]
    who_of: Callable[[Figure], str]
    curve_of: Callable[[Window], np.ndarray[tuple[int], np.dtype[np.float32]]]


LOWEST = Extreme("lowest", lambda figure: figure.low, lambda figure: figure.low_who, lambda window: window.low)
HIGHEST = Extreme("highest", lambda figure: figure.high, lambda figure: figure.high_who, lambda window: window.high)


class ChartKind(NamedTuple):
    """The style of a figure's chart.

    Attributes:
        title: Title above the chart.
        missing: Text shown when nothing is known.
        text: Formats a value as text.
        extremes: Extremes that are named and drawn.
        top: Returns the upper end of the scale for the highest drawn value, with 0 as the lower end; None for a scale
            over the drawn values only.
    """

    title: str
    missing: str
    text: Callable[[float | None], str]
    extremes: tuple[Extreme, ...] = (LOWEST, HIGHEST)
    top: Callable[[float], float] | None = None


def _whole(_highest: float) -> float:
    return 1.0


def _bytes_above(highest: float) -> float:
    return nice_above(highest, 1024.0)


KINDS: Mapping[str, ChartKind] = {
    FigureKey.LOSS: ChartKind("LOSS", "no loss reported", loss_text),
    FigureKey.STEP_RATE: ChartKind("STEPS/S", "no rate known", rate_text, (), nice_above),
    FigureKey.WAIT_FRAC: ChartKind("WAIT SHARE", "no rank observed", percent_text, (LOWEST, HIGHEST), _whole),
    FigureKey.GPU_USE: ChartKind("GPU USE", "no fresh figures of GPUs", percent_text, (LOWEST,), _whole),
    FigureKey.GPU_MEMORY: ChartKind("GPU MEMORY", "no fresh figures of GPUs", bytes_text, (HIGHEST,), _bytes_above),
    FigureKey.CPU_CORES: ChartKind("CPU CORES A RANK", "no process seen", rate_text, (LOWEST, HIGHEST), nice_above),
    FigureKey.RANK_MEMORY: ChartKind("MEMORY A RANK", "no process seen", bytes_text, (HIGHEST,), _bytes_above),
    FigureKey.HOST_CPU: ChartKind("CPU OF THE HOSTS", "no node seen", percent_text, (HIGHEST,), _whole),
}


def kind_of(key: str) -> ChartKind:
    """Return the chart style of a figure."""
    return KINDS.get(key) or ChartKind(key.removeprefix(METRIC_PREFIX), "not printed", loss_text)


class Frame(NamedTuple):
    """The common part of all charts of one screen.

    Attributes:
        begin_s: The left end of their time.
        end_s: The right end.
        width: Width of a chart, in cells.
        guides: Columns behind the curves that mark events.
    """

    begin_s: float
    end_s: float
    width: int
    guides: frozenset[int]

    @property
    def plot_width(self) -> int:
        """Cells of the curves."""
        return max(1, self.width - PLOT_INDENT - 1)

    def column(self, at_s: float) -> int:
        """Return the column of a moment in the curves."""
        return max(
            0, min(self.plot_width - 1, int((at_s - self.begin_s) / (self.end_s - self.begin_s) * self.plot_width))
        )


def chart_lines(look: Look, figure: Figure, window: Window, frame: Frame, height: int, no_loss: str = "") -> list[Line]:
    """Return the title and `height` - 1 lines of curves, each of the frame's width.

    Args:
        look: Look of the terminal.
        figure: The figure.
        window: Its values of the frame's time.
        frame: What the charts of one screen have in common.
        height: Lines.
        no_loss: Sentence in place of a loss that has never come; empty where one has.
    """
    kind, palette = kind_of(figure.key), look.palette
    curves = [
        _curve(window, window.mean),
        *(_curve(window, extreme.curve_of(window), is_dotted=True) for extreme in kind.extremes),
    ]
    drawn = [point for curve in curves for point in curve.points if not math.isnan(point[1])]
    lines = [_title(look, kind, figure, window.mean[~np.isnan(window.mean)].tolist(), frame.width)]
    if not drawn:
        has_none = figure.key == FigureKey.LOSS and figure.value is None
        missing = (has_none and no_loss) or f"{kind.missing} in this time"
        lines.append(Line(look).put(f" {missing}", palette.faint))
    else:
        _, _, low, high = bounds(drawn)
        if kind.top is not None:
            low, high = 0.0, kind.top(high)
        box = Box(frame.begin_s, frame.end_s, low, high)
        lines += plot_lines(look, curves, box, (frame.plot_width, height - 1), kind.text, frame.guides)
    lines += [Line(look) for _ in range(height - len(lines))]
    for line in lines:
        line.fit(frame.width)
    return lines[:height]


def plot_lines(
    look: Look,
    curves: Sequence[Curve],
    box: Box,
    size: tuple[int, int],
    text: Callable[[float], str],
    guides: frozenset[int] = frozenset(),
) -> list[Line]:
    """Return curves with the ends of their scale on the left, in `size` (cells, lines) beside the scale."""
    palette, glyphs = look.palette, look.glyphs
    styles = [palette.muted if curve.is_dotted else palette.accent for curve in curves]
    lines = []
    drawn = drawing(curves, box, *size, ascii_only=look.is_ascii)
    for index, (cells, owners) in enumerate(drawn):
        scale = text(box.y_max) if index == 0 else text(box.y_min) if index == len(drawn) - 1 else ""
        line = Line(look).cell(scale, SCALE_WIDTH, palette.muted, is_right=True)
        line.put(glyphs.scroll_track, palette.faint)
        begin, before = 0, palette.ink
        shown = [
            glyphs.guide if owner < 0 and column in guides else cells[column] for column, owner in enumerate(owners)
        ]
        for column, owner in enumerate(owners):
            style = styles[owner] if owner >= 0 else palette.faint if column in guides else before
            if style is not before:
                line.put("".join(shown[begin:column]), before)
                begin, before = column, style
        lines.append(line.put("".join(shown[begin:]), before))
    return lines


def _curve(window: Window, values: np.ndarray[tuple[int], np.dtype[np.float32]], *, is_dotted: bool = False) -> Curve:
    return Curve(list(zip(window.at_s.tolist(), values.tolist(), strict=True)), is_dotted)


def _title(look: Look, kind: ChartKind, figure: Figure, means: Sequence[float], width: int) -> Line:
    """Return the title, the current value, and the owners of the extremes, as far as there is room."""
    palette = look.palette
    line = Line(look).put(f" {kind.title}", palette.heading)
    line.put(f"  {kind.text(figure.value)}", _value_style(look, figure.value))
    labels = _figure_texts(kind, figure, means)
    if line.width + sum(len(label) + 2 for label in labels) > width:
        labels = _figure_texts(kind, figure, means, is_farthest_first=True)
    for label in labels:
        if line.width + len(label) + 2 <= width:
            line.put(f"  {label}", palette.heading)
    return line.fit(width, palette.heading)


def _figure_texts(
    kind: ChartKind, figure: Figure, means: Sequence[float], *, is_farthest_first: bool = False
) -> list[str]:
    """Return the texts beside the value: the extremes and their owners, or else the range of the means."""
    if figure.value is None:
        return [f"last {kind.text(means[-1])}"] if means else []
    if kind.extremes and kind.text(figure.low) != kind.text(figure.high):
        value, extremes = figure.value, kind.extremes
        if is_farthest_first:
            distances = {one: abs((one.value_of(figure) or 0.0) - value) for one in extremes}
            extremes = tuple(sorted(extremes, key=lambda one: (-distances[one], one is LOWEST)))
        return [
            f"{extreme.word} {kind.text(extreme.value_of(figure))} {extreme.who_of(figure)}" for extreme in extremes
        ]
    least, most = (kind.text(min(means)), kind.text(max(means))) if means else ("", "")
    return [f"{least} to {most} in this time"] if least != most else []


def _value_style(look: Look, value: float | None) -> Style:
    is_odd = value is not None and not math.isfinite(value)
    return look.palette.alarm if is_odd else look.palette.brand


NO_LOSS = "no loss"
NO_LOSS_YET = f"{NO_LOSS} yet"
HOW_TO_READ_LOSS = ": --metric 'loss ([0-9.]+)' reads it"
NO_LOSS_MATCHED = ": no line has matched --metric"


def no_loss_text(ui: UiState) -> str:
    """Return the sentence in place of a loss that has never come."""
    job = ui.view.job() if ui.view is not None else None
    none = NO_LOSS if job is not None and job.state in ENDED else NO_LOSS_YET
    if ui.source.player or _brings_loss(ui.view):
        return none
    if ui.source.reads_loss:
        return none + NO_LOSS_MATCHED
    figures = ui.history.shown.figures if ui.history.shown is not None else ()
    named = [figure.key.removeprefix(METRIC_PREFIX) for figure in figures if figure.key.startswith(METRIC_PREFIX)]
    return f"{NO_LOSS}; {', '.join(named)}: in Charts" if named else none + HOW_TO_READ_LOSS


def _brings_loss(view: View | None) -> bool:
    """Return whether the job may still report its loss itself: it starts, or comes to the engine's first step."""
    job = view.job() if view is not None else None
    if view is None or job is None:
        return False
    return job.state == "starting" or (job.step is None and view.ends_in_step)


def loss_panel(
    look: Look,
    points: Sequence[tuple[float, float]],
    size: tuple[int, int],
    without: str = NO_LOSS_YET + HOW_TO_READ_LOSS,
    at: str = "at",
    reading: str = "",
) -> list[Line]:
    """Return the panel of (step, loss) points: a title, and curves with their scale in the other lines of `size`.

    Args:
        look: Look of the terminal.
        points: The curve.
        size: Cells and lines.
        without: Sentence in place of a curve without points.
        at: Words before the steps.
        reading: Line about what is being read of the time before the curve; empty when nothing is.
    """
    palette = look.palette
    title, (width, height) = Line(look).put(" LOSS", palette.heading), size
    lines = [title]
    if not points or (reading and len(points) == 1):
        lines.append(Line(look).put(f" {reading or without}", palette.faint))
    else:
        first, last = points[0], points[-1]
        latest = f"{at} step {last[0]:,.0f}"
        both = f"{latest}; first {loss_text(first[1])} {at} step {first[0]:,.0f}"
        title.put(f"  {loss_text(last[1])} ", palette.heading)
        room = max(0, width - title.width - 1)
        title.cell(f"  {reading}" if reading else both if len(both) <= room else latest, room, palette.heading)
        plot = (max(1, width - PLOT_INDENT - 1), height - 1)
        lines += plot_lines(look, [Curve(points)], bounds(points), plot, loss_text)
    title.fit(width, palette.heading)
    return lines
