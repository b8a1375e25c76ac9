"""The pages behind the start screen: which job, which host, which file."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.daemon_thread import in_daemon_thread
from app.program import shell_text
from app.start import (
    Way,
    attach_argv,
    empty_text,
    file_choices,
    host_choices,
    job_choices,
    replay_argv,
    shown_choices,
    start_argv,
)
from app.tui.drawing import fitted
from app.tui.program_form import shell_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult

    from app.start import Choice, StartFacts
    from app.tui.theme import Look

NOTE_GAP = 3


class ListPage(ModalScreen[str | None]):
    """A list that is narrowed by typing; Enter takes what is marked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Back"),
        Binding("up", "mark(-1)", "Up", show=False),
        Binding("down", "mark(1)", "Down", show=False),
        Binding("pageup", "mark(-8)", "Up", show=False),
        Binding("pagedown", "mark(8)", "Down", show=False),
    ]

    def __init__(self, look: Look, facts: StartFacts, way: Way) -> None:
        super().__init__()
        self._look = look
        self._facts = facts
        self._way = way
        self._choices: list[Choice] = []

    title_text: ClassVar[str]
    placeholder: ClassVar[str]

    def compose(self) -> ComposeResult:
        """Lay out the field, the list and the command."""
        body = Vertical(
            Input(placeholder=self.placeholder, compact=True, id="list-typed"),
            OptionList(id="list-choices", markup=False),
            Static("", id="list-empty", classes="sentence", markup=False),
            Static("", id="list-shell", classes="shell", markup=False),
            classes="dialog start",
        )
        body.border_title = Text(self.title_text)
        body.border_subtitle = "type or choose, Enter goes on, Esc goes back"
        yield body

    def on_mount(self) -> None:
        """Show all there is."""
        self.query_one("#list-choices", OptionList).can_focus = False  # keys are the field's; a click still chooses
        self.query_one("#list-typed").focus()
        self.fill()

    def on_resize(self) -> None:
        """Put the notes where the lines end now."""
        self.call_after_refresh(self.fill)

    def choices(self, typed: str) -> Sequence[Choice]:
        """Return the rows for what is typed."""
        raise NotImplementedError

    def argv(self, value: str) -> tuple[str, ...]:
        """Return the command that a row stands for, as far as it is known."""
        raise NotImplementedError

    def fill(self) -> None:
        """Show the rows for what is typed; the first is marked, or the one that was."""
        marked = self._marked
        typed = self.query_one("#list-typed", Input).value
        self._choices = list(self.choices(typed))
        rows = shown_choices(self._choices)
        choices = self.query_one("#list-choices", OptionList)
        choices.clear_options()
        longest = max((len(value) for value, _ in rows), default=0)
        choices.add_options([Option(self._row_text(value, note, longest)) for value, note in rows])
        choices.display = bool(rows)
        values = [choice.value for choice in self._choices]
        choices.highlighted = (values.index(marked) if marked in values else 0) if rows else None
        empty = self.query_one("#list-empty", Static)
        empty.display = not rows
        empty.update(Text(self._look.shown(empty_text(self._way, self._facts, typed))))
        self._tell()

    def on_input_changed(self, _event: Input.Changed) -> None:
        """Narrow the list."""
        self.query_one("#list-choices", OptionList).highlighted = None
        self.fill()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Take what is marked."""
        if self._marked is not None:
            self.dismiss(self._marked)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take what is clicked."""
        self.dismiss(self._choices[event.option_index].value)

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        """Show its command."""
        self._tell()

    def action_mark(self, rows: int) -> None:
        """Mark another row."""
        choices = self.query_one("#list-choices", OptionList)
        if self._choices:
            choices.highlighted = max(0, min(len(self._choices) - 1, (choices.highlighted or 0) + rows))

    def action_cancel(self) -> None:
        """Go back."""
        self.dismiss(None)

    @property
    def _marked(self) -> str | None:
        place = self.query_one("#list-choices", OptionList).highlighted
        return self._choices[place].value if place is not None and place < len(self._choices) else None

    def _row_text(self, value: str, note: str, _value_width: int) -> Text:
        """Return a row; of a value that does not fit, the end is what tells it from others.

        Args:
            value: What the row stands for.
            note: What is said of it.
            _value_width: Of the widest value of the list.
        """
        width = self.query_one("#list-choices").size.width - 2
        value, note = self._look.shown(value), self._look.shown(note)
        room = max(8, width - len(note) - NOTE_GAP)
        if width > 0 and len(value) > room:
            value = self._look.glyphs.ellipsis + value[len(value) - room + 1 :]
        gap = " " * max(NOTE_GAP, width - len(value) - len(note)) if note else ""
        return Text(value + gap + note, no_wrap=True, end="")

    def _tell(self) -> None:
        marked = self._marked
        shell = "" if marked is None else shell_text(self.argv(marked))
        self.query_one("#list-shell", Static).update(shell_line(self._look, shell) if shell else "")


class JobPage(ListPage):
    """Which job of the inventory, each with its command."""

    title_text = "Which job?"
    placeholder = "a part of a name, of a command or of a host"

    def choices(self, typed: str) -> Sequence[Choice]:
        """Return the jobs."""
        return job_choices(self._facts, typed)

    def argv(self, value: str) -> tuple[str, ...]:
        """Return the command of the job."""
        return start_argv(self._facts, value)

    def _row_text(self, value: str, note: str, value_width: int) -> Text:
        """Return a row: commands stand below each other, and their beginning is what matters."""
        look = self._look
        width = self.query_one("#list-choices").size.width - 2
        value_width = min(value_width, width // 2)
        name = fitted(look.shown(value), value_width, look.glyphs.ellipsis)
        room = max(0, width - value_width - NOTE_GAP)
        note = look.shown(note)
        if len(note) > room:
            note = fitted(note, room, look.glyphs.ellipsis)
        return Text(name + " " * NOTE_GAP + note, no_wrap=True, end="")


class HostPage(ListPage):
    """Which host: those of the inventory, those that ssh knows by name, this machine, or any other."""

    title_text = "Which host?"
    placeholder = "a part of a name, or any host: user@host:port"

    def __init__(self, look: Look, facts: StartFacts, way: Way, look_here: Callable[[], str]) -> None:
        """`look_here` blocks, and says what is known of this machine."""
        super().__init__(look, facts, way)
        self._look_here = look_here
        self._here = "this machine"

    def on_mount(self) -> None:
        """Ask meanwhile what this machine is doing."""
        super().on_mount()
        self._ask_here()

    def choices(self, typed: str) -> Sequence[Choice]:
        """Return the hosts."""
        return host_choices(self._facts, typed, self._here)

    def argv(self, value: str) -> tuple[str, ...]:
        """Return the command of the host."""
        facts = self._facts
        if self._way is Way.ATTACH:
            return attach_argv(facts, value)
        return facts.argv("run", "--host", value, "--", "...")

    @work
    async def _ask_here(self) -> None:
        self._here = await in_daemon_thread(self._look_here)
        self.fill()


class FilePage(ListPage):
    """Which file: evidence that was kept, or any other."""

    title_text = "Which file?"
    placeholder = "a part of a name, or the path of any recording or evidence"

    def choices(self, typed: str) -> Sequence[Choice]:
        """Return the files."""
        return file_choices(self._facts, typed)

    def argv(self, value: str) -> tuple[str, ...]:
        """Return the command of the file."""
        return replay_argv(self._facts, value)
