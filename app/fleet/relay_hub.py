"""A relay over one connection: the nodes it knows, their latest reports, and the channels to their agents.

Everything here blocks, within bounds. Frames are taken in the thread of a `ReportReader`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET, IncompatibleWireError, MalformedMessageError
from agent.wire.relay import (
    MAX_NODES,
    MAX_REPLY_BYTES,
    NO_RELAY,
    NODES_DIR,
    REQUEST_PREFIX,
    Merged,
    Roster,
    RosterEntry,
    decode_roster,
)
from app.errors import AgentUnreachableError, HostKeyError, HostUnreachableError, IncompatibleAgentError, SessionError
from app.fleet.report_reader import ReportReader
from app.ssh.config import THIS_MACHINE
from app.ssh.tunnel import Tunnel
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.errors import AppError
    from app.fleet.agent_link import AgentLink, TakesFrame
    from app.ssh.io_thread import RingingChannel

ROSTER_S = 15.0
"""Seconds from one frame of the roster to the next."""
MAX_ROSTER_WAITS = 8
"""Periods of `ROSTER_S` for the whole roster of some mebibytes at most; a slow link carries one frame at a time."""
HOW_TO_RELAY = "start it there: python -P -m agent relay --listen INTERFACE"


class RelayHub:
    """The connection to a relay; the `with` block closes it, and leaves relay and agents alone.

    Attributes:
        host: Machine that the relay runs on, as the user typed it.
        is_forwarded: True; the way there has its own.
        num_expected: Number of nodes that the relay expects; 0 if it does not know.
        num_changes: Number of changes to the known nodes: while it is the same, so are they.
    """

    def __init__(
        self, way: AgentLink, directory: str = "", why_gone: Callable[[], AppError | None] = lambda: None
    ) -> None:
        """Make the local end.

        Args:
            way: Link to the relay's machine.
            directory: Directory of the relay there; empty is its usual one.
            why_gone: Returns why no relay serves there, or nobody gets there, where somebody else knows that; called in
                any thread, and may block for seconds.
        """
        self.host = way.host
        self.is_forwarded = True
        self.num_expected = self.num_changes = 0
        self._way = way
        self._named_directory = directory
        self._why_gone = why_gone
        self._directory = ""
        self._lock = threading.RLock()
        self._entries: dict[str, RosterEntry] = {}
        self._takers: dict[str, TakesFrame] = {}
        self._reader: ReportReader | None = None
        self._tunnel: Tunnel | None = None
        self._has_roster = threading.Event()
        self._is_lost = self._is_closed = False
        self._complaint = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connect to the relay, and read which nodes there are.

        Raises:
            HostUnreachableError: The relay's machine cannot be reached, or no relay serves there.
            IncompatibleAgentError: It speaks another version.
        """
        with self._explained():
            self._way.connect()
            self._begin()

    def reconnect(self, *, asks: bool = False) -> None:
        """Connect again, without a question unless a user waits for one; raises as `connect`."""
        self._stop_reading()
        with self._explained():
            self._way.go_again(asks=asks)
            self._begin()

    def find(self) -> Roster:
        """Return the relay's roster; raises as `connect`."""
        with self._explained():
            return self._ask_roster()

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`."""
        self._way.forget_refusals()

    def close(self) -> None:
        """Disconnect from the relay; safe to call twice."""
        with self._lock:
            self._is_closed = True
            tunnel, self._tunnel = self._tunnel, None
        self._stop_reading()
        if tunnel is not None:
            tunnel.close()
        self._way.close()

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost, or the relay has ended."""
        return not self._is_lost and self._way.is_alive

    @property
    def is_here(self) -> bool:
        """Whether the relay is on this machine, and its directory is within reach."""
        return self.host == THIS_MACHINE

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that the relay knows, or has known, sorted by the numbers in their names."""
        with self._lock:
            return sorted(self._entries, key=natural)

    def entry(self, node: str) -> RosterEntry | None:
        """Return the relay's entry of a node; None if it does not know it."""
        with self._lock:
            return self._entries.get(node)

    def follow(self, node: str, on_frame: TakesFrame) -> None:
        """Pass the reports of a node to `on_frame`."""
        with self._lock:
            self._takers[node] = on_frame

    def directory_of(self, node: str) -> str:
        """Return the directory of a node's command socket, on the relay's machine."""
        return f"{self._directory}/{NODES_DIR}/{node}"

    @property
    def near_directory(self) -> Path:
        """Directory of the console's own on this machine."""
        return self._way.directory

    def open_control(self, node: str) -> RingingChannel:
        """Connect to the command socket of a node's agent, on another machine.

        Raises:
            HostUnreachableError: The connection is lost, or the node is not there.
        """
        return self._way.open_in(self.directory_of(node), CONTROL_SOCKET)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise why the relay is gone, where that is known, instead of what is met on the way to it.

        A host with another key stays one, whatever is known of a relay.
        """
        try:
            yield
        except HostKeyError:
            raise
        except HostUnreachableError as error:
            if self._is_closed or (why := self._why_gone()) is None:
                raise
            raise why from error

    def _begin(self) -> None:
        self._directory = self._ask_roster().dir
        self._has_roster.clear()
        with self._lock:
            self.num_changes += 1
            self._entries = {}  # a new relay need not know the nodes of the last one
        self._is_lost, self._complaint = False, ""
        paths = {self.host: self._reports_path()}
        reader = ReportReader(paths, self._take_frame, self._take_malformed, self._lose)
        with self._lock:
            self._check_open()
            self._reader = reader
        reader.start()
        if not self._receives_roster() or self._is_lost:
            self._stop_reading()
            raise HostUnreachableError(self.host, self._complaint or "the relay there does not list its nodes")

    def _reports_path(self) -> Path:
        """Return the path of the relay's reports socket on this machine; over SSH it is a tunnel's."""
        if self.is_here:
            return Path(self._directory) / REPORTS_SOCKET
        path = self.near_directory / REPORTS_SOCKET
        if self._tunnel is None:
            try:
                tunnel = Tunnel(path, self._open_reports, MAX_REPLY_BYTES, REQUEST_PREFIX)
            except OSError as error:
                raise SessionError(f"no socket for {self.host} can be opened here: {error.strerror}") from error
            with self._lock:
                if not self._is_closed:
                    self._tunnel = tunnel
            if self._tunnel is None:
                tunnel.close()
        return path

    def _check_open(self) -> None:
        if self._is_closed:
            raise HostUnreachableError(self.host, "the connection to its relay is closed")

    def _open_reports(self) -> RingingChannel:
        return self._way.open_in(self._directory, REPORTS_SOCKET)

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

    def _take_frame(self, _host: str, merged: Merged, way_s: float) -> None:
        self._take(merged, way_s)

    def _take_malformed(self, host: str, error: MalformedMessageError) -> None:
        self._complaint = clean(str(error), LINE_LIMIT)
        self._lose(host)

    def _lose(self, _host: str) -> None:
        self._is_lost = True
        self._has_roster.set()

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
        """Keep no more nodes than a relay does: nodes that nobody follows are dropped, those that are gone first."""
        num = len(self._entries) - MAX_NODES
        if num > 0:
            spare = sorted(self._entries.keys() - self._takers.keys(), key=lambda node: self._entries[node].is_here)
            for node in spare[:num]:
                del self._entries[node]

    def _stop_reading(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `gpu2` before `gpu10`."""
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
