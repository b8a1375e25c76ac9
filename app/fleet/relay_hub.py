"""A relay over one connection: the nodes it knows, their newest reports, and the ways to their agents.

Everything here blocks, within bounds. One thread takes the merged frames, and asks for each: what a busy console does
not ask for stays at the relay, where newer ones take its place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Self, cast

from agent.wire.codec import CONTROL_SOCKET, IncompatibleWireError, MalformedMessageError
from agent.wire.relay import (
    MAX_NODES,
    MERGED_SOCKET,
    NO_RELAY,
    NODES_DIR,
    Merged,
    Roster,
    RosterEntry,
    decode_roster,
)
from app.errors import AgentUnreachableError, HostUnreachableError, IncompatibleAgentError
from app.fleet.credit import PullCredit
from app.ssh.config import THIS_MACHINE
from app.ssh.connection import ForwardingRefusedError
from app.ssh.io_thread import JOIN_S
from app.ssh.transport import CHANNEL_ERRORS
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from app.fleet.agent_link import AgentLink, TakesFrame
    from app.ssh.io_thread import ByteChannel, RingingChannel

ROSTER_S = 15.0
"""From one frame of the roster to the next."""
MAX_ROSTER_WAITS = 8
"""A roster is some mebibytes at most, of which a slow link carries one frame at a time."""
CHUNK_BYTES = 65_536
MAX_ASKED = 4
"""Of its frames each may hold the reports of thirty nodes."""
HOW_TO_RELAY = "start it there: python -P -m agent relay --listen INTERFACE"


class RelayHub:
    """The connection to a relay; the `with` block closes it, and leaves relay and agents alone.

    Attributes:
        host: The machine that the relay runs on, as a person calls it.
        num_expected: How many nodes are to come, as far as anybody has told the relay; else 0.
        num_changes: How often what is known of nodes has changed: as long as it is the same, so are they.
    """

    def __init__(self, way: AgentLink, directory: str = "") -> None:
        """Make the near end.

        Args:
            way: To the relay's machine.
            directory: Of the relay there; empty is its usual one.
        """
        self.host = way.host
        self.num_expected = self.num_changes = 0
        self._way = way
        self._named_directory = directory
        self._directory = ""
        self._is_forwarded = True
        self._lock = threading.RLock()
        self._entries: dict[str, RosterEntry] = {}
        self._takers: dict[str, TakesFrame] = {}
        self._reading: tuple[ByteChannel, threading.Thread] | None = None
        self._has_roster = threading.Event()
        self._is_lost = False
        self._complaint = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Go there, and learn which nodes there are.

        Raises:
            HostUnreachableError: The relay's machine cannot be reached, or no relay serves there.
            IncompatibleAgentError: It speaks another version.
        """
        self._way.connect()
        self._begin()

    def reconnect(self, *, asks: bool = False) -> None:
        """Go there again, without a question unless somebody waits for one; raises as `connect`."""
        self._stop_reading()
        self._way.go_again(asks=asks)
        self._begin()

    def find(self) -> Roster:
        """Return what the relay says of itself; raises as `connect`."""
        return self._ask_roster()

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`."""
        self._way.forget_refusals()

    def close(self) -> None:
        """Let go of the relay; safe to call twice."""
        self._stop_reading()
        self._way.close()

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost, or the relay has ended."""
        return not self._is_lost and self._way.is_alive

    @property
    def is_here(self) -> bool:
        """The relay is on this machine, and its directory is within reach."""
        return self.host == THIS_MACHINE

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that the relay knows, or has known, in the order of their names' numbers."""
        with self._lock:
            return sorted(self._entries, key=natural)

    def entry(self, node: str) -> RosterEntry | None:
        """Return what the relay says of a node; None if it does not know it."""
        with self._lock:
            return self._entries.get(node)

    def follow(self, node: str, on_frame: TakesFrame) -> None:
        """Have the reports of a node go somewhere."""
        with self._lock:
            self._takers[node] = on_frame

    def directory_of(self, node: str) -> str:
        """Return where a node's command socket is, on the relay's machine."""
        return f"{self._directory}/{NODES_DIR}/{node}"

    @property
    def near_directory(self) -> Path:
        """A directory of this machine that is the console's own."""
        return self._way.directory

    def open_control(self, node: str) -> RingingChannel:
        """Connect to the command socket of a node's agent, on another machine.

        Raises:
            HostUnreachableError: The connection is lost, or the node is not there.
        """
        directory = self.directory_of(node)
        if self._is_forwarded:
            channel = self._way.open_socket(f"{directory}/{CONTROL_SOCKET}")
        else:
            channel = self._way.open_verb("proxy", "--dir", directory)
        return cast("RingingChannel", channel)  # as every one is that SSH opens

    def _begin(self) -> None:
        self._directory = self.find().dir
        channel = self._open_merged()
        reader = threading.Thread(target=self._read, args=(channel,), name="rankdeck-relay", daemon=True)
        self._has_roster.clear()
        with self._lock:
            self.num_changes += 1
            self._entries = {}  # this relay may be another one, which does not know yet who was known to the last
        self._is_lost, self._complaint = False, ""
        self._reading = (channel, reader)
        reader.start()
        if not self._receives_roster() or self._is_lost:
            self._stop_reading()
            raise HostUnreachableError(self.host, self._complaint or "the relay there does not say which nodes it has")

    def _receives_roster(self) -> bool:
        """Wait for the whole roster, as long as more of it comes; return whether it has come."""
        for _ in range(MAX_ROSTER_WAITS):
            num_before = self.num_changes
            if self._has_roster.wait(ROSTER_S) or self.num_changes == num_before:
                break
        return self._has_roster.is_set()

    def _ask_roster(self) -> Roster:
        where = ("--dir", self._named_directory) if self._named_directory else ()
        try:
            return decode_roster(self._way.ask_verb("roster", "--brief", *where))
        except AgentUnreachableError as error:
            if NO_RELAY not in str(error):
                raise
            where_text = f" in {clean(self._named_directory)}" if self._named_directory else ""
            raise HostUnreachableError(self.host, f"no relay serves there{where_text}", HOW_TO_RELAY) from error
        except IncompatibleWireError as error:
            raise IncompatibleAgentError(self.host, clean(str(error)), self._how_to_mend()) from error
        except MalformedMessageError as error:
            raise IncompatibleAgentError(self.host, clean(str(error), LINE_LIMIT), self._how_to_mend()) from error

    def _how_to_mend(self) -> str:
        return f"bring this console's there: rankdeck install {self.host}; then start the relay and the agents again"

    def _open_merged(self) -> ByteChannel:
        if self._is_forwarded:
            try:
                return self._way.open_socket(f"{self._directory}/{MERGED_SOCKET}")
            except ForwardingRefusedError:
                self._is_forwarded = False  # or the relay has ended just now, which the next attempt finds out
        return self._way.open_verb("roster", "--follow", "--dir", self._directory)

    def _read(self, channel: ByteChannel) -> None:
        """Take frames and ask for more, until the relay or the connection ends."""
        pull_credit = PullCredit(MAX_ASKED)
        try:
            channel.sendall(pull_credit.asks(time.monotonic()))
            while chunk := channel.recv(CHUNK_BYTES):
                for merged, way_s in pull_credit.feed(chunk, time.monotonic()):
                    self._take(merged, way_s)
                if asks := pull_credit.asks(time.monotonic()):
                    channel.sendall(asks)
        except MalformedMessageError as error:
            self._complaint = clean(str(error), LINE_LIMIT)
        except CHANNEL_ERRORS:
            pass  # as if it had ended
        finally:
            self._is_lost = True
            self._has_roster.set()
            with contextlib.suppress(*CHANNEL_ERRORS):
                channel.close()

    def _take(self, merged: Merged, way_s: float) -> None:
        with self._lock:
            self.num_expected = merged.num_expected
            self._entries.update((entry.node, entry) for entry in merged.nodes)
            self._forget_some()
            self.num_changes += bool(merged.nodes)
        for report in merged.reports:
            if (take := self._takers.get(report.node)) is not None:
                take(report.frame, way_s + report.age_ms / 1000)
        if merged.is_whole:
            self._has_roster.set()

    def _forget_some(self) -> None:
        """Know no more nodes than a relay does: those that nobody follows go, first of all those that are gone."""
        num = len(self._entries) - MAX_NODES
        if num > 0:
            spare = sorted(self._entries.keys() - self._takers.keys(), key=lambda node: self._entries[node].is_here)
            for node in spare[:num]:
                del self._entries[node]

    def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        channel, thread = reading
        with contextlib.suppress(*CHANNEL_ERRORS):
            channel.close()
        thread.join(JOIN_S)


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts `gpu2` before `gpu10`."""
    parts: list[tuple[int, str]] = []
    digits = ""
    for letter in [*name, ""]:
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, letter))
    return parts
