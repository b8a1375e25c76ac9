"""The stacks of all ranks, frame by frame, over the console until closed. Loaded on first use."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual import work
from textual.binding import Binding, BindingType

from app.errors import AppError
from app.settings.keys import shown_key
from app.stacks.groups import picture_of
from app.stacks.stack_text import StackText, Tone, picture_lines, summary_text
from app.text import LINE_LIMIT, clean
from app.tui.dialogs.doctor import ReadingScreen
from app.tui.widgets.drawing import shifted, wrapped
from app.tui.widgets.line_view import LONG_LINES, LineView

if TYPE_CHECKING:
    from rich.style import Style
    from textual.app import ComposeResult

    from app.stacks.groups import StackPicture
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line

SIDE_STEP = 8
REFRESH_S = 2.0
"""Seconds between two pictures of a job that is looked at from outside anyway; others are asked on request."""
MAX_SENTENCE_LINES = 4
_SENTENCES = frozenset({Tone.STUCK, Tone.ODD, Tone.USUAL, Tone.NOTE, Tone.TROUBLE})


class StacksView(LineView):
    """The groups of identical stacks, one below the other."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "stacks")
        self.picture: StackPicture | None = None
        self.is_whole = False
        self.message = ""
        """Text shown instead of a picture, or beside an old one."""
        self._side = 0
        self._texts: list[StackText] = []

    def build(self) -> None:
        palette, width = self.look.palette, self.size.width
        summary = summary_text(self.picture) if self.picture else "where every rank stands"
        self.head = [self.banner("STACKS", summary)]
        for text in (
            wrapped(self.message, width - 2, MAX_SENTENCE_LINES, self.look.glyphs.ellipsis) if self.message else ()
        ):
            self.head.append(self.line().put(f" {text}", palette.warning))
        self._texts = picture_lines(self.picture, is_whole=self.is_whole) if self.picture else []
        styles = self._styles()
        self.lines = [line for text in self._texts for line in self._lines_of(text, styles[text.tone])]
        folding = "Fewer frames" if self.is_whole else "All frames"
        source = self.ui.source
        is_outside = source.outside is not None and source.outside.is_shown
        again = (("s", "Again"),) if source.player is None else ()
        native = (("n", "With native frames"),) if again and not is_outside else ()
        is_cut = not self._side and self._longest + 1 > width
        rest = ((shown_key("right"), LONG_LINES.capitalize()),) if is_cut else ()
        self.foot = [self.keys((("Esc", "Close"), *again, ("a", folding), *rest, *native))]

    def _styles(self) -> dict[Tone, Style]:
        """Return the style of each kind of line in the current theme."""
        palette = self.look.palette
        return {
            Tone.STUCK: palette.critical,
            Tone.ODD: palette.warning,
            Tone.USUAL: palette.busy,
            Tone.NOTE: palette.muted,
            Tone.TROUBLE: palette.warning,
            Tone.OWN: palette.strong,
            Tone.LIBRARY: palette.muted,
            Tone.FOLDED: palette.faint,
            Tone.THREAD: palette.accent,
            Tone.BLANK: palette.ink,
        }

    @property
    def _longest(self) -> int:
        """Cells of the longest line that is not wrapped."""
        return max((cell_len(text.text) for text in self._texts if text.tone not in _SENTENCES), default=0)

    def sideways(self, cells: int) -> None:
        furthest = self._longest - self.size.width // 2
        self._side = max(0, min(furthest, self._side + cells * SIDE_STEP))
        self.redraw()

    def to_begin(self) -> None:
        """Scroll to the left edge: other lines may be shorter."""
        self._side = 0

    def _lines_of(self, text: StackText, style: Style) -> list[Line]:
        """Return sentences wrapped, and frames scrolled to the side."""
        message = text.text
        if text.tone not in _SENTENCES:
            return [self.line().put(" ").put(shifted(message, self._side) if self._side else message, style)]
        indent = " " * (1 + len(message) - len(message.lstrip()))
        parts = wrapped(message, self.size.width - len(indent) - 2, MAX_SENTENCE_LINES, self.look.glyphs.ellipsis)
        return [self.line().put(indent).put(part, style) for part in parts]


class StacksScreen(ReadingScreen[None]):
    """Asks all nodes of the job for stacks and shows them; keys work while it waits."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("s", "take(False)", "Again"),
        Binding("n", "take(True)", "With native frames"),
        Binding("a", "fold", "All frames"),
        Binding("left,h", "side(-1)", "Left", show=False),
        Binding("right,l", "side(1)", "Right", show=False),
    ]

    def __init__(self, ui: UiState) -> None:
        super().__init__()
        self._ui = ui
        self._view: StacksView = StacksView(ui)

    def compose(self) -> ComposeResult:
        yield self._view

    def on_mount(self) -> None:
        self.action_take(is_native=False)
        outside = self._ui.source.outside
        if outside is not None and outside.is_shown:
            self.set_interval(REFRESH_S, self._refresh)

    async def _refresh(self) -> None:
        """Show newer looks from outside in the place of those shown."""
        with suppress(AppError):
            self._view.picture = picture_of(await self._ui.source.stacks(is_native=False))
            self._view.redraw()

    @work(exclusive=True)
    async def action_take(self, is_native: bool) -> None:  # noqa: FBT001 - a key's argument
        """Take the stacks now."""
        view = self._view
        if view.picture is not None and self._ui.source.player is not None:
            return  # in a replay they do not change
        view.message = "asking every rank; one that is stuck takes a second or more"
        view.redraw()
        try:
            answers = await self._ui.source.stacks(is_native=is_native)
        except AppError as error:
            view.message = clean(error.whole, LINE_LIMIT)
        else:
            view.message = ""
            view.picture = picture_of(answers)
            view.top = 0
            view.to_begin()
        view.redraw()

    def action_fold(self) -> None:
        """Show every frame and thread, or only the important ones."""
        self._view.is_whole = not self._view.is_whole
        self._view.to_begin()
        self._view.redraw()

    def action_side(self, cells: int) -> None:
        self._view.sideways(cells)
