"""Turns bytes, as they come, into lines of text.

Pure, and bounded in memory whatever comes: a line that never ends, a progress bar that never breaks, binary, broken
UTF-8 across the borders of reads.
"""

from __future__ import annotations

MAX_LINE_CHARS = 4096
MAX_HELD_BYTES = 4 * MAX_LINE_CHARS
"""Bytes of an unfinished line: the characters that are kept take no more, whatever they are."""


class LineSplitter:
    """Turns bytes into lines; how they are cut into pieces does not matter.

    A carriage return goes back to the line's start, as on a terminal: of a progress bar only the last state is kept.
    """

    def __init__(self) -> None:
        self._held = b""
        self._has_returned = False
        """Whether the last byte was a carriage return: half of a line end, or back to the line's start."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        head, newline, rest = data.partition(b"\n")
        self._hold(head)
        if not newline:
            return []
        lines = [self.flush()]
        whole, newline, rest = rest.rpartition(b"\n")
        if newline:
            lines += self._whole_lines(whole)
        self._hold(rest)
        return lines

    def flush(self) -> str:
        """Return the unfinished line and begin a new one."""
        text = self._held.decode(errors="replace")[:MAX_LINE_CHARS]
        self._held, self._has_returned = b"", False
        return text

    @property
    def is_empty(self) -> bool:
        """True when no unfinished line is held."""
        return not self._held and not self._has_returned

    @property
    def unfinished(self) -> str:
        """The line so far, such as a progress bar; with a space behind it once the cursor has left it."""
        return self._held.decode(errors="replace")[:MAX_LINE_CHARS] + " " * self._has_returned

    def _whole_lines(self, data: bytes) -> list[str]:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
        if b"\r" in data:
            return [self._line(piece) for piece in data.split(b"\n")]
        # A newline ends a broken sequence, so that the whole can be decoded at once: ten times as fast.
        lines = data.decode(errors="replace").split("\n")
        if len(data) > MAX_LINE_CHARS and max(map(len, lines)) > MAX_LINE_CHARS:
            return [line[:MAX_LINE_CHARS] for line in lines]
        return lines

    def _line(self, piece: bytes) -> str:
        self._hold(piece)
        return self.flush()

    def _hold(self, piece: bytes) -> None:
        body = piece.rstrip(b"\r")
        if body:
            restarts_line = self._has_returned or b"\r" in body
            last = body[body.rfind(b"\r") + 1 :]
            self._held = (last if restarts_line else self._held + last)[:MAX_HELD_BYTES]
            self._has_returned = False
        self._has_returned = self._has_returned or len(body) < len(piece)
