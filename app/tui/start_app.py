"""What `rankdeck` alone shows: what can be done here, each with one key, and the command that does it in a shell."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from app.program import shell_text
from app.start import (
    Way,
    all_hosts_text,
    aside,
    attach_argv,
    offers,
    program_argv,
    replay_argv,
    start_argv,
)
from app.tui.program_form import NewProgramScreen, shell_line
from app.tui.start_pages import FilePage, HostPage, JobPage
from app.tui.themed_app import ThemedApp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.events import Resize

    from app.start import Offer, StartFacts
    from app.tui.theme import Look

ROOMY_HEIGHT = 22
OTHER_LINES = 10
"""Beside the choices, without the sentence above them: a frame, blanks, three lines of words and a command."""
SENTENCE = "Which rank holds the others up, at which barrier, on which line, and why."


class StartApp(ThemedApp[tuple[str, ...]]):
    """Returns the arguments of the command that a person has chosen; None when they left."""

    TITLE = "rankdeck"
    CSS_PATH = Path(__file__).with_name("console.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "leave", "Leave", show=False),
        Binding("ctrl+c,ctrl+q", "leave", "Leave", show=False, priority=True, system=True),
        *(Binding(str(number), f"mark({number})", "Choose", show=False) for number in range(1, len(Way) + 1)),
    ]

    def __init__(self, facts: StartFacts, look_here: Callable[[], str], look: Look) -> None:
        """`look_here` blocks, and says in a few words what is known of the agent on this machine."""
        super().__init__(look)
        self._facts = facts
        self._look_here = look_here
        self._offers = offers(facts)
        self._is_asking = False

    def compose(self) -> ComposeResult:
        """Lay out what can be done, a sentence about it, and its command."""
        shown = self.look.shown
        told, is_trouble = aside(self._facts)
        body = Vertical(
            Static(SENTENCE, id="start-sentence", classes="sentence", markup=False),
            OptionList(
                *(
                    Option(Text(shown(f"{number}  {offer.title}"), "" if offer.is_there else "dim"))
                    for number, offer in enumerate(self._offers, start=1)
                ),
                id="start-ways",
                markup=False,
            ),
            Static("", id="start-note", classes="sentence", markup=False),
            Static("", id="start-shell", classes="shell", markup=False),
            *([Static(Text(shown(told)), id="start-aside", classes="trouble" if is_trouble else "")] if told else []),
            classes="dialog start",
        )
        body.border_title = "rankdeck"
        body.border_subtitle = f"1-{len(self._offers)} or arrows choose, Enter goes on, q leaves"
        yield Vertical(body, id="start")

    def on_mount(self) -> None:
        """Begin at the first thing that can be done."""
        ways = self.query_one("#start-ways", OptionList)
        ways.highlighted = next(place for place, offer in enumerate(self._offers) if offer.is_there)
        ways.focus()

    def on_resize(self, event: Resize) -> None:
        """Keep the marked row, the sentence about it and its command on a small screen: what is above them leaves."""
        height = event.size.height
        self.query_one("#start-sentence").display = height >= ROOMY_HEIGHT
        self.query_one("#start-ways").styles.max_height = max(3, height - OTHER_LINES)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Say what that is, and how it is done in a shell."""
        offer = self._offers[event.option_index]
        self.query_one("#start-note", Static).update(Text(self.look.shown(offer.note)))
        self.query_one("#start-shell", Static).update(shell_line(self.look, shell_text(offer.argv)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Go on with it; a second Enter, before the next page is there, is one too many."""
        if not self._is_asking:
            self._is_asking = True
            self._go_on(self._offers[event.option_index])

    def action_mark(self, number: int) -> None:
        """Mark what a key stands for."""
        if number <= len(self._offers):
            self.query_one("#start-ways", OptionList).highlighted = number - 1

    def action_leave(self) -> None:
        """Leave, and do nothing."""
        self.exit()

    @work
    async def _go_on(self, offer: Offer) -> None:
        if not offer.is_there:
            self.notify(self.look.shown(offer.note), severity="warning", markup=False)
        elif (argv := await self._argv(offer)) is not None:
            self.exit(argv)
        self._is_asking = False

    async def _argv(self, offer: Offer) -> tuple[str, ...] | None:
        """Ask what else must be known; None where the person goes back."""
        facts = self._facts
        match offer.way:
            case Way.CLUSTER | Way.EXAMINE | Way.DEMO | Way.HELP:
                return offer.argv
            case Way.JOB:
                job = await self.push_screen_wait(JobPage(self.look, facts, offer.way))
                return None if job is None else start_argv(facts, job)
            case Way.REPLAY:
                path = await self.push_screen_wait(FilePage(self.look, facts, offer.way))
                return None if path is None else replay_argv(facts, path)
            case Way.ATTACH:
                host = await self._host(offer.way)
                return None if host is None else attach_argv(facts, host)
            case Way.RUN_ON_ALL:
                return await self._program(None, all_hosts_text(facts), facts.hosts_of_cluster)
            case Way.RUN:
                while (host := await self._host(offer.way)) is not None:
                    if (argv := await self._program(host, host, [host])) is not None:
                        return argv
                return None

    async def _host(self, way: Way) -> str | None:
        return await self.push_screen_wait(HostPage(self.look, self._facts, way, self._look_here))

    async def _program(self, host: str | None, where: str, hosts: Sequence[str]) -> tuple[str, ...] | None:
        argv = partial(program_argv, self._facts, host)
        program = await self.push_screen_wait(NewProgramScreen(self.look, where, hosts, argv))
        return None if program is None else argv(program)
