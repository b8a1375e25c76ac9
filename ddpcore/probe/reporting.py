"""Decides when the probe samples and reports (`Pace`), and sends its reports to the agent's inbox (`ReportSocket`).

`Pace` has no clock: time is an argument. `ReportSocket` is a datagram socket; nothing in it blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from random import Random

TICK_S = 0.24
"""Mean seconds between samples while the rank works. Training empties the caches, and each line then costs four times
what it costs alone (tests/bench/bench_probe_cost.py)."""

TICK_SPREAD_S = 0.04
"""Random part of a tick in seconds: a step as long as a tick would be seen at one place only, and
the samples would claim that it spends all its time there."""

WAITING_TICK_S = 0.1
"""Seconds between samples while the rank waits: then it has time, and users want to know."""

SECOND_LOOK_S = 0.05
"""Seconds after which a pending operation is looked at again: what is over by then, as in training nearly every
collective is, costs no sample."""

SLOW_TICK_S = 2.5
"""Seconds between full dumps of the recorder while nothing is quiet, by the wall clock, so that the rings of all
ranks of a machine hold the same collectives when they are read."""

TICK_SLACK_S = 0.001
"""Seconds of a sample behind its tick, so that poll(), which rounds, does not wake before it."""

REPORT_SLACK_S = 0.02
"""Slack in seconds: a sample that comes a little early still sends its report, which would otherwise wait for the next
one."""


class Pace:
    """Times of the next sample, the next second look, the next report; all are due at first.

    `seed` is for the ticks' lengths. The generator is our own: watching must not change the program's.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 - nobody guesses it for gain
        self._sample_due_s = -math.inf
        self._second_look_s = math.inf
        self._report_due_s = -math.inf

    def hurry(self) -> None:
        """Make a sample and a report due immediately."""
        self._sample_due_s = self._report_due_s = -math.inf

    def is_sample_due(self, now_s: float) -> bool:
        """Return whether a sample is due, rather than a second look only."""
        return now_s >= self._sample_due_s

    def is_report_due(self, now_s: float) -> bool:
        """Return whether a report is due, though nothing has changed."""
        return now_s >= self._report_due_s

    def begin_sample(self, now_s: float) -> None:
        self._sample_due_s = now_s + TICK_S
        self._second_look_s = math.inf

    def end_sample(self, now_s: float, wall_s: float, *, is_pending: bool, is_waiting: bool) -> None:
        """Plan what follows a sample.

        `wall_s` are seconds of the wall clock: no sample goes past a tick of all ranks. `is_pending`: something is
        called and not over. `is_waiting`: it is known to be a wait.
        """
        to_tick_s = SLOW_TICK_S - wall_s % SLOW_TICK_S + TICK_SLACK_S
        self._sample_due_s = now_s + (min(WAITING_TICK_S, to_tick_s) if is_waiting else self._tick_s(to_tick_s))
        self._second_look_s = now_s + SECOND_LOOK_S if is_pending and not is_waiting else math.inf

    def reported(self, now_s: float) -> None:
        self._report_due_s = now_s + TICK_S - TICK_SPREAD_S - REPORT_SLACK_S

    def looked_again(self) -> None:
        """Take the second look as done: it makes a sample, or waits until the sample is due."""
        self._second_look_s = math.inf

    def pause_s(self, now_s: float) -> float:
        """Return the time in seconds until the next sample, look or report."""
        return max(0.0, min(self._sample_due_s, self._second_look_s) - now_s)

    def _tick_s(self, to_tick_s: float) -> float:
        """Return the time to the next sample of a rank that works: at most to the next tick of all ranks."""
        shortest_s, longest_s = TICK_S - TICK_SPREAD_S, TICK_S + TICK_SPREAD_S
        if to_tick_s <= longest_s:
            return to_tick_s
        if to_tick_s < 2 * longest_s:
            # Two ticks lead up to the beat; both are whole ones where that can be, since a short one costs as much.
            shortest_s, longest_s = max(shortest_s, to_tick_s - longest_s), min(longest_s, to_tick_s - shortest_s)
            if shortest_s >= longest_s:
                return to_tick_s / 2
        return shortest_s + (longest_s - shortest_s) * self._random.random()


def tick_of(wall_s: float) -> int:
    """Return the number of the tick, which is the same on all ranks of a machine."""
    return int(wall_s / SLOW_TICK_S)


class ReportSocket:
    """The probe's end of the connection to the agent's inbox, which need not exist yet.

    It is connected: the kernel then need not find the inbox by its path each time, a quarter of what a report costs to
    send.
    """

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    @property
    def fd(self) -> int:
        """Its descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def let_go(self) -> None:
        """Forget the descriptor without closing it."""
        self._socket.detach()

    def send(self, datagram: bytes) -> bool:
        """Send a datagram, and return whether the inbox has taken it: there may be no agent, or a full inbox."""
        try:
            self._socket.send(datagram)
        except OSError:
            # Not connected yet, or to an agent that is gone: another one may have come in its place.
            with contextlib.suppress(OSError):
                self._socket.connect(self._inbox)
                self._socket.send(datagram)
                return True
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def file_of(fd: int) -> tuple[int, int] | None:
    """Return what distinguishes the file of a descriptor from others; None where that is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino
