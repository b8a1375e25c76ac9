"""The ways to several hosts, gone, opened and left together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from app.at_once import at_once
from app.errors import AppError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from app.ssh.agent_link import AgentLink


class LinkGroup:
    """Links to different hosts; the `with` block closes them all. Everything here blocks, within bounds."""

    def __init__(self) -> None:
        """Make a group of none so far."""
        self.links: list[AgentLink] = []

    def add(self, link: AgentLink) -> None:
        """Take a link, which is closed with the others from now on."""
        self.links.append(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        list(at_once(self.links, lambda link: link.close()))

    def connect(self, then: Callable[[AgentLink], object]) -> Iterator[tuple[str, AppError | None]]:
        """Go to every host at once, and do something there; yield each host and what went wrong, None if nothing did.

        Args:
            then: Called with each link once it is connected: `AgentLink.find` or `bring_up`.
        """

        def go(link: AgentLink) -> None:
            link.connect()
            then(link)

        for link, answer in zip(self.links, at_once(self.links, go), strict=True):
            yield link.host, answer if isinstance(answer, AppError) else None
