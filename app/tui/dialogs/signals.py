"""The dialog before a signal is sent to the ranks of a job that rankdeck did not start. Loaded on first use."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text
from textual.containers import Vertical
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from app.text import nodes_text, ranks_text
from app.tui.dialogs.control import ChoiceList, DialogScreen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from app.inspect.outside_view import Target
    from app.tui.ui_state import UiState

MAX_HOSTS_NAMED = 4
MAX_PIDS_NAMED = 8
"""Processes named on each of these hosts: more would leave no room for the buttons."""


class Choice(NamedTuple):
    """A signal to choose.

    Attributes:
        number: The signal.
        title: Title in the list.
        effect: A sentence about its effect.
    """

    number: signal.Signals
    title: str
    effect: str


CHOICES = (
    Choice(
        signal.SIGTERM, "SIGTERM   ask the ranks to end", "This asks them to end. Their launcher may start them again."
    ),
    Choice(
        signal.SIGKILL,
        "SIGKILL   end them at once",
        "This ends them at once: what is not saved is lost. Their launcher may start them again.",
    ),
    Choice(signal.SIGCONT, "SIGCONT   let those that are stopped go on", "This lets them go on."),
)


class SignalScreen(DialogScreen[tuple["Sequence[Target]", int]]):
    """Asks which signal to send, then for confirmation; pressing only Enter sends none."""

    def __init__(self, ui: UiState, targets: Sequence[Target]) -> None:
        super().__init__()
        self._shown = ui.look.shown
        self._targets = targets
        self._choices = CHOICES if any(target.is_stopped for target in targets) else CHOICES[:-1]

    def compose(self) -> ComposeResult:
        body = Vertical(
            ChoiceList(*(Option(Text(choice.title)) for choice in self._choices), id="signal-deeds", markup=False),
            Static("", id="signal-sentence", classes="sentence", markup=False),
            self.buttons("signal"),
            classes="dialog",
        )
        body.border_title = Text("Send a signal: rankdeck did not start this job")
        yield body

    def on_mount(self) -> None:
        options = self.query_one("#signal-deeds", OptionList)
        options.highlighted = 0
        options.focus()
        self._update_text()

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        self._update_text()

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        self.query_one("#signal-no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Return the processes and the signal only when they were confirmed."""
        if event.button.id == "signal-yes":
            self.dismiss((self._meant, int(self._choice.number)))
        else:
            self.leave()

    @property
    def _choice(self) -> Choice:
        return self._choices[self.query_one("#signal-deeds", OptionList).highlighted or 0]

    @property
    def _meant(self) -> list[Target]:
        """Processes that the marked signal goes to."""
        is_for_stopped = self._choice.number is signal.SIGCONT
        return [target for target in self._targets if target.is_stopped or not is_for_stopped]

    def _update_text(self) -> None:
        choice, meant = self._choice, self._meant
        sentence = f"Send {choice.number.name} to {whom(meant)}? {choice.effect}"
        self.query_one("#signal-sentence", Static).update(Text(self._shown(sentence)))
        yes = self.query_one("#signal-yes", Button)
        yes.label = Text(f"Send {choice.number.name}")
        yes.refresh(layout=True)


def whom(targets: Sequence[Target]) -> str:
    """Return `ranks 0-1 on gpu1 (pids 11, 12) and rank 2 on gpu2 (pid 21)`; of many hosts the rest is counted."""
    by_host: dict[str, list[Target]] = {}
    for target in targets:
        by_host.setdefault(target.host, []).append(target)
    parts = []
    for host, its in list(by_host.items())[:MAX_HOSTS_NAMED]:
        more = ", ..." if len(its) > MAX_PIDS_NAMED else ""
        pids = ", ".join(str(target.pid) for target in its[:MAX_PIDS_NAMED])
        plural = "" if len(its) == 1 else "s"
        parts.append(f"{ranks_text([target.rank for target in its])} on {host} (pid{plural} {pids}{more})")
    if others := list(by_host.values())[MAX_HOSTS_NAMED:]:
        parts.append(f"{sum(map(len, others))} more on {len(others)} more host{'' if len(others) == 1 else 's'}")
    return nodes_text(parts, len(parts))
