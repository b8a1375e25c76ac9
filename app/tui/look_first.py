"""The choice to have hosts looked at before a job is started on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static

if TYPE_CHECKING:
    from textual.events import Click

WORDS = "look at the hosts first, as rankdeck doctor does"


class LookFirst(Static, can_focus=True):
    """A box that is ticked or not: the same in every look and alphabet.

    Attributes:
        is_on: Whether it is ticked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tick", "Tick", show=False),
        Binding("enter", "submit", "Go on", show=False),
    ]

    class Submitted(Message):
        """The person goes on to what follows."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's word
        super().__init__("", id=id, classes="look-first", markup=False)
        self.is_on = True
        self._tell()

    def action_tick(self) -> None:
        """Tick it, or not."""
        self.is_on = not self.is_on
        self._tell()

    def action_submit(self) -> None:
        """Go on."""
        self.post_message(self.Submitted())

    def on_click(self, _event: Click) -> None:
        """Do as the space bar."""
        self.action_tick()

    def _tell(self) -> None:
        self.update(Text(f"[{'x' if self.is_on else ' '}] {WORDS}"))
