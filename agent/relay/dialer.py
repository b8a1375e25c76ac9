"""An agent's side of a relay: to the agent what a console on this machine is, to the relay a node.

It runs in the agent's loop and opens no port. It looks for the invitation until there is one, and for a newer one as
long as it lives, so that relays may start, end and restart at any time.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.errors import OperatorError, StateDirError, log_line
from agent.relay.bridge import StreamBridge
from agent.relay.relay_dir import Invitation, expected_nodes, read_invitation
from agent.service.agent_info import own
from agent.slow_reader import SlowReader
from agent.transport.command_socket import channel_address
from agent.transport.relay_sockets import DialSocket
from agent.wire.codec import CONTROL_SOCKET, MalformedMessageError
from agent.wire.relay import (
    HEARTBEAT_S,
    SILENT_S,
    Credit,
    Data,
    End,
    Farewell,
    FromNode,
    Hello,
    NotWelcome,
    OfStream,
    Open,
    RelayHeartbeat,
    Report,
    Reset,
    Take,
    Welcome,
    WhoAreYou,
    decode_from_relay,
    encode_relay_message,
)
from agent.wire.relay import RELAY_VERSION as VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agent.transport.subscribers import NodeReports

MAX_STREAMS = 32
"""Streams of consoles at one agent, which itself takes 64 connections."""
LOOK_S = 0.5
"""Seconds between two looks at what is due."""
STALE_S = 30.0
"""An answer about the invitation that is older counts for nothing: its file system is gone."""
COME_S = 180.0
"""Seconds for a relay's first word, where its end matters: it may start later than the agents, from a slow disk."""
AWAY_S = 60.0
"""Seconds without a word of a relay after which it counts as ended, where that matters and no job is under way."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
UNWATCHED_S = 5.0
"""Seconds without a request after which no console watches, and the agent counts no subscriber any more."""
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class _Look(NamedTuple):
    invitation: Invitation | None
    trouble: str


class Dialer:
    """Keeps an agent known to a relay, from `run` until that is cancelled; lives on the agent's loop."""

    def __init__(
        self, invitation: Path, directory: Path, node: str, epoch: str, reports: NodeReports, environ: Mapping[str, str]
    ) -> None:
        """Make the dialer of an agent that serves already in a directory.

        Raises:
            OperatorError: A relay cannot call a node by its name.
            StateDirError: The invitation is there, and is not fit to be used.
        """
        if not _NODE_NAME.fullmatch(node):
            raise OperatorError(f"a relay cannot call a node {node!r}: name it by serve --node, with A-Z a-z 0-9 . _ -")
        read_invitation(invitation)
        self._path = invitation
        self._directory = directory
        self._hello = Hello(
            version=VERSION,
            node=node,
            instance=epoch,
            place=msgspec.json.encode(own(directory, node, epoch)),
            num_expected=expected_nodes(environ),
        )
        self._reader: SlowReader[_Look] = SlowReader("rankdeck-invitation", stale_s=STALE_S)
        self._socket: DialSocket | None = None
        self._lost: asyncio.Future[str] | None = None
        self._bridges: dict[int, StreamBridge] = {}
        self._reports = reports
        self._kept: tuple[bytes, float] | None = None
        """The latest report that was not sent, and when it came."""
        self._wanted_at_s: float | None = None
        self._received_at_s = self._asked_at_s = self._greeted_at_s = self._spoke_at_s = 0.0
        self._is_welcome = False
        self._last_notice = ""
        self.on_relay_end: Callable[[str], None] | None = None
        """Called with the reason once the relay has ended, or was away for `AWAY_S`; None dials on without end."""
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether a job is under way, which a relay that is only away must not end."""
        self._away_since_s = time.monotonic() + COME_S - AWAY_S

    async def run(self) -> None:
        """Dial and dial again; it ends by being cancelled, or once it has called `on_relay_end`."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                invitation = await self._next_invitation(f"waits for the invitation {self._path}")
                if invitation is None:
                    return
                why = await self._stay(invitation)
                if self._reported_end():
                    return
                pause_s = FIRST_PAUSE_S if self._is_welcome else pause_s
                if why:
                    self._log(f"the relay at {invitation.address} port {invitation.port}: {why}; it is tried again")
                    await self._pause(pause_s, invitation)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._reader.close()

    async def _next_invitation(self, waiting: str) -> Invitation | None:
        """Return the invitation once there is one; None when nobody waits for one any more."""
        while True:
            look = self._look()
            if look is not None and (look.invitation is not None or self._reported_end()):
                return look.invitation
            if look is not None:
                self._log(look.trouble or waiting)
            await asyncio.sleep(LOOK_S)

    def _reported_end(self) -> bool:
        """Return whether the relay counts as ended; its end is reported then."""
        if self.on_relay_end is None or time.monotonic() < self._away_since_s + AWAY_S:
            return False
        if self._away_since_s > -math.inf and self.is_busy():
            return False
        self.on_relay_end(f"the relay of {self._path} has ended")
        return True

    async def _pause(self, pause_s: float, invitation: Invitation) -> None:
        """Wait, unless another relay has begun while this waits."""
        looks = round(pause_s / LOOK_S * (0.75 + secrets.randbelow(500) / 1000))  # not all agents at once
        for _ in range(max(1, looks)):
            await asyncio.sleep(LOOK_S)
            if self._is_replaced(invitation):
                return

    def _is_replaced(self, invitation: Invitation) -> bool:
        look = self._look()
        return look is not None and look.invitation not in {None, invitation}

    def _look(self) -> _Look | None:
        """Return what the last look at the invitation saw, and have another one begin."""
        self._reader.ask(self._path, lambda: _look_at(self._path))
        return self._reader.last(self._path)

    async def _stay(self, invitation: Invitation) -> str:
        """Be a relay's node for as long as it lasts; return why it was over, nothing if another relay has begun."""
        self._lost = asyncio.get_running_loop().create_future()
        self._is_welcome = False
        self._received_at_s = time.monotonic()
        try:
            self._socket = DialSocket(
                invitation.address, invitation.port, invitation.relay_key, invitation.key, self._take_frame
            )
        except OSError as error:
            return f"it cannot be dialled: {error.strerror}"
        is_farewell = False
        try:
            self._greet()
            while not self._lost.done():
                await asyncio.wait([self._lost], timeout=LOOK_S)
                if self._is_replaced(invitation):
                    return ""
                self._do_what_is_due(time.monotonic())
            return self._lost.result()
        except asyncio.CancelledError:  # the agent ends; who only leaves this relay does not
            is_farewell = self._is_welcome and self._send(Farewell())
            raise
        finally:
            self._let_go()
            self._socket.close(sends_farewell=is_farewell)
            self._socket = None

    def _do_what_is_due(self, now_s: float) -> None:
        if now_s - self._received_at_s > SILENT_S:
            self._lose("it sends nothing")
        if now_s - self._spoke_at_s >= HEARTBEAT_S:
            self._send(RelayHeartbeat())
        if self._reports.follower is not None and self._wanted_at_s is None and now_s - self._asked_at_s > UNWATCHED_S:
            self._unfollow()

    def _greet(self) -> None:
        self._let_go()
        self._greeted_at_s = time.monotonic()
        self._send(self._hello)

    def _let_go(self) -> None:
        """End what was for a relay that knows nothing of it any more."""
        for bridge in list(self._bridges.values()):
            bridge.close(notifies_peer=False)
        self._unfollow()
        self._wanted_at_s = None

    def _unfollow(self) -> None:
        self._reports.follower = self._kept = None

    def _lose(self, why: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(why)

    def _send(self, message: FromNode) -> bool:
        if self._socket is None:
            return False
        is_sent = self._socket.send(encode_relay_message(message))
        self._spoke_at_s = time.monotonic()
        if not is_sent:
            self._lose("it takes nothing any more")
        return is_sent

    def _take_frame(self, frame: bytes) -> None:
        now_s = time.monotonic()
        try:
            message = decode_from_relay(frame)
        except MalformedMessageError as error:
            self._lose(str(error)[:200])
            return
        self._received_at_s = self._away_since_s = now_s
        match message:
            case Welcome():
                self._is_welcome = True
                self._log(f"known to the relay as {self._hello.node}")
            case NotWelcome(why=why):
                self._lose(why)
            case WhoAreYou():
                if now_s - self._greeted_at_s > LOOK_S:
                    self._greet()
            case Take():
                self._wanted(now_s)
            case Farewell():
                self._is_welcome = False  # nobody hears a farewell of ours
                self._away_since_s = -math.inf
                self._lose("it has ended")
            case Open() | Data() | Credit() | End() | Reset():
                self._take_of_stream(message)

    def _take_of_stream(self, message: Open | OfStream) -> None:
        if isinstance(message, Open):
            self._open_stream(message.stream, message.who)
        elif (bridge := self._bridges.get(message.stream)) is not None:
            bridge.take(message)

    def _wanted(self, now_s: float) -> None:
        self._wanted_at_s = self._asked_at_s = now_s
        self._reports.follower = self._reported
        self._send_report()

    def _reported(self, frame: bytes) -> None:
        self._kept = (frame, time.monotonic())
        self._send_report()

    def _send_report(self) -> None:
        if self._wanted_at_s is None or self._kept is None:
            return
        (frame, came_at_s), now_s = self._kept, time.monotonic()
        held_ms, age_ms = int((now_s - self._wanted_at_s) * 1000), int((now_s - came_at_s) * 1000)
        self._wanted_at_s = self._kept = None
        self._send(Report(age_ms, held_ms, frame))

    def _open_stream(self, number: int, who: str) -> None:
        if len(self._bridges) >= MAX_STREAMS:
            self._send(Reset(number))
            return
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            near.bind(channel_address(f"relay: {who}"))
            near.connect(str(self._directory / CONTROL_SOCKET))
        except OSError:
            near.close()
            self._send(Reset(number))
            return
        bridge = self._bridges[number] = StreamBridge(near, number, self._send, self._stream_over)
        bridge.start()

    def _stream_over(self, number: int) -> None:
        self._bridges.pop(number, None)

    def _log(self, text: str) -> None:
        if text != self._last_notice:
            self._last_notice = text
            log_line(text)


def _look_at(path: Path) -> _Look:
    try:
        return _Look(read_invitation(path), "")
    except StateDirError as error:
        return _Look(None, str(error))
