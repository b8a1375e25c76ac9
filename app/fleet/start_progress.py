"""Progress of a job's start on each of its nodes, and each node's outcome where it failed. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from app.text import nodes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIN_NODES_SHOWN = 2
"""Nodes from which progress is shown; with fewer there is only the result of the start."""


class NodeStage(StrEnum):
    """Stage of one node; the values are shown to users."""

    WAITING = "not asked"
    ASKED = "asked"
    PREPARED = "prepared"
    BEGINNING = "asked to begin"
    BEGUN = "begun"
    REFUSED = "refused"
    SILENT = "no answer"
    TAKEN_BACK = "taken back"
    UNKNOWN = "not known"
    """It did not answer the request to take the job back."""


_NEXT: dict[NodeStage, frozenset[NodeStage]] = {
    NodeStage.WAITING: frozenset({NodeStage.ASKED}),
    NodeStage.ASKED: frozenset(
        {NodeStage.PREPARED, NodeStage.REFUSED, NodeStage.SILENT, NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}
    ),
    NodeStage.PREPARED: frozenset({NodeStage.BEGINNING, NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}),
    NodeStage.BEGINNING: frozenset(
        {NodeStage.BEGUN, NodeStage.REFUSED, NodeStage.SILENT, NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}
    ),
    NodeStage.BEGUN: frozenset({NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}),
    NodeStage.REFUSED: frozenset({NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}),
    NodeStage.SILENT: frozenset({NodeStage.TAKEN_BACK, NodeStage.UNKNOWN}),
    NodeStage.TAKEN_BACK: frozenset(),
    NodeStage.UNKNOWN: frozenset(),
}
_BEHIND_PREPARED = frozenset({NodeStage.PREPARED, NodeStage.BEGINNING, NodeStage.BEGUN})
_FAILED = frozenset({NodeStage.REFUSED, NodeStage.SILENT})


class StartProgress:
    """One start of a job, written by the starter and read by the console.

    Attributes:
        what: What is started, clean: `job gpt`, or `restart 2 of job gpt`.
        is_over: Whether the start has finished, successfully or not.
    """

    def __init__(self, what: str, nodes: Sequence[str]) -> None:
        """Set up with nodes that have not been asked yet; their names are safe to show."""
        self.what = what
        self.is_over = False
        self._trails: dict[str, list[NodeStage]] = {node: [NodeStage.WAITING] for node in nodes}
        self._whys: dict[str, str] = {}

    @property
    def nodes(self) -> list[str]:
        """All nodes, in their order."""
        return list(self._trails)

    def stage(self, node: str) -> NodeStage:
        """Return the stage of a node."""
        return self._trails[node][-1]

    def move(self, node: str, stage: NodeStage, why: str = "") -> None:
        """Move a node to its next stage.

        Args:
            node: The node.
            stage: Its new stage.
            why: Its message, where it failed; clean.

        Raises:
            ValueError: No such transition from its stage.
        """
        trail = self._trails[node]
        if stage not in _NEXT[trail[-1]]:
            raise ValueError(f"{node} cannot be {stage} after {' -> '.join(trail)}")
        trail.append(stage)
        if why:
            self._whys[node] = why

    @property
    def has_failed(self) -> bool:
        """Whether a node has refused or not answered, or something was taken back."""
        return any(
            stage in _FAILED | {NodeStage.TAKEN_BACK, NodeStage.UNKNOWN} for stage in map(self.stage, self._trails)
        )

    @property
    def text(self) -> str:
        """A short line: `starting job gpt: 3 of 4 prepared, n4 asked`."""
        stages = {stage: [node for node in self._trails if self.stage(node) is stage] for stage in NodeStage}
        total = len(self._trails)
        num_begun = len(stages[NodeStage.BEGUN])
        num_prepared = sum(self.stage(node) in _BEHIND_PREPARED for node in self._trails)
        is_beginning = num_begun or stages[NodeStage.BEGINNING]
        count = f"{num_begun} of {total} begun" if is_beginning else f"{num_prepared} of {total} prepared"
        parts = [] if self.has_failed else [count]
        waited_for = stages[NodeStage.BEGINNING] if is_beginning else stages[NodeStage.ASKED]
        if waited_for:
            parts.append(f"waiting for {nodes_text(waited_for)}")
        shown = (NodeStage.REFUSED, NodeStage.SILENT, NodeStage.TAKEN_BACK, NodeStage.UNKNOWN)
        parts += [f"{nodes_text(stages[stage])} {stage}" for stage in shown if stages[stage]]
        return f"{'taking back' if self.has_failed else 'starting'} {self.what}: {', '.join(parts)}"

    @property
    def milestone(self) -> str:
        """A sentence where a step is complete, or has failed; empty in between, and for a single node."""
        total = len(self._trails)
        if total < MIN_NODES_SHOWN:
            return ""
        stages = [self.stage(node) for node in self._trails]
        for done in (NodeStage.PREPARED, NodeStage.BEGUN):
            if stages.count(done) == total:
                return f"{self.what}: {done} on {nodes_text(self.nodes)}, {total} of {total} nodes"
        failed = {node: self._why(node) for node in self._trails if self.stage(node) in _FAILED}
        if failed:
            return f"{self.what}: " + "; ".join(f"{node}: {why}" for node, why in failed.items())
        return ""

    def account(self, but_for: str = "") -> str:
        """Return the outcome of each node of a failed start; nodes with the same outcome are listed together.

        Args:
            but_for: A node whose refusal is shown already.
        """
        nodes_by_outcome: dict[str, list[str]] = {}
        for node in self._trails:
            if node != but_for or self.stage(node) is not NodeStage.REFUSED:
                nodes_by_outcome.setdefault(self._outcome(node), []).append(node)
        return "; ".join(f"{nodes_text(nodes)}: {outcome}" for outcome, nodes in nodes_by_outcome.items())

    def _outcome(self, node: str) -> str:
        *_, last = trail = self._trails[node]
        steps = [str(stage) for stage in (NodeStage.BEGUN, NodeStage.PREPARED) if stage in trail][:1]
        steps += [self._why(node)] if _FAILED & {*trail} else []
        match last:
            case NodeStage.TAKEN_BACK:
                steps.append("killed" if NodeStage.BEGUN in trail else str(last))
            case NodeStage.UNKNOWN:
                may_run = {NodeStage.BEGINNING, NodeStage.BEGUN} & {*trail}
                steps.append("it may run there" if may_run else "it may hold what it was to prepare")
            case NodeStage.WAITING | NodeStage.ASKED | NodeStage.BEGINNING:
                steps.append(str(last))
            case NodeStage.PREPARED | NodeStage.BEGUN | NodeStage.REFUSED | NodeStage.SILENT:
                pass
        return ", ".join(steps)

    def _why(self, node: str) -> str:
        """Return the message of a node that failed."""
        stage = next(_failures(self._trails[node]))
        why = self._whys.get(node, "")
        return f"{stage}: {why}" if why and stage is NodeStage.REFUSED else why or str(stage)


def _failures(trail: Sequence[NodeStage]) -> Iterator[NodeStage]:
    return (stage for stage in trail if stage in _FAILED)


class Milestones:
    """Sentences about starts, each once: a node whose last job is still ending may be asked many times."""

    def __init__(self) -> None:
        self._what = ""
        self._printed: list[str] = []
        self._waiting: list[str] = []

    def take(self, progress: StartProgress) -> None:
        """Take the progress of a start."""
        if progress.what != self._what:
            self._what, self._printed = progress.what, []
        sentence = progress.milestone
        if sentence and sentence not in self._printed:
            self._printed.append(sentence)
            self._waiting.append(sentence)

    def drain_notices(self) -> list[str]:
        """Return the sentences since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting
