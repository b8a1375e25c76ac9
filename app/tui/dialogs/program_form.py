"""The form for a program to start from the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Static

from app.errors import UsageError
from app.inventory.program import Program, Typed, read_program, start_question, typed, usual_workdir
from app.tui.dialogs.control import DialogScreen, LookFirst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from app.tui.theme import Look

LABELS = Typed("program", "ranks", "restarts", "directory", "python")
ORDER = ("command", "workdir", "num_ranks", "max_restarts", "python")
PLACEHOLDERS = Typed(
    "train.py --epochs 3, or -m package.module",
    "the inventory's, else one for each GPU or every two cores",
    "0: after a failure it stays ended",
    "",
    "the agent's own",
)


class ProgramForm(Vertical):
    """Fields with labels; an error in them is shown as a sentence. Up and down go through earlier programs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "past(1)", "Older", show=False),
        Binding("down", "past(-1)", "Newer", show=False),
    ]

    def __init__(self, hosts: Sequence[str], past: Sequence[Program], *, asks_look: bool) -> None:
        """Ask for a program to start on some hosts.

        Args:
            hosts: Names of the hosts.
            past: Earlier programs; the latest fills the fields.
            asks_look: Whether to ask also if the hosts are checked before.
        """
        super().__init__(id="program-form")
        self._look_first = LookFirst(id="program-look") if asks_look else None
        # A job over several hosts does not restart by itself.
        self._names = [name for name in ORDER if len(hosts) == 1 or name != "max_restarts"]
        # They come from an agent, and an Input writes its value to the terminal.
        past = [program for program in past if f"{program.text}{program.workdir}{program.python}".isprintable()]
        self._past = list(dict.fromkeys(typed(program) for program in past)) or [Typed()]
        """Earlier programs, the latest first; the first one holds what the user has typed."""
        self._place = 0
        self._placeholders = PLACEHOLDERS._replace(workdir=usual_workdir(hosts))

    @property
    def has_earlier(self) -> bool:
        """Whether there are earlier programs to go through."""
        return len(self._past) > 1

    def compose(self) -> ComposeResult:
        for name in self._names:
            field = Input(placeholder=getattr(self._placeholders, name), compact=True, id=f"program-{name}")
            field.value = getattr(self._past[0], name)
            label = Static(getattr(LABELS, name), markup=False, classes="program-label")
            yield Horizontal(label, field, classes="program-field")
        if self._look_first is not None:
            label = Static("doctor", markup=False, classes="program-label")
            yield Horizontal(label, self._look_first, classes="program-field")

    @property
    def looks_first(self) -> bool:
        """Whether the hosts are to be checked before the start."""
        return self._look_first is not None and self._look_first.is_on

    def action_past(self, steps: int) -> None:
        """Fill all fields with an older or a newer program."""
        if self._place == 0:
            self._past[0] = self._typed()
        self._place = max(0, min(len(self._past) - 1, self._place + steps))
        for name in self._names:
            field = self.query_one(f"#program-{name}", Input)
            field.value = getattr(self._past[self._place], name)
            field.cursor_position = len(field.value)

    def begin(self) -> None:
        """Focus the first field."""
        self.query_one("#program-command").focus()

    @property
    def trouble(self) -> str:
        """Error in the fields; empty without one."""
        try:
            self.read()
        except UsageError as error:
            return str(error)
        return ""

    def read(self) -> Program:
        """Return the program of the fields.

        Raises:
            UsageError: See `read_program`.
        """
        return read_program(self._typed())

    def _typed(self) -> Typed:
        return Typed(**{name: self.query_one(f"#program-{name}", Input).value for name in self._names})


class ProgramScreen(DialogScreen[Program]):
    """Asks which program to start on some hosts; pressing only Enter starts nothing."""

    def __init__(
        self, look: Look, where: str, hosts: Sequence[str], past: Sequence[Program], *, asks_look: bool
    ) -> None:
        """Ask for a program to start on `where`, with the earlier programs `past`; see `ProgramForm`."""
        super().__init__()
        self._look = look
        self._where = where
        self._form = ProgramForm(hosts, past, asks_look=asks_look)

    @property
    def looks_first(self) -> bool:
        """Whether the hosts are to be checked before the start."""
        return self._form.looks_first

    def compose(self) -> ComposeResult:
        body = Vertical(
            self._form,
            Static("", id="program-summary", markup=False),
            self.buttons("program", "Start it"),
            classes="dialog program",
        )
        body.border_title = Text(self._look.shown(f"Start a program on {self._where}"))
        earlier = "up: earlier ones, " if self._form.has_earlier else ""
        self.field_keys = f"{earlier}tab goes round, Enter leads to the buttons, Esc closes"
        self.keys = f"{earlier}right arrow, then Enter: start it; tab goes round, Esc closes"
        yield body

    def on_mount(self) -> None:
        self._form.begin()
        self._show_summary()

    def on_input_changed(self, _event: Input.Changed) -> None:
        self._show_summary()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        if not self._form.trouble:
            self.query_one("#program-no").focus()

    def on_look_first_submitted(self, _event: LookFirst.Submitted) -> None:
        if not self._form.trouble:
            self.query_one("#program-no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Return the program only when it was confirmed."""
        if event.button.id == "program-yes":
            self.dismiss(self._form.read())
        else:
            self.leave()

    def _show_summary(self) -> None:
        trouble = self._form.trouble
        summary = self.query_one("#program-summary", Static)
        summary.update(Text(self._look.shown(trouble or start_question(self._where, self._form.read()))))
        summary.set_class(bool(trouble), "trouble")
        self.query_one("#program-yes", Button).disabled = bool(trouble)
        self.show_keys()
