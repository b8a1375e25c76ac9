"""The fault matrix: what is done, what is then expected, and within what time; `tests/fault/test_matrix.py` prints it.

The times are those of a machine that has nothing else to do, from the fault to where it is told of, at five reports a
second: a host is stale after 2 s, lost after 6 s, and its connection is given up after 9 s. Tests wait longer. After
the end of the fault all is green within `HEALED_S`.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

FIGURES = os.environ.get("RANKDECK_FAULT_FIGURES", "")
HEALED_S = 15.0


class Row(NamedTuple):
    """A fault.

    Attributes:
        bound_s: Seconds until it is told of; 0 where nothing is to be told.
        invariants: Those that apply; a fault of an agent alone, without a console, has nothing that is shown.
    """

    fault: str
    expected: str
    bound_s: float
    invariants: str = "I1 to I8"


ROWS = {
    1: Row("an agent is killed", "no agent on the host; the job goes on; the next agent takes it up", 5),
    2: Row("an agent is stopped for 20 s", "stale, lost, named as frozen; back without another login", 6),
    3: Row("a shim is killed", "it is told of; training goes on; stop ends the whole tree", 2),
    4: Row("a rank is killed", "rank, host and signal are named; its launcher ends", 2),
    5: Row("a rank is stopped", "it is named as frozen", 5),
    6: Row("a job ends while no agent runs", "its true exit status after the next agent's start", 2),
    7: Row("a host loses power", "lost; the others' ranks are shown", 10),
    8: Row("it boots again", "the same host; its old job is lost, never running", 2),
    9: Row("a silent cut of 2 s", "at most stale; the connection stays", 0),
    10: Row("a silent cut of a minute", "lost, with a reason; what was printed meanwhile comes after it", 10),
    11: Row("a link without carrier", "as after a silent cut", 10),
    12: Row("a link that carries nothing one way", "as after a silent cut, whichever way", 10),
    13: Row("5 % loss and 50 ms of jitter", "up; no flapping", 0),
    14: Row("a link of 1 Mbit/s", "reports are 1 to 2 s old; lines of ranks come later", 0),
    15: Row("half of the hosts are cut off", "one line names them all", 10),
    16: Row("a host stands still as a whole", "lost; a new login is given up; green when it goes on", 10),
    17: Row("sshd no longer listens", "reports go on; a new login is refused", 2),
    18: Row("SSH sessions are killed", "told of once; back by itself", 2),
    19: Row("another host key", "said loudly; not tried again; no command is sent", 5),
    20: Row("a revoked key", "tried once; again when the user asks", 5),
    21: Row("sshd forbids forwarding", "`agent proxy` instead, and that is said", 5),
    22: Row("a bastion dies", "one incident; all behind it come back", 10),
    23: Row("a console is killed while it starts a job", "nothing runs, or the next console shows and stops it", 5),
    24: Row("one host refuses a job", "no host keeps anything of it; the reason is named", 2),
    25: Row("the reply to a commit is lost", "the truth is asked for; never two starts", 10, "I1, I2"),
    26: Row("two consoles", "both look on; the second start asks, an older generation is refused", 2),
    27: Row("a job that ignores SIGTERM and leaves its session", "nothing is left after the grace period", 2, "I2"),
    28: Row("a full disk, or one that cannot be written", "the agent lives; starts are refused; ends are known", 2),
    29: Row("damaged files of a job", "set aside and said; the job goes on, or is unknown", 2, "I1, I2, I3"),
    30: Row("a host that lies, floods or sends nonsense", "told of; the others are served; memory is bounded", 5),
    31: Row("a console that stands still", "no backlog: what comes first is the latest", 0),
    32: Row("a terminal that closes, or has 20 x 5 cells", "the console ends or paints; jobs go on", 5),
    33: Row("a clock that is off by an hour and steps back", "ages and durations stay right", 0),
    34: Row("256 descriptors", "a clear sentence; what is there goes on", 2),
    35: Row("a pid that another process has now", "it is never signalled", 0, "I2, I3"),
}


def note(row: int, what: str, seconds: float, detail: str = "") -> None:
    """Keep a figure of a row, where somebody wants them."""
    if FIGURES:
        with Path(FIGURES).open("a") as file:
            file.write(f"{row}\t{what}\t{seconds:.2f}\t{detail}\n")


@contextmanager
def measure(row: int, what: str, detail: str = "") -> Iterator[None]:
    """Note how long a block took, for the table of figures."""
    began_s = time.monotonic()
    yield
    note(row, what, time.monotonic() - began_s, detail)
