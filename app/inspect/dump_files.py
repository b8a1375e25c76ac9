"""Finds and reads the files of torch's flight recorder in a directory: one a rank, whose name ends with its number."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.inspect.dumps import MAX_DUMP_BYTES, Dump, MalformedDumpError, read_dump
from app.paths import NotRegularError, TooLargeError, read_regular_file
from app.text import LINE_LIMIT, clean, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HINT = (
    "torch writes them at a time-out, to TORCH_FR_DUMP_TEMP_FILE with the rank behind it, by default to "
    "~/.cache/torch/comm_lib_trace_rank_0 ($XDG_CACHE_HOME for ~/.cache), older torch to /tmp/nccl_trace_rank_0"
)
_OLD_S = 3600.0
_NAME = re.compile(r"(.*?)([0-9]{1,6})")


def read_dumps(directory: Path) -> tuple[dict[int, Dump], dict[int, str], list[str]]:
    """Return the dumps in a directory by rank, by rank why a file cannot be read, and what else the files show.

    They share all of their names but the number: of several such sets that with `trace` in its names, or the largest.
    Files of another job than the latest file, by the ranks of their default groups, are left out and named.

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
    times: dict[int, float] = {}
    for rank, name in sorted(ranks.items()):
        try:
            dumps[rank], times[rank] = _read(directory / name)
        except MalformedDumpError as error:
            unread[rank] = str(error)
    if not dumps:
        name = clean(ranks[min(ranks)], LINE_LIMIT)
        raise UsageError(f"{shown} has no readable dump of torch's flight recorder; {name}: {unread[min(ranks)]}", HINT)
    notes = []
    worlds = {rank: world for rank, dump in dumps.items() if rank in (world := dump.world)}
    if worlds:
        latest = max(worlds, key=lambda rank: times[rank])
        now = worlds[latest]
        if others := [rank for rank in ranks if rank not in now or worlds.get(rank, now) != now]:
            notes.append(f"left out: {_files_of(others)}, of another job than the latest file, that of rank {latest}")
        for rank in others:
            dumps.pop(rank, None)
            unread.pop(rank, None)
    end = max(times[rank] for rank in dumps)
    if old := [rank for rank in dumps if end - times[rank] > _OLD_S]:
        notes.append(f"more than an hour older than the latest, so perhaps of an earlier job: {_files_of(old)}")
    return dumps, unread, notes


def _files_of(ranks: Sequence[int]) -> str:
    return f"the {'file' if len(ranks) == 1 else 'files'} of {ranks_text(sorted(ranks))}"


def _read(path: Path) -> tuple[Dump, float]:
    """Return a dump and when its file was written, as a wall time."""
    try:
        return read_dump(read_regular_file(path, MAX_DUMP_BYTES)), path.stat().st_mtime
    except OSError as error:
        raise MalformedDumpError(f"it cannot be opened: {error.strerror}") from error
    except NotRegularError:
        raise MalformedDumpError("it is not a file") from None
    except TooLargeError:
        raise MalformedDumpError(f"it is larger than any dump: more than {MAX_DUMP_BYTES >> 20} MiB") from None
