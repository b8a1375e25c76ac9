"""A group of commands of which each is imported only when it is wanted: a person waits for one of them, not for all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class LazyGroup(click.Group):
    """A group that knows where its commands are.

    Source: Click's documentation, "Lazily Loading Subcommands".
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **kwargs: Any) -> None:
        """Make the group; `places` has the module of each command, in which it bears its own name."""
        super().__init__(*args, **kwargs)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted({*super().list_commands(ctx), *self.places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported now; None if there is none of that name."""
        if cmd_name not in self.places:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(self.places[cmd_name]), cmd_name)
        return command
