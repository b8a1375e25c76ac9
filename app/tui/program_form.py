"""The fields of a program that is to be started: on the start screen, and in the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from app.errors import UsageError
from app.program import Program, Typed, read_program, run_argv, shell_text, start_question, typed
from app.ssh.config import THIS_MACHINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from app.tui.theme import Look

LABELS = Typed("program", "ranks", "restarts", "directory", "python")
ORDER = ("command", "workdir", "num_ranks", "max_restarts", "python")
PLACEHOLDERS = Typed(
    "train.py --epochs 3, or -m package.module",
    "one for each GPU, without GPUs one for every two cores",
    "0: after a failure it stays ended",
    "home",
    "the agent's own",
)
USUAL_RANKS = "the inventory's, else one for each GPU or every two cores"
"""Where `rankdeck run` starts the program, which reads the inventory."""
SHELL_LEAD = "In a shell:  "


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

    def __init__(self, past: Sequence[Program] = (), placeholders: Typed = PLACEHOLDERS) -> None:
        """Fill the fields from the newest of `past`; `placeholders` say what empty ones stand for."""
        super().__init__(id="program-form")
        # They come from an agent, and an Input writes what it holds to the terminal.
        past = [program for program in past if f"{program.text}{program.workdir}{program.python}".isprintable()]
        self._begin = typed(past[0]) if past else Typed()
        self._past = list(dict.fromkeys(program.text for program in past))
        self._placeholders = placeholders

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


class ProgramScreen(ModalScreen[Program | None]):
    """Asks which program is to be started on a host; says what is wrong with what is typed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel"),
        Binding("left", "app.focus_previous", "Back", show=False),
        Binding("right", "app.focus_next", "On", show=False),
    ]
    no_text: ClassVar[str]
    yes_text: ClassVar[str]
    subtitle: ClassVar[str]
    last_step: ClassVar[str]
    """The button that Enter leads to."""

    def __init__(self, look: Look, host: str, form: ProgramForm) -> None:
        super().__init__()
        self._look = look
        self._host = host
        self._form = form

    def compose(self) -> ComposeResult:
        """Lay out the fields, what they come to, and two buttons."""
        body = Vertical(
            self._form,
            Static("", id="program-told", markup=False),
            Horizontal(
                Button(self.no_text, id="program-no", compact=True),
                Button(self.yes_text, id="program-yes", classes="yes", compact=True),
                classes="buttons",
            ),
            classes="dialog start",
        )
        body.border_title = Text(self._look.shown(self.title_of(self._host)))
        body.border_subtitle = self.subtitle
        yield body

    def on_mount(self) -> None:
        """Begin at the command."""
        self._form.begin()
        self._tell()

    def on_input_changed(self, _event: Input.Changed) -> None:
        """Say what that would do."""
        self._tell()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Go on to the last step, if it can be taken."""
        if not self._form.trouble:
            self.query_one(f"#{self.last_step}").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Leave with the program only when it was confirmed."""
        self.dismiss(self._form.read() if event.button.id == "program-yes" else None)

    def action_cancel(self) -> None:
        """Leave without a program."""
        self.dismiss(None)

    def title_of(self, host: str) -> str:
        """Return what stands above it all."""
        raise NotImplementedError

    def told(self, program: Program) -> str:
        """Return what a sound program comes to."""
        raise NotImplementedError

    def _tell(self) -> None:
        trouble = self._form.trouble
        told = self.query_one("#program-told", Static)
        told.update(Text(self._look.shown(trouble or self.told(self._form.read()))))
        told.set_class(bool(trouble), "trouble")
        self.query_one("#program-yes", Button).disabled = bool(trouble)


class NewProgramScreen(ProgramScreen):
    """On the start screen: shows the command that does the same in a shell."""

    no_text, yes_text, last_step = "Back", "Start it", "program-yes"
    subtitle = "tab goes round, Enter goes on, Esc goes back"

    def __init__(self, look: Look, host: str) -> None:
        place = f"the inventory's, else {'this directory' if host == THIS_MACHINE else 'home'}"
        super().__init__(look, host, ProgramForm((), PLACEHOLDERS._replace(num_ranks=USUAL_RANKS, workdir=place)))

    def title_of(self, host: str) -> str:
        """Return what stands above it all."""
        return f"Which program, on {host}?"

    def told(self, program: Program) -> str:
        """Return the command of a shell."""
        return SHELL_LEAD + shell_text(run_argv(self._host, program))


class AnotherProgramScreen(ProgramScreen):
    """In the console, filled with the last one; whoever only presses Enter starts nothing."""

    no_text, yes_text, last_step = "Do nothing", "Start it", "program-no"
    subtitle = "up: earlier ones, Enter goes on, Esc does nothing"

    def __init__(self, look: Look, host: str, past: Sequence[Program]) -> None:
        super().__init__(look, host, ProgramForm(past))

    def title_of(self, host: str) -> str:
        """Return what stands above it all."""
        return f"Start a program on {host}"

    def told(self, program: Program) -> str:
        """Return the question."""
        return start_question(self._host, program)


def shell_line(look: Look, command: str) -> Text:
    """Return the line that teaches the command."""
    return Text(look.shown(SHELL_LEAD + command))
