"""The two dialogs: the help with every key, and the confirmation of a fault. Loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.columns import Columns
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from app.diagnosis.causes import RankState
from app.manual import markdown
from app.tui.actions import available
from app.tui.dialogs.control import ChoiceList, DialogScreen
from app.tui.widgets.drawing import GRID_FROM
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, Fault, FaultKind

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Key

    from app.tui.ui_state import UiState
    from app.view.rows import RankRow
    from app.view.view import View


class Harm(NamedTuple):
    """A fault that a user may inject into a rank, as text.

    Attributes:
        title: Title in the list.
        kind: Kind of the fault.
        effect: Sentence about its effect.
        asks: Text before the rank in the question, where the title does not fit.
        factor: Factor of the fault.
    """

    title: str
    kind: FaultKind
    effect: str
    asks: str = ""
    factor: float = DEFAULT_SLOW_FACTOR

    @property
    def question(self) -> str:
        """Text before `rank 2` in the question."""
        return self.asks or self.title


HARMS = (
    Harm("Freeze", FaultKind.FREEZE, "SIGSTOP: it stands still until it is thawed, and the others wait for it"),
    Harm("Thaw", FaultKind.THAW, "SIGCONT: a frozen rank goes on"),
    Harm("Kill", FaultKind.KILL, "SIGKILL: the rank is gone, and its job ends"),
    Harm("Slow", FaultKind.SLOW, f"every step takes {DEFAULT_SLOW_FACTOR:g} times as long"),
    Harm("Unslow", FaultKind.SLOW, "a slowed rank is as fast as the others again", factor=1.0),
    Harm("GIL", FaultKind.GIL, f"for {DEFAULT_HOLD_S:g} s no Python runs in it, its probe included", "Hold the GIL of"),
    Harm(
        "Skip barrier",
        FaultKind.SKIP_BARRIER,
        "it leaves out the next barrier or collective, and meets the others in the wrong ones",
        "Skip a barrier in",
    ),
    Harm(
        "Mismatch",
        FaultKind.MISMATCH,
        "it calls a collective that the others do not call: all hang permanently",
        "Call out of turn in",
    ),
    Harm("OOM", FaultKind.OOM, "an allocation of torch fails, and with it the rank and its job", "Exhaust memory of"),
    Harm("Leave", FaultKind.LEAVE, "it leaves with exit code 0 before the others: its job fails", "End the program of"),
)
FREEZE, THAW = 0, 1
"""Indices of the two in `HARMS`."""


def why_no_fault(view: View | None, *, can_inject: bool) -> str:
    """Return why no fault can be injected; empty when one can."""
    if view is None or not view.num_ranks:
        return "There is no rank yet to do harm to."
    return "" if can_inject else "This job does not allow faults: start it with rankdeck run --allow-faults."


def ranks_to_choose(view: View, selected: int) -> list[RankRow]:
    """Return the listed ranks: all, or in a large job the selected one and the culprits."""
    if view.num_ranks < GRID_FROM:
        return view.ranks()
    culprits = [rank for verdict in view.verdicts() for rank in verdict.culprits]
    return view.ranks(sorted({min(selected, view.num_ranks - 1), *culprits[:GRID_FROM]}))


class HelpScreen(ModalScreen[None]):
    """Every action with its keys, the states of a rank, and the rules of the verdicts."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, ui: UiState) -> None:
        super().__init__()
        self._ui = ui

    def on_key(self, event: Key) -> None:
        if event.key in self._ui.keymap.keys("help"):
            event.stop()
            self.dismiss()

    def _shown_keys(self, name: str) -> str:
        return " ".join(filter(None, (self._ui.keymap.shown(name), "ctrl+c" if name == "quit" else "")))

    def compose(self) -> ComposeResult:
        keys = Table.grid(padding=(0, 2, 0, 0))
        for action in available(self._ui.source):
            if shown := self._shown_keys(action.name):
                keys.add_row(Text(shown, "bold", no_wrap=True), Text(action.title, no_wrap=True), action.help)
        glyphs = self._ui.look.glyphs
        states = Columns([f"{glyphs.states[state]} {state}" for state in RankState], padding=(0, 2))
        scroll = VerticalScroll(
            Static(keys),
            Static("\nStates of a rank:", markup=False),
            Static(states),
            Static("\nVerdicts: sentence, evidence, and what to do:", markup=False),
            Static(_verdicts()),
            id="help-scroll",
            classes="dialog wide",
        )
        scroll.border_title = "Keys, states, verdicts"
        scroll.border_subtitle = "arrows scroll, Esc closes"
        yield scroll


def _verdicts() -> Group:
    """Return what `rankdeck help verdicts` prints, without its first heading."""
    parts: list[Text | Padding] = []
    for block in markdown("verdicts").replace("`", "").split("\n\n")[2:]:
        for item in block.strip().split("\n- "):
            line = " ".join(item.split())
            if line.startswith("#"):
                parts.append(Text(line.lstrip("# "), "bold"))
            else:
                parts.append(
                    Padding(Text(line.removeprefix("- "), "dim" if "Not known:" in line else ""), (0, 0, 0, 2))
                )
    return Group(*parts)


KIND_KEYS = "right arrow, then Enter: do it; Enter: to the ranks, Esc closes"


class FaultScreen(DialogScreen["tuple[Fault, RankRow]"]):
    """Asks which fault and which rank, then for confirmation; pressing only Enter injects nothing."""

    def __init__(self, ui: UiState, view: View, selected: int) -> None:
        super().__init__()
        self._ranks = ranks_to_choose(view, selected)
        self._has_others = len(self._ranks) < view.num_ranks
        self._glyphs = ui.look.glyphs
        self._shown = ui.look.shown
        self._selected = selected

    def compose(self) -> ComposeResult:
        kinds = [Option(Text(harm.title)) for harm in HARMS]
        ranks = [Option(self._rank_text(row), id=f"rank-{row.rank}") for row in self._ranks]
        if self._has_others:
            ranks.append(Option(Text("others: select one in the Ranks view first"), disabled=True))
        body = Vertical(
            Horizontal(
                ChoiceList(*kinds, id="fault-kinds", markup=False),
                ChoiceList(*ranks, id="fault-ranks", markup=False),
                id="fault-lists",
            ),
            Static("", id="fault-sentence", classes="sentence", markup=False),
            self.buttons("fault"),
            classes="dialog",
        )
        body.border_title = "Inject a fault"
        yield body

    def on_mount(self) -> None:
        kinds, ranks = self.query_one("#fault-kinds", OptionList), self.query_one("#fault-ranks", OptionList)
        ranks.highlighted = index = next((i for i, row in enumerate(self._ranks) if row.rank == self._selected), 0)
        is_frozen = self._ranks[index].state is RankState.FROZEN
        kinds.highlighted = THAW if is_frozen else FREEZE
        kinds.focus()

    def show_keys(self) -> None:
        is_kind = self.focused is not None and self.focused.id == "fault-kinds"
        self.keys = KIND_KEYS if is_kind else DialogScreen.keys
        super().show_keys()

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        chosen = self._chosen()
        if chosen is None:
            return
        harm, row = chosen
        process = f", pid {row.pid}," if row.pid is not None else ""
        sentence = f"{harm.question} rank {row.rank}{process} on {row.node}? {harm.effect}."
        self.query_one("#fault-sentence", Static).update(Text(self._shown(sentence)))
        yes = self.query_one("#fault-yes", Button)
        yes.label = Text(f"{harm.question} rank {row.rank}")
        yes.refresh(layout=True)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Move on to the next question; the last one starts on `Do nothing`."""
        following = "#fault-ranks" if event.option_list.id == "fault-kinds" else "#fault-no"
        self.query_one(following).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Return the fault, and the rank as it was shown, only when it was confirmed."""
        if event.button.id != "fault-yes" or (chosen := self._chosen()) is None:
            self.leave()
            return
        harm, row = chosen
        self.dismiss((Fault(harm.kind, row.rank, factor=harm.factor), row))

    def _chosen(self) -> tuple[Harm, RankRow] | None:
        kind = self.query_one("#fault-kinds", OptionList).highlighted
        index = self.query_one("#fault-ranks", OptionList).highlighted
        if kind is None or index is None:
            return None
        return HARMS[kind], self._ranks[index]

    def _rank_text(self, row: RankRow) -> Text:
        process = f"pid {row.pid}" if row.pid is not None else "no process"
        text = f"rank {row.rank:<4} {row.node:<12} {process:<12} {self._glyphs.states[row.state]} {row.state}"
        return Text(self._shown(text), no_wrap=True)
