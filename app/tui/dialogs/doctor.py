"""The doctor's screen over the console: the progress on each host, then the findings.

It is loaded on first use. `ReadingScreen` is a modal screen of lines that a user reads: one view, and the keys that
scroll it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Button

from app.errors import AppError, ExitCode
from app.preflight.findings import Step
from app.preflight.report_lines import Tone, report_lines, summary_text
from app.text import LINE_LIMIT, clean
from app.tui.widgets.drawing import wrapped
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from rich.style import Style
    from textual.app import ComposeResult

    from app.inventory.program import Again, Program
    from app.preflight.findings import Preflight
    from app.tui.source import Doctor
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line

Result = TypeVar("Result")


class ReadingScreen(ModalScreen[Result]):
    """The common part of screens over one `LineView`; subclasses add their own keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "Up", show=False),
        Binding("down,j", "scroll(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(-1)", "First line", show=False),
        Binding("end,G", "edge(1)", "Last line", show=False),
    ]
    _view: LineView

    def action_scroll(self, rows: int) -> None:
        self._view.move(rows)

    def action_page(self, pages: int) -> None:
        self._view.page(pages)

    def action_edge(self, direction: int) -> None:
        """Go to the first line or the last."""
        self._view.to_edge(direction)


MAX_SENTENCE_LINES = 4
_ENDS = (Step.DONE, Step.FAILED)


class DoctorView(LineView):
    """The progress on the hosts, or the findings about them.

    Attributes:
        found: Findings; None while they are not known.
        steps: Step of each host.
        shows_all: Whether to show also rows without a problem.
        message: Text shown instead, such as an error.
    """

    def __init__(self, ui: UiState, hosts: list[str], leaving: str) -> None:
        """Show progress; `leaving` is the title of the key that leaves."""
        super().__init__(ui, "doctor")
        self._leaving = leaving
        self.found: Preflight | None = None
        self.steps: dict[str, Step | None] = dict.fromkeys(hosts)
        self.shows_all = False
        self.message = ""

    def build(self) -> None:
        self.head = [self.banner("DOCTOR", self._summary())]
        self.lines = self._report(self.found) if self.found is not None else self._progress()
        folding = "Only what is wrong" if self.shows_all else "All rows"
        shown = (("Esc", self._leaving), ("r", "Again"), ("a", folding), ("y", "Copy"))
        self.foot = [self.keys(shown if self.found is not None or self.message else shown[:1])]

    def report(self, width: int) -> str:
        """Return the report as text."""
        if self.found is None:
            return ""
        lines = report_lines(self.found, width, shows_all=self.shows_all)
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)

    def _summary(self) -> str:
        if self.found is not None:
            return summary_text(self.found)
        num_ended = sum(step in _ENDS for step in self.steps.values())
        total = len(self.steps)
        return f"{total} host{'' if total == 1 else 's'} to look at, {num_ended} done; it takes some seconds"

    def _progress(self) -> list[Line]:
        palette, glyphs = self.look.palette, self.look.glyphs
        if self.message:
            parts = wrapped(self.message, self.size.width - 2, MAX_SENTENCE_LINES, glyphs.ellipsis)
            return [self.line().put(f" {part}", palette.warning) for part in parts]
        name_width = max(map(len, self.steps), default=0)
        lines = []
        for host, step in self.steps.items():
            style = palette.critical if step is Step.FAILED else palette.ok if step is Step.DONE else palette.muted
            line = self.line().put(" ").cell(host, name_width, palette.strong)
            lines.append(line.put(f"  {step or 'is waiting for its turn'}", style))
        return lines

    def _report(self, found: Preflight) -> list[Line]:
        styles = self._styles()
        lines = []
        for pieces in report_lines(found, self.size.width - 2, shows_all=self.shows_all):
            line = self.line().put(" ")
            for text, tone in pieces:
                line.put(text, styles[tone])
            lines.append(line)
        return lines

    def _styles(self) -> dict[Tone, Style]:
        """Return the style of each kind of text in the current theme."""
        palette = self.look.palette
        return {
            Tone.PLAIN: palette.ink,
            Tone.TITLE: palette.strong,
            Tone.FAINT: palette.muted,
            Tone.BAD: palette.critical,
            Tone.WARN: palette.warning,
            Tone.OK: palette.ok,
        }


class DoctorScreen(ReadingScreen[bool]):
    """Checks the hosts and shows the findings; before an action it closes by itself when all is well, else asks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Close"),
        Binding("r", "look", "Again"),
        Binding("a", "fold", "All rows"),
        Binding("y", "copy", "Copy"),
        Binding("left", "app.focus_previous", "Back", show=False),
        Binding("right", "to_yes", "On", show=False),
    ]

    def __init__(self, ui: UiState, doctor: Doctor, job: Program | Again | None = None, action: str = "") -> None:
        """Check before a job starts; `action` is the title of the next step, as `Start it`; empty only checks."""
        super().__init__()
        self._ui = ui
        self._doctor = doctor
        self._job = job
        self._job_action = action
        self._view: DoctorView = DoctorView(ui, list(doctor.hosts), "Do nothing" if action else "Close")

    def compose(self) -> ComposeResult:
        yield self._view
        if self._job_action:
            yield Horizontal(
                Button("Do nothing", id="doctor-no", compact=True),
                Button(
                    Text(f"{self._job_action} all the same"),
                    id="doctor-yes",
                    classes="yes",
                    variant="error",
                    compact=True,
                ),
                id="doctor-question",
                classes="buttons",
            )

    def on_mount(self) -> None:
        self._ask(is_wanted=False)
        self.action_look()

    @work(exclusive=True)
    async def action_look(self) -> None:
        """Check the hosts now."""
        view = self._view
        view.found, view.message, view.top = None, "", 0
        view.steps = dict.fromkeys(self._doctor.hosts)
        self._ask(is_wanted=False)
        view.redraw()
        try:
            view.found = await self._doctor.look(self._show_step, self._job)
        except AppError as error:
            view.message = clean(error.whole, LINE_LIMIT)
        if self._job_action:
            # With another screen on top, that one would be dismissed; then the user decides too.
            if view.found is not None and view.found.exit_code is ExitCode.WELL and self.is_active:
                self.dismiss(True)  # noqa: FBT003 - the result of the screen
                return
            self._ask(is_wanted=True)
        view.redraw()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Go on only when it was confirmed."""
        self.dismiss(event.button.id == "doctor-yes")

    def action_to_yes(self) -> None:
        """Focus the button that goes on, from wherever the focus is."""
        for button in self.query("Button.yes").results(Button):
            button.focus()

    def action_leave(self) -> None:
        self.dismiss(False)  # noqa: FBT003 - the result of the screen

    def action_copy(self) -> None:
        """Copy the report into the terminal's clipboard (OSC 52)."""
        text = self._view.report(self.size.width)
        if text:
            self.app.copy_to_clipboard(text)
            self.notify(self._ui.tellable(f"Copied the report: {text.splitlines()[-1]}"), markup=False)

    def action_fold(self) -> None:
        """Show all rows, or only problems."""
        self._view.shows_all = not self._view.shows_all
        self._view.redraw()

    def _show_step(self, host: str, step: Step) -> None:
        self._view.steps[host] = step
        if self.is_attached:
            self._view.redraw()

    def _ask(self, *, is_wanted: bool) -> None:
        """Show or hide the question; it starts on `Do nothing`."""
        if self._job_action:
            self.query_one("#doctor-question").display = is_wanted
            if is_wanted:
                self.query_one("#doctor-no").focus()
