"""What Slurm reports of a job's nodes while the job is watched: that it drains one, that one is down or back."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from app.errors import AppError
from app.slurm.client import slurm_job_nodes
from app.text import clean, clean_name, nodes_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.slurm.client import SlurmNode

LOOK_S = 30.0
"""Seconds between two looks: Slurm's controller serves the whole cluster."""
NOT_ANSWERING = "*"
"""Flag behind a node's state. Source for the states and their flags: sinfo(1), NODE STATE CODES."""
_FLAGS = "*~#!%$@^-+"
_DRAINS = "Slurm drains {nodes}{why}: no new job starts there, this one keeps running"
_FAILS = "Slurm expects {nodes} to fail{why}: no new job starts there"
_SENTENCES = {
    **dict.fromkeys(("drain", "drained", "draining"), _DRAINS),
    **dict.fromkeys(("fail", "failing"), _FAILS),
    "down": "Slurm reports {nodes} as down{why}",
    NOT_ANSWERING: "{nodes} {verb} not answer Slurm{why}",
}
NO_TROUBLE = ("Slurm reports {nodes} in service again", "")


class NodeWatch:
    """Looks at a job's nodes in a thread, every `LOOK_S` while it is asked for news."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._before: Mapping[str, SlurmNode] = {}
        self._next_s = 0.0
        self._sentences: queue.SimpleQueue[str] = queue.SimpleQueue()

    def news(self) -> list[str]:
        """Return a sentence about each change since the last call, and at first about each node that is in trouble."""
        if time.monotonic() >= self._next_s:
            self._next_s = float("inf")  # until this look is over
            threading.Thread(target=self._look, name="rankdeck-slurm", daemon=True).start()
        sentences: list[str] = []
        with suppress(queue.Empty):
            while True:
                sentences.append(self._sentences.get_nowait())
        return sentences

    def _look(self) -> None:
        try:
            with suppress(AppError):  # the controller may be away: that changes no node
                now = slurm_job_nodes(self._job_id)
                for sentence in node_news(self._before, now):
                    self._sentences.put(sentence)
                self._before = {**self._before, **now}
        finally:
            self._next_s = time.monotonic() + LOOK_S


def node_news(before: Mapping[str, SlurmNode], now: Mapping[str, SlurmNode]) -> list[str]:
    """Return a sentence about all nodes whose state means the same since the last look, for each such state. Pure.

    Args:
        before: The nodes at the last look; one that is missing was well.
        now: The nodes now; one that is missing is not known.
    """
    changed: dict[tuple[str, str], list[str]] = {}
    for name, node in now.items():
        trouble = _trouble(node)
        if trouble != (_trouble(before[name]) if name in before else NO_TROUBLE):
            changed.setdefault(trouble, []).append(clean_name(name))
    return [
        sentence.format(
            nodes=nodes_text(names), why=f" ({reason})" if reason else "", verb="does" if len(names) == 1 else "do"
        )
        for (sentence, reason), names in changed.items()
    ]


def _trouble(node: SlurmNode) -> tuple[str, str]:
    """Return the sentence about a node in its state, with Slurm's reason for it."""
    sentence = _SENTENCES.get(node.state.rstrip(_FLAGS))
    if sentence is None and NOT_ANSWERING in node.state:
        sentence = _SENTENCES[NOT_ANSWERING]
    return NO_TROUBLE if sentence is None else (sentence, clean(node.reason))
