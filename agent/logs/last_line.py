"""What a rank that left no exception wrote last to standard error: the words of `sys.exit("...")`, and argparse's."""

from __future__ import annotations

import re

from agent.logs.traceback_text import MAX_EXCEPTION_CHARS, cleaned

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
_NOISE = re.compile(
    r"\[?[WI]\d{4} \d\d:\d\d"
    r"|\S+:\d+: \w*Warning: "
    r"|.*\b\d{1,3}%\|"
    r"|.*resource_tracker"
)
"""torch's own notes at its end, Python's warnings, progress bars. Source: c10/util/Logging.cpp, tqdm."""


def last_line(text: str) -> str:
    """Return the last line that may say why a rank ended, cleaned and cut; empty when there is none."""
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        line = cleaned(_RANK_PREFIX.sub("", lines[index], count=1)).strip()
        is_source = lines[index].startswith("  ") and index > 0 and "Warning: " in lines[index - 1]
        if line and not is_source and not _NOISE.match(line):
            return line[:MAX_EXCEPTION_CHARS]
    return ""
