"""A link between two network namespaces that delays, loses and throttles: many kernels have no netem.

Two TAP devices, one in each namespace, and a process that carries frames from one to the other.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypedDict, Unpack

if TYPE_CHECKING:
    from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
"""Source: linux/if_tun.h."""
_CLONE_NEWNET = 0x40000000
MAX_QUEUED_S = 0.5
"""What a throttled link would carry later than that is lost."""
READY_S = 30.0


class Quality(TypedDict, total=False):
    """What a link does to what it carries; that of a link that is not poor is 0."""

    delay_s: float
    jitter_s: float
    lost_frac: float
    bytes_s: float
    is_mute: bool
    """Nothing that the host sends arrives."""
    is_deaf: bool
    """Nothing that is sent to the host arrives."""


class PoorLink:
    """A host's link, made of good quality."""

    def __init__(self, switch: str, port: str, netns: str, directory: Path) -> None:
        """Make `port` in the namespace of the switch and `eth0` in that of the host."""
        self._control = directory / "link.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, switch, port, netns, str(self._control)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise AssertionError(f"no link for {netns}: /dev/net/tun")

    def become(self, **quality: Unpack[Quality]) -> None:
        """Take another quality: what is not named is good."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
            control.sendto(json.dumps(quality).encode(), str(self._control))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._control.unlink(missing_ok=True)


def _open_tap(netns: str, name: str) -> int:
    """Make a device in a namespace, of which this process becomes a part."""
    namespace = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


class _Carrier:
    """Frames on their way between two devices; the first is the switch's."""

    def __init__(self, taps: tuple[int, int]) -> None:
        self.taps = taps
        self.quality: Quality = {}
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._free_s = [0.0, 0.0]

    @property
    def pause_s(self) -> float | None:
        return max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None

    def take(self, side: int) -> None:
        """Take what has come on one side."""
        quality = self.quality
        for _ in range(64):
            try:
                frame = os.read(self.taps[side], 65536)
            except OSError:  # nothing more, or the device is down
                return
            is_cut = quality.get("is_mute") if side else quality.get("is_deaf")
            if is_cut or random.random() < quality.get("lost_frac", 0.0):
                continue
            due_s = now_s = time.monotonic()
            if bytes_s := quality.get("bytes_s", 0.0):
                due_s = max(self._free_s[side], now_s) + len(frame) / bytes_s
                if due_s - now_s > MAX_QUEUED_S:
                    continue
                self._free_s[side] = due_s
            due_s += quality.get("delay_s", 0.0) + random.random() * quality.get("jitter_s", 0.0)
            self._number += 1
            heapq.heappush(self._queue, (due_s, self._number, 1 - side, frame))

    def give(self) -> None:
        """Give what is due to the other side."""
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(self._queue)
            try:
                os.write(self.taps[side], frame)
            except OSError:  # the device is down
                continue


def carry(switch: str, port: str, netns: str, control_path: str) -> None:
    """Carry frames until this process is killed."""
    carrier = _Carrier((_open_tap(switch, port), _open_tap(netns, "eth0")))
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(control_path)
    os.write(1, b"ready\n")
    poll = select.epoll()
    for fd in (*carrier.taps, control.fileno()):
        poll.register(fd, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll(carrier.pause_s):
            if fd == control.fileno():
                carrier.quality = json.loads(control.recv(4096))
            else:
                carrier.take(carrier.taps.index(fd))
        carrier.give()


if __name__ == "__main__":
    carry(*sys.argv[1:])
