"""The relay: agents dial it, consoles on its machine find all of their nodes in its directory.

It decides little: `agent.relay.roster` decides who is let in, `agent.transport.latest_reports` what a console has not
seen. What it keeps is bounded by the number of nodes, whatever any peer sends or does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from agent.errors import AgentError, log_line
from agent.relay.bridge import StreamBridge
from agent.relay.relay_dir import Invitation, write_invitation
from agent.relay.roster import Known, LetIn, Roster
from agent.transport.command_socket import peer_of
from agent.transport.latest_reports import LatestReports
from agent.transport.subscribers import ReportSubscribers
from agent.wire.codec import REPORTS_SOCKET, MalformedMessageError
from agent.wire.relay import (
    HEARTBEAT_S,
    Farewell,
    FromNode,
    FromRelay,
    Hello,
    NotWelcome,
    Open,
    RelayHeartbeat,
    Report,
    RosterEntry,
    Take,
    Welcome,
    WhoAreYou,
    decode_from_node,
    encode_relay_message,
    known_node,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.relay.relay_dir import RelayDir
    from agent.transport.relay_sockets import RelaySocket
    from agent.wire.relay import OfStream

LOOK_S = 1.0
"""Seconds between two looks at who is silent."""
MAX_KEPT_BYTES = 1 << 30
"""Bytes of all reports; they are usually some kilobytes each, and may be a mebibyte."""
MAX_STREAMS_A_NODE = 32
COMPLAINT_S = 60.0
"""Seconds between two complaints about what makes no sense."""
MAX_LAST_TURNS = 8
"""Turns of the loop in which a peer that takes nothing is still read: twice what is kept of what it sends."""
LOST = "the connection to it is lost"
_TAKE, _HEARTBEAT, _WHO = (encode_relay_message(message) for message in (Take(), RelayHeartbeat(), WhoAreYou()))


class _Stream(NamedTuple):
    node: str
    bridge: StreamBridge


class Relay:
    """Serves from `run` until `end_soon`."""

    def __init__(self, directory: RelayDir, relay_socket: RelaySocket, address: str, num_expected: int) -> None:
        """`directory` is open, and `relay_socket` bound to the address."""
        self.name = secrets.token_hex(8)
        """Random name of this process."""
        self._directory = directory
        self._relay_socket = relay_socket
        self._address = address
        self._roster = Roster(num_expected)
        self._latest = LatestReports()
        self._subscribers = ReportSubscribers(
            str(directory.path / REPORTS_SOCKET),
            self._latest,
            self.name,
            lambda: self._roster.num_expected,
            self._watched,
        )
        self._asked_at_s: dict[bytes, float] = {}
        """When each peer was asked for the report that it owes."""
        self._listeners: dict[str, socket.socket] = {}
        self._streams: dict[int, _Stream] = {}
        self._num_streams = 0
        self._num_odd = 0
        self._complained_at_s = -COMPLAINT_S
        self._end = asyncio.Event()
        self._host = socket.gethostname()
        self._user = ""
        with contextlib.suppress(KeyError):  # a container's user may have no name
            self._user = pwd.getpwuid(os.geteuid()).pw_name

    def end_soon(self) -> None:
        """Begin to end."""
        self._end.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until `end_soon`; `on_ready` is called once the invitation is there.

        Raises:
            OSError: A socket or a file cannot be made.
        """
        try:
            self._subscribers.open()
            self._relay_socket.open(self._take, self._take_odd)
            write_invitation(self._directory.invitation, self._invitation())
            on_ready()
            ticking = asyncio.create_task(self._tick())
            await self._end.wait()
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
        finally:
            await self._close()

    def _invitation(self) -> Invitation:
        key = self._relay_socket.node_key
        return Invitation(
            address=self._address,
            port=self._relay_socket.port,
            relay_key=self._relay_socket.public_key,
            node_key=key.public,
            node_secret=key.secret.decode(),
            relay=self.name,
        )

    async def _close(self) -> None:
        for peer in self._roster.peers:
            self._send_to(peer, Farewell())
        for node in list(self._listeners):
            self._close_node(node)
        self._subscribers.close()
        self._relay_socket.close()

    async def _tick(self) -> None:
        heartbeat_at_s = 0.0
        while True:
            now_s = time.monotonic()
            self._subscribers.forget_away()
            with contextlib.suppress(MemoryError):  # of a moment: libzmq is about to drop who has sent so much
                for known in self._roster.silent(now_s):
                    self._gone(known, "nothing has come from it")
                if now_s - heartbeat_at_s >= HEARTBEAT_S:
                    heartbeat_at_s = now_s
                    for peer in self._roster.peers:
                        self._send(peer, _HEARTBEAT)
            await asyncio.sleep(LOOK_S)

    def _take(self, peer: bytes, frame: bytes) -> None:
        """Take a message of an agent, or of whoever has the key."""
        now_s = time.monotonic()
        try:
            message = decode_from_node(frame)
        except MalformedMessageError:
            self._take_odd()
            return
        if isinstance(message, Hello):
            self._hello(peer, message, now_s)
            return
        known = self._roster.mark_seen(peer, now_s)
        if known is None:
            if not isinstance(message, Farewell):
                self._relay_socket.send(peer, _WHO)
            return
        self._latest.mark_seen(known.node, now_s)
        self._take_of(known, message, now_s)

    def _take_of(self, known: Known, message: FromNode, now_s: float) -> None:
        match message:
            case Report():
                self._report(known, message, now_s)
            case RelayHeartbeat() | Hello():
                pass
            case Farewell():
                self._gone(known, "its agent has ended", has_ended=True)
            case _:
                stream = self._streams.get(message.stream)
                if stream is not None and stream.node == known.node:
                    stream.bridge.take(message)

    def _take_odd(self) -> None:
        self._num_odd += 1
        now_s = time.monotonic()
        if now_s - self._complained_at_s >= COMPLAINT_S:
            self._complained_at_s = now_s
            log_line(f"{self._num_odd} messages so far were not those of an agent of this version: they are left out")

    def _report(self, known: Known, report: Report, now_s: float) -> None:
        asked_at_s = self._asked_at_s.pop(known.peer, None)
        if asked_at_s is None:
            return  # nobody has asked: it may say it as often as it likes
        on_the_way_s = max(0.0, now_s - asked_at_s - report.held_ms / 1000)
        if self._latest.num_bytes + len(report.frame) <= MAX_KEPT_BYTES:
            self._latest.put_report(known.node, report.frame, now_s - on_the_way_s - report.age_ms / 1000)
            self._subscribers.send_news()
        self._ask(known.peer)

    def _ask(self, peer: bytes) -> None:
        """Ask for the next report, if a console watches."""
        if self._subscribers.is_watched and peer not in self._asked_at_s:
            self._asked_at_s[peer] = time.monotonic()
            self._send(peer, _TAKE)

    def _watched(self) -> None:
        if not self._subscribers.is_watched:
            self._latest.forget_reports()
            return
        for peer in self._roster.peers:
            self._ask(peer)

    def _hello(self, peer: bytes, hello: Hello, now_s: float) -> None:
        entry = RosterEntry(hello.node, is_here=True, place=hello.place)
        try:
            known_node(entry)  # consoles will read what it says
        except MalformedMessageError as error:
            self._send_to(peer, NotWelcome(f"the relay cannot serve it: {error}"[:1000]))
            return
        answer = self._roster.hello(peer, hello, now_s)
        if not isinstance(answer, LetIn) and answer.in_the_way is not None and not self._lives(answer.in_the_way):
            answer = self._roster.hello(peer, hello, now_s)
        if not isinstance(answer, LetIn):
            self._send_to(peer, NotWelcome(answer.why))
            return
        if answer.instead_of is not None:
            self._let_go_of(answer.instead_of)
        try:
            self._listen_for(hello.node)
        except (OSError, AgentError) as error:
            self._roster.forget(peer)
            self._send_to(peer, NotWelcome(f"the relay cannot serve it: {error}"[:1000]))
            return
        self._asked_at_s.pop(peer, None)
        if forgotten := self._latest.put_node(entry, now_s):
            self._directory.remove(forgotten)
        self._subscribers.send_news()
        self._send_to(peer, Welcome())
        self._ask(peer)

    def _lives(self, known: Known) -> bool:
        """Return whether there is still a connection to an agent; one that has none is gone from now on."""
        if self._relay_socket.send(known.peer, _HEARTBEAT):
            return True
        self._gone(known, LOST)
        return False

    def _gone(self, known: Known, why: str, *, has_ended: bool = False) -> None:
        self._roster.forget(known.peer)
        self._let_go_of(known)
        self._close_node(known.node)
        entry = RosterEntry(known.node, is_here=False, why=why, place=known.hello.place, has_ended=has_ended)
        self._latest.put_node(entry, known.received_at_s)
        self._subscribers.send_news()

    def _let_go_of(self, known: Known) -> None:
        self._asked_at_s.pop(known.peer, None)
        for stream in [stream for stream in self._streams.values() if stream.node == known.node]:
            stream.bridge.close(notifies_peer=False)

    def _send_to(self, peer: bytes, message: FromRelay) -> bool:
        return self._send(peer, encode_relay_message(message))

    def _send(self, peer: bytes, frame: bytes) -> bool:
        """Send something; a peer that takes nothing is gone, once its last message is read: it may be the reason."""
        is_sent = self._relay_socket.send(peer, frame)
        if not is_sent:
            asyncio.get_running_loop().call_soon(self._lose, peer, MAX_LAST_TURNS)
        return is_sent

    def _lose(self, peer: bytes, num_turns_left: int) -> None:
        if self._relay_socket.is_behind and num_turns_left:
            asyncio.get_running_loop().call_soon(self._lose, peer, num_turns_left - 1)
        elif (known := self._roster.by_peer(peer)) is not None:
            self._gone(known, LOST)

    def _listen_for(self, node: str) -> None:
        if node in self._listeners:
            return
        server = self._directory.listen_for(node)
        self._listeners[node] = server
        asyncio.get_running_loop().add_reader(server.fileno(), self._accept, node)

    def _close_node(self, node: str) -> None:
        if (server := self._listeners.pop(node, None)) is not None:
            asyncio.get_running_loop().remove_reader(server.fileno())
            server.close()
            self._directory.forget(node)

    def _stream_over(self, number: int) -> None:
        self._streams.pop(number, None)

    def _accept(self, node: str) -> None:
        known = self._roster.find(node)
        try:
            near, _ = self._listeners[node].accept()
        except OSError:
            return
        near.setblocking(False)  # noqa: FBT003 - as it is called
        peer = peer_of(near)
        streams = sum(stream.node == node for stream in self._streams.values())
        if known is None or peer.uid != os.geteuid() or streams >= MAX_STREAMS_A_NODE:
            near.close()
            return
        self._num_streams += 1
        number = self._num_streams

        def send(message: OfStream) -> bool:
            return self._send_to(known.peer, message)

        bridge = StreamBridge(near, number, send, self._stream_over)
        self._streams[number] = _Stream(node, bridge)
        who = f"{self._user or peer.uid}@{self._host}, {peer.process} {peer.pid}"
        if not self._send_to(known.peer, Open(number, who[:64])):
            bridge.close(notifies_peer=False)
            return
        bridge.start()
