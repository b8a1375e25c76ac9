"""The settings of this run: the files are found and read, the layers merged, and all errors kept."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.errors import UsageError
from app.paths import NotRegularError, TooLargeError, read_regular_file
from app.settings.layers import (
    DEFAULT,
    Entry,
    Known,
    Layer,
    Origin,
    Trouble,
    assigned_settings,
    contradictions,
    environment_settings,
    key_troubles,
    merged,
)
from app.settings.schema import TABLE, Settings, key_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.settings.schema import Bindable, Setting

MAX_FILE_BYTES = 2**20
"""Bytes of a file at most: no user writes more; a file of this size is parsed in a second."""
PROJECT_FILE = "rankdeck.toml"


class Loaded(msgspec.Struct, frozen=True):
    """Settings, files and errors that were found."""

    entries: Mapping[str, Entry]
    """Settings that hold, by name; a wrong one keeps the value of the layer below."""
    known: Mapping[str, Setting]
    troubles: Sequence[Trouble]
    """In the order of the layers, the lowest first."""
    files: Sequence[Path]
    """Files that were read."""

    def settings(self) -> Settings:
        """Return the settings.

        Raises:
            UsageError: There is an error: the first one, and how to go on without the files.
        """
        if self.troubles:
            first, *others = self.troubles
            more = f"{len(others)} more: rankdeck config --check; " if others else ""
            way_on = "--no-config goes on without the files" if first.origin.is_file else ""
            raise UsageError(str(first), (more + way_on).removesuffix("; "))
        return settings_of({name: entry.value for name, entry in self.entries.items()})


def user_file(environ: Mapping[str, str], home: Path) -> Path:
    """Return where the user's own settings are; a relative `XDG_CONFIG_HOME` is ignored, as its specification asks.

    Source: XDG Base Directory Specification 0.8.
    """
    directory = Path(environ.get("XDG_CONFIG_HOME", ""))
    return (directory if directory.is_absolute() else home / ".config") / "rankdeck" / "config.toml"


def project_file(directory: Path) -> Path | None:
    """Return the nearest `rankdeck.toml` from a directory upwards."""
    for place in (directory, *directory.parents):
        path = place / PROJECT_FILE
        if os.path.lexists(path):
            return path
    return None


def load(
    actions: Sequence[Bindable],
    assignments: Sequence[str] = (),
    *,
    has_files: bool = True,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Loaded:
    """Find, read and check the settings; errors are returned, never raised.

    Args:
        actions: Actions whose keys may be set.
        assignments: `KEY=VALUE` of the command line.
        has_files: False leaves the files out.
        environ: The environment, of this process by default.
        directory: Where the search for the project's file begins, this process' own by default.
    """
    environ = os.environ if environ is None else environ
    known = Known([*TABLE, *key_settings(actions)])
    layers, files = [known.defaults()], []
    if has_files:
        for path, is_shared in _paths(environ, directory):
            layer = _file_layer(known, path, is_shared=is_shared)
            if layer is not None:
                layers.append(layer)
                files.append(path)
    layers.append(known.text_layer(environment_settings(environ)))
    given, no_assignments = assigned_settings(assignments)
    layers += [Layer((), no_assignments), known.text_layer(given)]
    entries = merged(layers)
    ladder = [DEFAULT, *map(str, files), "NO_COLOR", "RANKDECK_THEME", "RANKDECK_ASCII", "--set"]
    troubles = [trouble for layer in layers for trouble in layer.troubles]
    troubles += [*contradictions(entries, ladder), *key_troubles(entries, actions, ladder)]
    return Loaded(entries, known.by_name, troubles, files)


def _paths(environ: Mapping[str, str], directory: Path | None) -> list[tuple[Path, bool]]:
    """Return the files to read, the lowest first, and whether each is shared with others than settings."""
    paths = []
    with contextlib.suppress(RuntimeError):  # a user without a home has no file there
        paths.append((user_file(environ, Path(environ.get("HOME") or "~").expanduser()), False))
    try:
        project = project_file(directory or Path.cwd())
    except OSError:
        project = None  # the directory that this was started in is gone
    return paths if project is None else [*paths, (project, True)]


def _file_layer(known: Known, path: Path, *, is_shared: bool) -> Layer | None:
    """Return the layer of a file, None where there is none."""
    try:
        text = read_regular_file(path, MAX_FILE_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return None
        what = "it is a link to a file that is not there"
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    except NotRegularError:
        what = "it is not a file"
    except TooLargeError:
        what = f"it is larger than {MAX_FILE_BYTES >> 20} MiB"
    except UnicodeDecodeError as error:
        return _wrong(path, error.object[: error.start].count(b"\n") + 1, "it is not UTF-8 from this line on")
    else:
        return known.file_layer(text.removeprefix("\ufeff"), str(path), is_shared=is_shared)
    return _wrong(path, 1, what)


def _wrong(path: Path, line: int, what: str) -> Layer:
    return Layer((), [Trouble(Origin(str(path), line), what)])
