"""How a command takes settings: `--set` above the environment and the files, `--no-config` without the files."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.settings.loading import Loaded
    from app.settings.schema import Settings

NO_FILES = "--no-config"
NO_FILES_PARAMETER = "has_no_files"
_options = (
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="A setting for this time, as console.theme=light; rankdeck config lists them",
    ),
    click.option(NO_FILES, NO_FILES_PARAMETER, is_flag=True, help="Leave config.toml and rankdeck.toml out"),
)


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; the command gets them as `assignments` and `has_no_files`."""
    for option in reversed(_options):
        command = option(command)
    return command


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; the command gets the settings from options, environment and files as `settings`."""

    @settings_options
    @functools.wraps(command)
    def with_settings(*, assignments: tuple[str, ...], has_no_files: bool, **how: Any) -> None:
        command(settings=read_settings(assignments, has_files=not has_no_files), **how)

    return with_settings


def load_settings(assignments: Sequence[str], *, has_files: bool) -> Loaded:
    """Return all settings, and the errors in them."""
    from app.settings.loading import load  # noqa: PLC0415 - `--help` does not pay for it
    from app.tui.actions import ACTIONS  # noqa: PLC0415

    return load(ACTIONS, assignments, has_files=has_files)


def read_settings(assignments: Sequence[str], *, has_files: bool) -> Settings:
    """Return the settings.

    Raises:
        UsageError: The settings have an error.
    """
    return load_settings(assignments, has_files=has_files).settings()
