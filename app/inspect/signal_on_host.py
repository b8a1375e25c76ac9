"""The part of signals to ranks of other launchers that runs on a host: it signals the processes that were seen, only.

This text is sent to the host and run by its Python, of 3.9 or newer. It uses the standard library alone. A process is
held by a pidfd before it is compared with what was seen, so that no other process can take its pid in between.

Source: pidfd_open(2), Linux 5.3; proc_pid_stat(5), field 22.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SENT, GONE, ANOTHER = "sent", "gone", "another"


def start_of(pid: int) -> int:
    """Return when a process was started, in ticks since the machine was."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def send(number: int, pid: int, start: int, uid: int) -> str:
    """Send a signal to a process, if it is the one of this start and user; return what became of that."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return GONE
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    try:
        if start_of(pid) != start or Path(f"/proc/{pid}").stat().st_uid != uid:
            return ANOTHER
        signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, FileNotFoundError):
        return GONE
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(fd)
    return SENT


def main(argv: list[str]) -> None:
    """Print a JSON list of what became of each; the arguments are the signal's number and `PID:START:UID` of each."""
    number, *processes = argv
    outcomes = [send(int(number), *map(int, one.split(":"))) for one in processes]
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
