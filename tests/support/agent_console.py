"""A console's own eyes on a real agent: its model and diagnosis, fed with the agent's reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agent.wire.jobs import ENDED_STATES
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.view.view import View
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.diagnosis.rank_facts import Thresholds
    from tests.support.agents import RunningAgent

NODE = "here"


class AgentConsole:
    """Looks at one agent; remembers every verdict that was ever told."""

    def __init__(self, agent: RunningAgent, thresholds: Thresholds | None = None) -> None:
        self._agent = agent
        self._cluster = Cluster([NODE])
        self._diagnoser = Diagnoser(thresholds)
        self.verdicts: dict[str, None] = {}
        """Sentences, in the order of their first appearance."""

    def look(self) -> View:
        """Take a fresh report and return what a person sees of it."""
        self._agent.processes()
        report = self._agent.report()
        now_s = time.monotonic()
        self._cluster.apply(NODE, report, now_s)
        diagnosis = self._diagnoser.observe(self._cluster, now_s)
        diagnosis.validate()
        view = View(self._cluster, diagnosis, now_s)
        self.verdicts |= dict.fromkeys(verdict.text for verdict in view.verdicts())
        return view

    def wait_until(self, condition: Callable[[View], bool], within_s: float, what: str) -> View:
        """Return the first view that satisfies `condition`."""

        def see() -> View | None:
            view = self.look()
            return view if view.job() is not None and condition(view) else None

        try:
            view = until(see, within_s, what)
        except AssertionError as error:
            said = self.look()
            seen = (said.headline(), said.job(), said.ranks())
            raise AssertionError(f"{error}\n{seen}\n{self._agent.logs()}") from None
        assert view is not None
        return view

    def wait_for_end(self, within_s: float) -> View:
        """Return the view of a job that has ended."""
        return self.wait_until(has_ended, within_s, "the job's end")


def has_ended(view: View) -> bool:
    """Say whether the job has ended."""
    job = view.job()
    return job is not None and job.state in {str(state) for state in ENDED_STATES}
