"""The dialog before a job is stopped, killed or restarted.

It is loaded on first use. `LookFirst` is the choice to have hosts checked before a job starts on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, TypeVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from app.view.actions import JobAction, action_question, action_title, busy_text, lost_nodes, max_ranks
from app.view.summary import ENDED

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Click

    from app.tui.ui_state import UiState
    from app.view.rows import JobRow
    from app.view.view import View

TITLES: dict[JobAction, str] = {
    JobAction.STOP: "Stop         after a step and a checkpoint",
    JobAction.STOP_NOW: "Stop now     by SIGTERM",
    JobAction.KILL: "Kill         by SIGKILL",
    JobAction.RESTART: "Restart      after a step and a checkpoint",
    JobAction.RESTART_NOW: "Restart now  kill it first",
    JobAction.RESTART_WITHOUT: "Restart without the nodes that are lost",
}
PLAIN_TITLES = {JobAction.STOP: "Stop         by SIGTERM", JobAction.RESTART: "Restart      after SIGTERM"}
"""What differs for ranks that cannot end at an agreed step."""


class Wish(NamedTuple):
    """The action that a user has confirmed.

    Attributes:
        action: The action on the job.
        num_ranks: Number of ranks of the next attempt; None keeps the last number.
        without: Nodes that the job goes on without, by name.
        looks_first: Whether to check the hosts before anything is done.
    """

    action: JobAction
    num_ranks: int | None
    without: tuple[str, ...] = ()
    looks_first: bool = False


ANOTHER: Final = "another"
"""Result of the dialog when the user wants to start another program."""
ANOTHER_TITLE = "Start another program"


NOTHING_DONE = "Nothing was done: the right arrow leads to the button that does it."
NO_KEYS = "right arrow, then Enter: do it; Enter alone closes"
YES_KEYS = "Enter does it, Esc closes"
RANKS_KEYS = "right arrow, then Enter: do it; tab: number of ranks, Esc closes"
ANOTHER_KEYS = "Enter asks which program, Esc closes"
FIELD_KEYS = "Enter leads to the buttons, Esc closes"
"""Keys in a field, whose cursor the right arrow moves."""

MIN_TALL = 20
"""Lines of a screen from which whole dialogs fit; in a shorter one their lists scroll, above the buttons."""
MIN_WIDE = 100
"""Cells of a line from which a dialog leaves room at its sides: a few cells of a view there are parts of words."""

Result = TypeVar("Result")


class DialogScreen(ModalScreen[Result | None]):
    """The common part of dialogs before an action: the last question starts on `Do nothing`.

    Attributes:
        keys: Text below the dialog about the keys that act in a list.
        field_keys: The same, in a field.
    """

    VERTICAL_BREAKPOINTS = [(0, "-short"), (MIN_TALL, "-tall")]  # noqa: RUF012 - mypy wants no ClassVar
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (MIN_WIDE, "-wide")]  # noqa: RUF012
    keys = "right arrow, then Enter: do it; Enter: to the buttons, Esc closes"
    field_keys = FIELD_KEYS

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel"),
        Binding("left", "app.focus_previous", "Back", show=False),
        Binding("right", "to_yes", "On", show=False),
    ]

    def buttons(self, name: str, yes: str = "Do it") -> Horizontal:
        """Return both buttons of a dialog, with the ids `NAME-no` and `NAME-yes`."""
        return Horizontal(
            Button("Do nothing", id=f"{name}-no", compact=True),
            Button(yes, id=f"{name}-yes", classes="yes", variant="error", compact=True),
            classes="buttons",
        )

    def on_descendant_focus(self) -> None:
        self.show_keys()

    def show_keys(self) -> None:
        """Show which keys answer the question with the focus, once more where the answer can no longer be given."""
        cannot = self.query_one("Button.yes", Button).disabled
        usual = self.field_keys if cannot or isinstance(self.focused, Input) else self.keys
        no_or_yes = self.focused.id or "" if isinstance(self.focused, Button) else ""
        of_no = "Enter and Esc close" if cannot else NO_KEYS
        keys = of_no if no_or_yes.endswith("-no") else YES_KEYS if no_or_yes else usual
        self.query_one(".dialog").border_subtitle = keys

    def action_to_yes(self) -> None:
        """Focus the button that does it, from wherever the focus is; a list is not left halfway."""
        self.query_one("Button.yes").focus()

    def action_cancel(self) -> None:
        self.dismiss(None)

    def leave(self) -> None:
        """Close without an answer, by the button on which the question starts: show how it is answered."""
        self.app.notify(NOTHING_DONE, markup=False)
        self.dismiss(None)


class ControlScreen(DialogScreen[Wish | Literal["another"]]):
    """Asks what to do to the job, then for confirmation; pressing only Enter does nothing."""

    def __init__(self, ui: UiState, view: View, job: JobRow) -> None:
        super().__init__()
        self._shown = ui.look.shown
        self._view = view
        self._job = job
        self._has_ended = job.state in ENDED
        self._job_actions: list[JobAction] = [JobAction.RESTART] if self._has_ended else list(TITLES)[:-1]
        if job.is_adopted:
            self._job_actions = [JobAction.STOP, JobAction.STOP_NOW, JobAction.KILL]
        if not view.ends_in_step and JobAction.STOP_NOW in self._job_actions:
            self._job_actions.remove(JobAction.STOP_NOW)  # it is what a stop does
        self._lost = tuple(lost_nodes(view, job))
        if self._lost and not job.is_adopted:
            self._job_actions.append(JobAction.RESTART_WITHOUT)
        self._starter = ui.source.starter
        doctor = ui.source.doctor
        self._look_first = LookFirst(id="control-look") if doctor is not None and len(doctor.hosts) > 1 else None

    def compose(self) -> ComposeResult:
        known = TITLES if self._view.ends_in_step else TITLES | PLAIN_TITLES
        titles = [known[action] for action in self._job_actions]
        if self._has_ended:
            titles[0] = "Start again"
        titles += [ANOTHER_TITLE] if self._starter is not None else []
        body = Vertical(
            ChoiceList(*(Option(Text(title)) for title in titles), id="control-deeds", markup=False),
            Horizontal(
                Static("with ranks:", id="control-label", markup=False),
                Input(str(self._job.world_size), type="integer", max_length=6, compact=True, id="control-ranks"),
                id="control-size",
            ),
            *(() if self._look_first is None else (self._look_first,)),
            Static("", id="control-sentence", classes="sentence", markup=False),
            self.buttons("control"),
            classes="dialog",
        )
        body.border_title = Text(self._shown(f"Job {self._job.job_id}"))
        yield body

    def on_mount(self) -> None:
        options = self.query_one("#control-deeds", OptionList)
        options.highlighted = 0
        options.focus()
        self._update_text()

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        self._update_text()

    def on_input_changed(self, _event: Input.Changed) -> None:
        self._update_text()

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        if self._is_another and not self.query_one("#control-yes", Button).disabled:
            self.dismiss(ANOTHER)
            return
        self.query_one("#control-no").focus()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self.query_one("#control-no").focus()

    def on_look_first_submitted(self, _event: LookFirst.Submitted) -> None:
        self.query_one("#control-no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Return the wish only when it was confirmed."""
        if event.button.id != "control-yes":
            self.leave()
            return
        if self._is_another:
            self.dismiss(ANOTHER)
            return
        num_ranks = self._num_ranks
        is_other = self._asks_ranks and num_ranks != self._job.world_size
        looks_first = self._job_action.restarts and self._look_first is not None and self._look_first.is_on
        self.dismiss(Wish(self._job_action, num_ranks if is_other else None, self._lost, looks_first))

    @property
    def _place(self) -> int:
        return self.query_one("#control-deeds", OptionList).highlighted or 0

    @property
    def _is_another(self) -> bool:
        return self._place == len(self._job_actions)

    @property
    def _job_action(self) -> JobAction:
        """Action that is marked; the last one when another program is marked."""
        return self._job_actions[min(self._place, len(self._job_actions) - 1)]

    @property
    def _asks_ranks(self) -> bool:
        """Whether the marked action lets the job have another number of ranks."""
        return self._job_action.restarts and self._job_action is not JobAction.RESTART_WITHOUT

    @property
    def _num_ranks(self) -> int:
        """Number that was typed; 0 when it is missing or impossible."""
        typed = self.query_one("#control-ranks", Input).value
        number = int(typed) if typed.isascii() and typed.isdigit() else 0
        return number if self._job.num_nodes <= number <= max_ranks(self._job.num_nodes) else 0

    def _update_text(self) -> None:
        if self._is_another and self._starter is not None:
            self._show_another(self._starter.where)
            return
        action, num_ranks, least = self._job_action, self._num_ranks, self._job.num_nodes
        self._ask(ranks=self._asks_ranks, look=action.restarts)
        is_sound = bool(num_ranks) or not self._asks_ranks
        sentence = (
            action_question(
                action,
                self._view,
                self._job,
                has_ended=self._has_ended,
                num_ranks=num_ranks if action.restarts else self._job.world_size,
            )
            if is_sound
            else f"That many ranks cannot be: at least {least}, one on each node, and at most {max_ranks(least):,}."
        )
        self.query_one("#control-sentence", Static).update(Text(self._shown(sentence)))
        yes = self.query_one("#control-yes", Button)
        yes.label = Text(action_title(action, self._job, has_ended=self._has_ended))
        yes.disabled = not is_sound
        yes.refresh(layout=True)
        self.show_keys()

    def _ask(self, *, ranks: bool, look: bool) -> None:
        """Show the fields that belong to the marked action; the lines of the others stay blank, so that none moves."""
        self.query_one("#control-size").set_class(not ranks, "unasked")
        if self._look_first is not None:
            self._look_first.set_class(not look, "unasked")
        self.keys = RANKS_KEYS if ranks else DialogScreen.keys

    def _show_another(self, host: str) -> None:
        self._ask(ranks=False, look=False)
        self.keys = ANOTHER_KEYS
        busy = busy_text(self._view, host)
        sentence = (
            f"{busy}: end it first, then start another one here."
            if busy
            else f"Another program on {host}: which one, and with how many ranks, is asked next."
        )
        self.query_one("#control-sentence", Static).update(Text(self._shown(sentence)))
        yes = self.query_one("#control-yes", Button)
        yes.label = Text(ANOTHER_TITLE)
        yes.disabled = bool(busy)
        yes.refresh(layout=True)
        self.show_keys()


class ChoiceList(OptionList):
    """A list that keeps the marked choice in sight when its room changes."""

    def on_resize(self) -> None:
        self.scroll_to_highlight()


LABEL = "look at the hosts first, as rankdeck doctor does"


class LookFirst(Static, can_focus=True):
    """A checkbox that looks the same in every theme and set of glyphs.

    Attributes:
        is_on: Whether it is ticked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tick", "Tick", show=False),
        Binding("enter", "submit", "Go on", show=False),
    ]

    class Submitted(Message):
        """The user moves on to the next field."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's word
        super().__init__("", id=id, classes="look-first", markup=False)
        self.is_on = True
        self._update_text()

    def action_tick(self) -> None:
        self.is_on = not self.is_on
        self._update_text()

    def action_submit(self) -> None:
        self.post_message(self.Submitted())

    def on_click(self, _event: Click) -> None:
        self.action_tick()

    def _update_text(self) -> None:
        self.update(Text(f"[{'x' if self.is_on else ' '}] {LABEL}"))
