"""The latest report of every node, and what a console has not seen of it yet. Pure.

Nothing is kept for a console but which version of each node it was sent last: a slow one finds the latest of all, a
quick one gets each change, and neither costs the other anything. Nodes that were sent longest ago come first, so that
a console that is too slow for all of them still gets all of them in turn; which nodes there are comes before what
they report, so that it knows them all however much they report.
"""

from __future__ import annotations

import msgspec

from agent.wire.relay import MAX_NODES, MERGED_BYTES, Merged, MergedReport, RosterEntry

ENTRY_BYTES = 160
"""Bytes of a node in a frame, name and keys, beside its place or its report."""


class _Node(msgspec.Struct):
    entry: RosterEntry
    entry_version: int
    received_at_s: float
    frame: bytes = b""
    report_version: int = 0
    as_of_s: float = 0.0


class LatestReports:
    """All that a relay knows of its nodes; times are of its own clock.

    Attributes:
        num_bytes: Bytes of the reports that are kept.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._version = 0
        self.num_bytes = 0

    @property
    def version(self) -> int:
        """Number of the latest change."""
        return self._version

    @property
    def names(self) -> list[str]:
        """Every node that is there, or was."""
        return list(self._nodes)

    def put_node(self, entry: RosterEntry, now_s: float) -> str:
        """Take that a node has come, or gone; its reports are of the past then.

        Returns:
            The node that was gone longest, if it had to be forgotten to make room; else nothing.
        """
        self._forget_report(entry.node)
        forgotten = self._longest_gone() if entry.node not in self._nodes and len(self._nodes) >= MAX_NODES else ""
        if forgotten:
            self.forget_node(forgotten)
        self._version += 1
        self._nodes[entry.node] = _Node(entry, self._version, now_s)
        return forgotten

    def _longest_gone(self) -> str:
        gone = (known for known in self._nodes.values() if not known.entry.is_here)
        longest = min(gone, key=lambda known: known.received_at_s, default=None)
        return longest.entry.node if longest is not None else ""

    def mark_seen(self, node: str, now_s: float) -> None:
        """Take that a node lives."""
        self._nodes[node].received_at_s = now_s

    def put_report(self, node: str, frame: bytes, as_of_s: float) -> None:
        """Take the latest report of a node that is there."""
        known = self._nodes[node]
        self._version += 1
        self.num_bytes += len(frame) - len(known.frame)
        known.frame, known.report_version, known.as_of_s = frame, self._version, as_of_s

    def forget_reports(self) -> None:
        """Let go of all reports: nobody watches, and what is kept grows old."""
        for node in self._nodes:
            self._forget_report(node)

    def forget_node(self, node: str) -> None:
        """Know nothing of a node any more."""
        self._forget_report(node)
        self._nodes.pop(node, None)

    def entry(self, node: str, now_s: float) -> RosterEntry:
        """Return a node's entry."""
        known = self._nodes[node]
        return msgspec.structs.replace(known.entry, silent_ms=_ms(now_s - known.received_at_s))

    def entry_since(self, node: str, version: int, now_s: float) -> tuple[int, RosterEntry] | None:
        """Return a node's entry, and its version; None where that is known."""
        known = self._nodes[node]
        return (known.entry_version, self.entry(node, now_s)) if known.entry_version > version else None

    def report_since(self, node: str, version: int, now_s: float) -> tuple[int, MergedReport] | None:
        """Return a node's latest report, and its version; None where there is none or it is known."""
        known = self._nodes[node]
        if not known.frame or known.report_version <= version:
            return None
        return known.report_version, MergedReport(node, _ms(now_s - known.as_of_s), known.frame)

    def _forget_report(self, node: str) -> None:
        if (known := self._nodes.get(node)) is not None:
            self.num_bytes -= len(known.frame)
            known.frame = b""


class ReportSubscriber:
    """A console, and what it was sent.

    Attributes:
        is_behind: Its last frame was cut: there was more than fits into one.
    """

    def __init__(self, latest: LatestReports, relay: str) -> None:
        self.is_behind = False
        self._latest = latest
        self._relay = relay
        self._entries: dict[str, int] = {}
        """Version of each node that was sent last."""
        self._reports: dict[str, int] = {}
        """Version of each node's report that was sent last, those sent longest ago first."""
        self._seen_version = -1

    @property
    def has_news(self) -> bool:
        """Whether there may be something new for this console."""
        return self.is_behind or self._latest.version > self._seen_version

    def take(self, asked: int, held_ms: int, num_expected: int, now_s: float) -> Merged | None:
        """Return the next frame, None if there is nothing that this console does not know."""
        is_first = self._seen_version < 0
        self._seen_version, self.is_behind = self._latest.version, False
        nodes, num_bytes = self._new_nodes(now_s)
        is_whole = not self.is_behind
        reports = self._new_reports(MERGED_BYTES - num_bytes, now_s) if is_whole else []
        if not (nodes or reports or is_first):
            return None
        return Merged(self._relay, held_ms, num_expected, is_whole, nodes, reports, asked)

    def _new_nodes(self, now_s: float) -> tuple[list[RosterEntry], int]:
        """Return the nodes that are new, or no longer what they were, and how many bytes they take."""
        nodes: list[RosterEntry] = []
        num_bytes = 0
        for node in self._latest.names:
            if (news := self._latest.entry_since(node, self._entries.get(node, 0), now_s)) is None:
                continue
            if num_bytes > MERGED_BYTES:
                self.is_behind = True
                break
            self._entries[node], entry = news
            nodes.append(entry)
            num_bytes += ENTRY_BYTES + len(entry.place) + len(entry.why.encode())
        return nodes, num_bytes

    def _new_reports(self, max_bytes: int, now_s: float) -> list[MergedReport]:
        """Return what nodes report, until the frame is full."""
        reports: list[MergedReport] = []
        num_bytes = 0
        for node in self._longest_unsent_first():
            if (news := self._latest.report_since(node, self._reports.get(node, 0), now_s)) is None:
                continue
            if num_bytes > max_bytes:
                self.is_behind = True
                break
            self._reports.pop(node, None)
            self._reports[node], report = news
            reports.append(report)
            num_bytes += ENTRY_BYTES + len(report.frame)
        return reports

    def _longest_unsent_first(self) -> list[str]:
        known = set(self._latest.names)
        self._entries = {node: version for node, version in self._entries.items() if node in known}
        self._reports = {node: version for node, version in self._reports.items() if node in known}
        return [*(known - self._reports.keys()), *self._reports]


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
