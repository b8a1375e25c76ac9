"""A terminal that is gone takes nothing more; a console that writes there still comes to its end."""

from __future__ import annotations

import contextlib
import os
import pty

import pytest
from textual.drivers._writer_thread import MAX_QUEUED_WRITES, WriterThread

from app.tui.rendering import LastingFile


@pytest.mark.timeout(30)
def test_what_is_written_to_a_terminal_that_is_gone_is_lost_and_holds_up_nobody() -> None:
    far, near = pty.openpty()
    terminal = open(near, "w")  # noqa: PTH123, SIM115 - a descriptor; its end raises
    os.close(far)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(near, b"x")
    file = LastingFile(terminal)
    writer = WriterThread(file)  # type: ignore[arg-type]
    writer.start()

    for _ in range(3 * MAX_QUEUED_WRITES):
        writer.write("x" * 1000)
    writer.stop()

    assert file.fileno() == near
    with contextlib.suppress(OSError):
        terminal.close()
