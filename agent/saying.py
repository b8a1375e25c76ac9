"""What an agent says to people on standard error, which may be a file on a full disk, or a pipe that nobody reads."""

from __future__ import annotations

import contextlib

import click


def say(text: str) -> None:
    """Say a line, if it can be said: no complaint ends an agent."""
    with contextlib.suppress(OSError):
        click.echo(f"agent: {text}", err=True)
