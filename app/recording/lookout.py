"""Reports of before, folded into a model that is looked at as a live console looks at its own.

Pure: whoever has the reports says when each was heard, and when to look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.diagnosis.diagnoser import Diagnoser
from app.event_log import EventLog
from app.history import History
from app.model.cluster import Cluster
from app.model.job_choice import JobChoice
from app.view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.digest import NodeFrame
    from app.diagnosis.diagnoser import Diagnosis
    from app.diagnosis.rank_facts import Thresholds
    from app.diagnosis.verdicts import Verdict


class Lookout:
    """A model at the moment of the last look.

    Attributes:
        at_s: That moment.
        diagnosis: What was the matter then.
        events: What has happened until then.
        history: How figures went until then.
        cluster: The model.
        diagnoser: What judges it.
    """

    diagnosis: Diagnosis

    def __init__(
        self, nodes: Sequence[str], thresholds: Thresholds, history: History | None = None, job_id: str = ""
    ) -> None:
        """Before the first look; `job_id` is of the job to show, empty is whichever is to be shown."""
        self.at_s = 0.0
        self.events = EventLog()
        self.history = history or History()
        self.cluster = Cluster(nodes)
        self.diagnoser = Diagnoser(thresholds)
        self._choice = JobChoice(job_id)
        self._heard: dict[str, tuple[str, NodeFrame, float]] = {}
        """What is still to be folded in, by node: together it is cheaper."""

    def hear(self, node: str, frame: NodeFrame, at_s: float) -> None:
        """Take a report; those of a node come in order."""
        if node in self._heard:
            self._fold()
        self._heard[node] = (node, frame, at_s)

    def look(self, now_s: float) -> None:
        """Look at the model."""
        self._fold()
        self.at_s = now_s
        self.diagnosis = self.diagnoser.observe(self.cluster, now_s)
        view = self.view()
        self.events.observe(view)
        self.history.observe(view)

    def view(self) -> View:
        """Return the rows of that moment."""
        return View(self.cluster, self.diagnosis, self.at_s, self._choice.choose(self.cluster))

    @property
    def verdicts(self) -> list[Verdict]:
        """What is said of the job that is shown, the worst first."""
        found = self.diagnosis.jobs.get(self._choice.choose(self.cluster))
        return [] if found is None else found.verdicts

    def _fold(self) -> None:
        self.cluster.apply_all(list(self._heard.values()))
        self._heard.clear()
