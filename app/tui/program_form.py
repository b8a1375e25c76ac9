"""The fields of a program that is to be started: on the start screen, and in the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from app.errors import UsageError
from app.program import Program, Typed, read_program, typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

LABELS = Typed("program", "ranks", "restarts", "directory", "python")
ORDER = ("command", "workdir", "num_ranks", "max_restarts", "python")
PLACEHOLDERS = Typed(
    "train.py --epochs 3, or -m package.module",
    "one for each GPU, without GPUs one for every two cores",
    "0: after a failure it stays ended",
    "home",
    "the agent's own",
)


class CommandInput(Input):
    """The command; up and down go through what was started before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "past(1)", "Older", show=False),
        Binding("down", "past(-1)", "Newer", show=False),
    ]

    def __init__(self, past: Sequence[str]) -> None:
        super().__init__(placeholder=PLACEHOLDERS.command, compact=True, id="program-command")
        self._past = past
        self._place = -1
        self._own = ""

    def action_past(self, steps: int) -> None:
        """Show what was started before that, or after."""
        if self._place < 0:
            self._own = self.value
        self._place = max(-1, min(len(self._past) - 1, self._place + steps))
        self.value = self._own if self._place < 0 else self._past[self._place]
        self.cursor_position = len(self.value)


class ProgramForm(Vertical):
    """Five fields with a label each; what is wrong with them is a sentence."""

    def __init__(self, past: Sequence[Program] = (), workdir: str = PLACEHOLDERS.workdir) -> None:
        """Fill the fields from the newest of `past`; `workdir` says what an empty directory stands for."""
        super().__init__(id="program-form")
        self._begin = typed(past[0]) if past else Typed()
        self._past = list(dict.fromkeys(program.text for program in past))
        self._placeholders = PLACEHOLDERS._replace(workdir=workdir)

    def compose(self) -> ComposeResult:
        """Lay the fields out."""
        for name in ORDER:
            if name == "command":
                field: Input = CommandInput(self._past[1:] if self._begin.command else self._past)
            else:
                placeholder = getattr(self._placeholders, name)
                field = Input(placeholder=placeholder, compact=True, id=f"program-{name}")
            field.value = getattr(self._begin, name)
            label = Static(getattr(LABELS, name), markup=False, classes="program-label")
            yield Horizontal(label, field, classes="program-field")

    def begin(self) -> None:
        """Let a person type."""
        self.query_one("#program-command").focus()

    @property
    def trouble(self) -> str:
        """What is wrong with what is typed; empty when nothing is."""
        try:
            self.read()
        except UsageError as error:
            return str(error)
        return ""

    def read(self) -> Program:
        """Return the program.

        Raises:
            UsageError: See `read_program`.
        """
        fields = {name: self.query_one(f"#program-{name}", Input).value for name in ORDER}
        return read_program(Typed(**fields))
