"""Finds and reads the files of torch's flight recorder in a directory: one a rank, whose name ends with its number."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.inspect.dumps import MAX_DUMP_BYTES, Dump, MalformedDumpError, read_dump
from app.paths import NotRegularError, TooLargeError, read_regular_file
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from pathlib import Path

HINT = "torch writes them at a time-out, to TORCH_FR_DUMP_TEMP_FILE with the rank behind it: /tmp/nccl_trace_rank_0"
_NAME = re.compile(r"(.*?)([0-9]{1,6})")


def read_dumps(directory: Path) -> tuple[dict[int, Dump], dict[int, str]]:
    """Return the dumps in a directory by rank, and by rank why a file cannot be read: empty, cut short or no dump.

    They share all of their names but the number: of several such sets that with `trace` in its names, or the largest.

    Raises:
        UsageError: There is none that can be read.
    """
    shown = clean(str(directory), LINE_LIMIT)
    try:
        names = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}", HINT) from error
    if not names:
        raise UsageError(f"{shown} has no file whose name ends with a rank", HINT)
    counts = Counter(match[1] for match in names)
    prefix = max(counts, key=lambda one: ("trace" in one, counts[one]))
    ranks = {int(match[2]): match[0] for match in names if match[1] == prefix}
    dumps: dict[int, Dump] = {}
    unread: dict[int, str] = {}
    for rank, name in sorted(ranks.items()):
        try:
            dumps[rank] = _read(directory / name)
        except MalformedDumpError as error:
            unread[rank] = str(error)
    if not dumps:
        name = clean(ranks[min(ranks)], LINE_LIMIT)
        raise UsageError(f"{shown} has no readable dump of torch's flight recorder; {name}: {unread[min(ranks)]}", HINT)
    return dumps, unread


def _read(path: Path) -> Dump:
    try:
        return read_dump(read_regular_file(path, MAX_DUMP_BYTES))
    except OSError as error:
        raise MalformedDumpError(f"it cannot be opened: {error.strerror}") from error
    except NotRegularError:
        raise MalformedDumpError("it is not a file") from None
    except TooLargeError:
        raise MalformedDumpError(f"it is larger than any dump: more than {MAX_DUMP_BYTES >> 20} MiB") from None
