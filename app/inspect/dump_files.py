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


def read_dumps(directory: Path) -> dict[int, Dump]:
    """Return the dumps in a directory by rank.

    They share all of their names but the number: of several such sets that with `trace` in its names, or the largest.

    Raises:
        UsageError: There is none, or a file with such a name is no dump.
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
    return {rank: _read(directory / name) for rank, name in sorted(ranks.items())}


def _read(path: Path) -> Dump:
    shown = clean(str(path), LINE_LIMIT)
    try:
        return read_dump(read_regular_file(path, MAX_DUMP_BYTES))
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}", HINT) from error
    except NotRegularError:
        raise UsageError(f"{shown} is not a file", HINT) from None
    except TooLargeError:
        raise UsageError(f"{shown} is larger than any dump: more than {MAX_DUMP_BYTES >> 20} MiB", HINT) from None
    except MalformedDumpError as error:
        raise UsageError(f"{shown} is no dump of torch's flight recorder: {error}", HINT) from error
