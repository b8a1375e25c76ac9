"""Everything that depends on Textual's internals, and a switch that turns it off.

Textual 8 paints a widget's lines through a cache of decorated `Strip`s, and a strip caches its own cuts inside itself.
A live view pays for both on every line and leaves cyclic garbage, whose collection stops the screen. Live views have no
borders, padding or tint, so they hand their lines over directly, as `Strip`s without a cache. A strip is written with
the changes from one segment to the next, not with every style in full, and only changed lines are written.
`RANKDECK_STOCK_STRIPS=1` restores Textual's own rendering; the picture is the same.

Textual writes each paint into a queue, and every buffer up to the screen queues it again. `PacedApp` ends each paint in
a question to the terminal, and `app.tui.pacing` decides by the answers; `RANKDECK_PACING=0` turns this off.

Source: textual.strip.Strip, textual.widget.Widget.render_lines, textual._compositor, textual.driver.Driver and
textual.drivers of Textual 8.2.8.
"""

from __future__ import annotations

import gc
import math
import os
import time
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, cast

from rich.color import ColorSystem
from rich.style import Style
from textual.app import App
from textual.cache import FIFOCache
from textual.driver import Driver
from textual.drivers.web_driver import WebDriver
from textual.events import CursorPosition
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from app.tui.pacing import Pacer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.segment import Segment
    from textual.message import Message

HAS_PACING = os.environ.get("RANKDECK_PACING", "") != "0"
HAS_STOCK_RENDERING = os.environ.get("RANKDECK_STOCK_STRIPS", "") == "1"


YOUNG_OBJECTS = 20_000
"""New objects before a garbage collection; the reports of a fleet are more than Python's default of 700."""
STYLE_BYTES = 20
"""Estimated bytes of a change of colour."""


class _NoCache(FIFOCache[Any, Any]):
    """A cache that stores nothing; one serves all `Strip`s."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Store nothing."""

    set = __setitem__  # type: ignore[assignment]  # the parameters' names are the same

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ARG002 (the signature is FIFOCache's)
        return default


_NO_CACHE = _NoCache(1)


class LiveStrip(Strip):
    """A strip that is painted once: it has no caches, so no reference to itself."""

    __slots__ = ()

    def __init__(self, segments: Sequence[Segment], cell_length: int) -> None:
        self._segments = list(segments)
        self._cell_length = cell_length
        self._divide_cache = _NO_CACHE
        self._crop_cache = _NO_CACHE
        self._style_cache = _NO_CACHE
        self._filter_cache = _NO_CACHE
        self._line_length_cache = _NO_CACHE
        self._crop_extend_cache = _NO_CACHE
        self._offsets_cache = _NO_CACHE
        self._render_cache = None
        self._link_ids = None
        self._cell_count = None

    def divide(self, cuts: Iterable[int]) -> list[Strip]:
        """Return the strip's parts; the strip itself when there is only one."""
        places = list(cuts)
        if places == [self._cell_length]:
            return [self]
        return [LiveStrip(part._segments, part.cell_length) for part in super().divide(places)]

    def render(self, console: Console) -> str:
        """Return the text to write to the terminal."""
        color_system = console._color_system or ColorSystem.TRUECOLOR
        written: list[str] = []
        before = _PLAIN
        for text, style, _ in self._segments:
            now = style or _PLAIN
            if now is not before:
                written.append(_turn(before, now, color_system))
                before = now
            written.append(text)
        written.append(_turn(before, _PLAIN, color_system))
        return "".join(written)


_PLAIN = Style.null()


@lru_cache(maxsize=4096)
def _turn(before: Style, now: Style, color_system: ColorSystem) -> str:
    """Return the escape sequence that changes the terminal from one style to another."""
    if before == now:
        return ""
    if before.without_color == now.without_color and before.bgcolor == now.bgcolor and now.color is not None:
        return f"\x1b[{_codes(Style(color=now.color), color_system)}m"
    codes = _codes(now, color_system)
    if before == _PLAIN:
        return f"\x1b[{codes}m" if codes else ""
    return f"\x1b[0;{codes}m" if codes else "\x1b[0m"


def _codes(style: Style, color_system: ColorSystem) -> str:
    """Return the codes of a style without a link, as in `ESC [ codes m`."""
    return style.render("m", color_system=color_system).partition("m")[0].removeprefix("\x1b[")


def calm_collector() -> None:
    """Freeze objects that live as long as the app, so that garbage collections pause it for 2 ms, not 80.

    Reports are many, live for half a second each and hold no cycles: at Python's default threshold the collector would
    scan all of them several times a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def make_strip(segments: Sequence[Segment], cell_length: int) -> Strip:
    """Return one painted line of `cell_length` cells."""
    return Strip(segments, cell_length) if HAS_STOCK_RENDERING else LiveStrip(segments, cell_length)


class DirectWidget(Widget):
    """A widget without borders, padding or tint that hands its lines straight to the compositor."""

    _rendered: Sequence[Strip] = ()
    _size: Size
    _rendered_width = 0
    _next_line = 0

    @property
    def size(self) -> Size:
        """Size of the widget, all of it paintable; skips the search for borders at every line."""
        return self._size

    def show(self, rendered: Sequence[Strip], max_bytes: float = math.inf) -> bool:
        """Take all lines of the widget, and paint those that have changed.

        Args:
            rendered: The lines.
            max_bytes: Approximate limit of bytes painted now; the rest is painted by later calls.

        Returns:
            Whether lines were left out.
        """
        before, self._rendered = self._rendered, rendered
        is_resized = len(before) != len(rendered) or self._rendered_width != self.size.width
        self._rendered_width = self.size.width
        if HAS_STOCK_RENDERING or is_resized:
            self.refresh()
            return False
        pairs = zip(before, rendered, strict=True)
        changed = [y for y, (old, new) in enumerate(pairs) if old._segments != new._segments]
        painted = changed if max_bytes == math.inf else self._first(changed, max_bytes)
        if len(painted) < len(changed):
            kept = list(before)
            for y in painted:
                kept[y] = rendered[y]
            self._rendered = kept
        if painted:
            self.refresh(*_regions(painted, self.size.width))
        return len(painted) < len(changed)

    def _first(self, changed: list[int], max_bytes: float) -> list[int]:
        """Return as many lines as may be painted, at least one, continuing after the last call's."""
        in_turn = [y for y in changed if y >= self._next_line] + [y for y in changed if y < self._next_line]
        taken: list[int] = []
        room = max_bytes
        for y in in_turn:
            if taken and room <= 0:
                self._next_line = y
                break
            room -= sum(len(text) + STYLE_BYTES for text, _, _ in self._rendered[y]._segments)
            taken.append(y)
        return sorted(taken)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines of a region of the widget."""
        if HAS_STOCK_RENDERING:
            return super().render_lines(crop)
        # Until the widget is rebuilt for a new size, its old lines are fitted to it.
        is_current = len(self._rendered) == self.size.height and self._rendered_width == self.size.width
        rendered = [
            self._rendered[y] if is_current else self.render_line(y) for y in crop.line_range if y < self.size.height
        ]
        # A region of the layout may be higher than a widget that has not got its new size yet.
        rendered += [Strip.blank(self.size.width)] * (crop.height - len(rendered))
        if crop.x == 0 and crop.width == self.size.width:
            return rendered
        return [strip.crop(crop.x, crop.right) for strip in rendered]


def _regions(lines: list[int], width: int) -> list[Region]:
    runs = (list(run) for _, run in groupby(enumerate(lines), key=lambda numbered: numbered[1] - numbered[0]))
    return [Region(0, run[0][1], width, len(run)) for run in runs]


QUESTION_ROW = 2
"""Row of the cursor in a question; answers from the first row look like F3 with modifiers."""


LAST_ANSWER_S = 0.5
"""Seconds to wait for answers on exit; a shell would read a late answer as keys."""
LAST_ANSWER_LOOK_S = 0.01


class LastingFile:
    """A terminal's file that takes whatever is written once the terminal is gone.

    An error would end the thread that writes, and the console would wait for room in its queue for ever.
    Source: textual.drivers._writer_thread.WriterThread.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()


class PacedDriver(Driver):
    """Mixin for a terminal's driver: counts written bytes, asks questions, and takes the answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_bytes = 0
        self._open_tags: set[int] = set()
        super().__init__(*args, **kwargs)
        if (file := vars(self).get("_file")) is not None:  # of a terminal
            self._file = LastingFile(file)

    def write(self, data: str) -> None:
        self.num_bytes += len(data)
        super().write(data)  # type: ignore[safe-super]  # the terminal's driver comes next

    def ask(self, tag: int) -> None:
        """Ask for the cursor's position, from a column that identifies the tag; the cursor stays where it was."""
        self._open_tags.add(tag)
        super().write(f"\x1b7\x1b[{QUESTION_ROW};{tag + 1}H\x1b[6n\x1b8")  # type: ignore[safe-super]
        self.flush()

    def start_application_mode(self) -> None:
        """Start, or restart, the use of the terminal."""
        self._open_tags.clear()
        cast("PacedApp", self._app).pacer.restart()
        super().start_application_mode()  # type: ignore[safe-super]

    def process_message(self, message: Message) -> None:
        """Take answers out of the terminal's input; called by the input thread."""
        if isinstance(message, CursorPosition) and message.y == QUESTION_ROW - 1:
            self._open_tags.discard(message.x)
            self._loop.call_soon_threadsafe(cast("PacedApp", self._app).take_answer, message.x)
            return
        super().process_message(message)

    def disable_input(self) -> None:
        """Wait for outstanding answers before the terminal is released."""
        deadline_s = time.monotonic() + LAST_ANSWER_S
        is_owed = cast("PacedApp", self._app).pacer.is_pacing
        while is_owed and self._open_tags and time.monotonic() < deadline_s:
            time.sleep(LAST_ANSWER_LOOK_S)
        super().disable_input()  # type: ignore[safe-super]


class PageDriver(WebDriver):
    """Driver of a page, whose pipe may end at any moment: what is painted then is lost, and no error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write = partial(_write_unless_gone, self.fileno)


def _write_unless_gone(fd: int, data: bytes) -> int:
    with suppress(BrokenPipeError):
        return os.write(fd, data)
    return len(data)


class PacedApp(App[None]):
    """An app whose paints end in a question to the terminal, and that decides by the answers when to paint.

    Attributes:
        pacer: The `Pacer` that decides.
    """

    def __init__(self, *, ansi_color: bool | None = None) -> None:
        self.pacer = Pacer()
        self._num_bytes_seen = 0
        self._holding = ExitStack()
        self._is_holding = False
        super().__init__(ansi_color=ansi_color)

    def get_driver_class(self) -> type[Driver]:
        """Return the driver of the terminal or the browser, with pacing."""
        driver_class = super().get_driver_class()
        return type("PacedDriver", (PacedDriver, driver_class), {}) if HAS_PACING else driver_class

    @property
    def may_move(self) -> bool:
        """Whether automatic changes may be painted now; call it regularly."""
        self.pacer.look(time.monotonic())
        self._let_go()
        return self.pacer.may_move

    def post_display_hook(self) -> None:
        """End a paint with a question, and hold further paints while the link is choked."""
        driver = self._driver
        if not isinstance(driver, PacedDriver) or driver.num_bytes == self._num_bytes_seen:
            return
        num_bytes, self._num_bytes_seen = driver.num_bytes - self._num_bytes_seen, driver.num_bytes
        tag = self.pacer.ask(num_bytes, time.monotonic())
        if tag is not None:
            driver.ask(tag)
        if self.pacer.is_choked and not self._is_holding:
            self._is_holding = True
            self._holding.enter_context(self.batch_update())

    def take_answer(self, tag: int) -> None:
        self.pacer.answered(tag, time.monotonic())
        self._let_go()

    def _let_go(self) -> None:
        """Paint what was held once the link is no longer choked."""
        if self._is_holding and not self.pacer.is_choked:
            self._is_holding = False
            self._holding.close()
            self.screen.check_idle()
