"""The rows of a job that rankdeck did not start, as looks from outside have shown it. Pure.

`Picture` is one job at its latest looks: node reports folded into a model, with the finding of `app.inspect.comparison`
in the place of a diagnosis. It never changes. `OutsideView` shows it; what is not known there is None, not zero.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from agent.wire.digest import frame_of
from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.diagnoser import Diagnoser, Diagnosis
from app.diagnosis.rank_facts import Thresholds, all_nodes
from app.diagnosis.verdicts import Verdict
from app.inspect.comparison import Kind, Standing, What, finding_of, standing_of
from app.inspect.inspection_text import facts_text, launcher_text, sentence
from app.inspect.outside_reports import job_name, node_reports, rank_states, stacks_of
from app.model.cluster import Cluster
from app.text import LINE_LIMIT, clean, clean_name, place_text
from app.view.ranks import RankTable
from app.view.rows import Headline, VerdictRow
from app.view.verdict_hints import hint
from app.view.view import View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from app.diagnosis.diagnoser import JobDiagnosis
    from app.inspect.comparison import Finding
    from app.inspect.seen import SeenJob
    from app.model.cluster import Node
    from app.model.job_model import JobModel
    from app.model.unreachable_reason import UnreachableReason
    from app.stacks.groups import NodeStacks
    from app.view.rows import JobRow, NodeRow, RankRow

THRESHOLDS = Thresholds(silent_s=8.0, lost_s=30.0)
"""Ages of a host's look: one takes longer than a report of an agent."""
_CAUSES = {
    What.FROZEN: Cause.FROZEN,
    What.ELSEWHERE: Cause.STRAGGLER,
    What.MISMATCH: Cause.MISMATCH,
    What.MISSING: Cause.EXITED,
    What.SAME_CALL: Cause.TRANSPORT,
    What.NOT_EXITING: Cause.NOT_EXITING,
    What.STANDSTILL: Cause.STANDSTILL,
    What.STANDING: Cause.STANDSTILL,
}
"""Causes of the findings that are an alarm."""


class Target(NamedTuple):
    """A process that a signal may be sent to: the one that was seen, and no other."""

    host: str
    pid: int
    start: int
    """When it was started, in ticks since its machine was."""
    uid: int
    rank: int
    is_stopped: bool


class Picture:
    """A job at its latest looks."""

    def __init__(
        self,
        job: SeenJob,
        hosts: Sequence[str],
        seen_s: Mapping[str, float],
        away: Mapping[str, UnreachableReason],
        place: str = "",
        unseen: Sequence[str] = (),
    ) -> None:
        """Compare the ranks of a job.

        Args:
            job: The job.
            hosts: All hosts that are looked at.
            seen_s: When those that were seen last showed their ranks.
            away: Why hosts cannot be looked at now.
            place: Which of several jobs it is; empty where it is the only one.
            unseen: Sentences on what could not be seen there.
        """
        self.job = job
        self.place = place
        self.unseen = unseen
        self.name = job_name(job)
        self.standings: list[Standing] = [standing_of(rank) for rank in job.ranks]
        self.finding: Finding = finding_of(job, self.standings)
        self.is_over = all(one.kind is Kind.ENDED for one in self.standings)
        self.by_rank = {one.rank.rank: one for one in self.standings}
        self.cluster = cluster_of(hosts, away)
        reports = node_reports(job, self.standings, list(seen_s))
        frames = [(host, frame_of(report), seen_s[host]) for host, report in reports.items() if host in seen_s]
        self.cluster.apply_all(frames)
        found = Diagnoser(THRESHOLDS).observe(self.cluster, max(seen_s.values())).jobs[self.name]
        states = rank_states(job, self.standings, self.finding)
        self._found = msgspec.structs.replace(found, states=states, waits=[], verdicts=self._verdicts())

    def _verdicts(self) -> list[Verdict]:
        """Return the finding as the model's verdict, if it is an alarm; `OutsideView` has its sentence."""
        finding = self.finding
        if finding.severity is not Severity.CRITICAL:
            return []
        hosts = sorted({one.rank.host for one in finding.culprits})
        culprits = tuple(one.rank.rank for one in finding.culprits)
        waiting = tuple(sorted(one.rank.rank for group in finding.waiting for one in group if one.is_waiting))
        place = finding.culprits[0].place if finding.culprits else None
        verdict = Verdict(cause=_CAUSES[finding.what], culprits=culprits, job=self.name, attempt=0, place=place)
        return [msgspec.structs.replace(verdict, waiting=waiting, nodes=tuple(hosts))]

    def diagnosis(self, now_s: float) -> Diagnosis:
        """Return the finding as a diagnosis."""
        return Diagnosis(all_nodes(self.cluster, THRESHOLDS, now_s), {self.name: self._found})

    def headline(self) -> Headline:
        """Return the sentence of `rankdeck inspect`."""
        if self.is_over:
            return Headline(Severity.QUIET, "all its ranks have ended; how is not known from outside")
        text = sentence(self.job, self.finding, is_followed=True)
        return Headline(self.finding.severity, f"seen from outside: {text}")

    def targets(self) -> list[Target]:
        """Return the processes that have not ended, by rank."""
        here = [one for one in self.standings if one.kind is not Kind.ENDED]
        ranks = [(one.rank, one.rank.looks[-1].state == "T") for one in here]
        return [Target(rank.host, rank.pid, rank.start, rank.uid, rank.rank, is_stopped) for rank, is_stopped in ranks]

    def stacks(self) -> list[NodeStacks]:
        """Return the stacks of all ranks, by host."""
        return stacks_of(self.job, self.standings)


def cluster_of(hosts: Sequence[str], away: Mapping[str, UnreachableReason]) -> Cluster:
    """Return a model of hosts that have reported nothing."""
    cluster = Cluster(hosts)
    for host, reason in away.items():
        cluster.put_unreachable(host, reason)
    return cluster


class OutsideView(View):
    """The rows of a picture."""

    def __init__(self, picture: Picture, now_s: float) -> None:
        super().__init__(picture.cluster, picture.diagnosis(now_s), now_s, picture.name, attach="")
        self._picture = picture

    @property
    def why_unknown(self) -> str:
        return "rankdeck did not start this job"

    def still(self) -> OutsideView:
        """Return this view: its picture never changes."""
        return self

    def headline(self) -> Headline:
        return self._picture.headline()

    def job(self) -> JobRow | None:
        """Return the row of the job; one whose ranks have all ended has ended somehow."""
        row = super().job()
        if row is None:
            return None
        how = launcher_text(self._picture.job)
        if not self._picture.job.ranks[0].own_job:
            how += f", not {'' if how.startswith('started') else 'started '}by rankdeck"
        state = "ended" if self._picture.is_over else "running"
        severity = Severity.QUIET if self._picture.is_over else self._picture.finding.severity
        return msgspec.structs.replace(row, state=state, severity=severity, detail=how, exit_code=None, root_cause=None)

    def notes(self) -> dict[str, str]:
        """Return what could not be seen."""
        return {text: text for text in self._picture.unseen}

    @cached_property
    def rank_table(self) -> RankTable | None:
        """Facts of all ranks, as in their rows."""
        assert self._job is not None
        assert self._found is not None
        return _OutsideTable(self._cluster, self._job, self._found, self._picture)

    @property
    def company_texts(self) -> list[str]:
        """Which of several jobs it is, in full and with ever less of what distinguishes it."""
        parts = self._picture.place.split(", ") if self._picture.place else []
        return [", ".join(parts[:number]) for number in range(len(parts), 0, -1)]

    def _verdict_row(self, verdict: Verdict) -> VerdictRow:
        """Return the finding, which is an alarm, in the words of `rankdeck inspect`."""
        finding = self._picture.finding
        return VerdictRow(
            cause=verdict.cause,
            culprits=list(verdict.culprits),
            waiting=list(verdict.waiting),
            node=", ".join(map(clean_name, verdict.nodes)),
            job=clean_name(verdict.job),
            attempt=verdict.attempt,
            group="",
            seq=None,
            op=clean_name(finding.waiting[0][0].op) if verdict.waiting else "",
            label="",
            waited_s=max((self._picture.by_rank[rank].seen_s for rank in verdict.waiting), default=0.0),
            where=place_text(verdict.place),
            severity=verdict.severity,
            text=self.headline().text,
            hint=self._hint(verdict),
        )

    def _hint(self, verdict: Verdict) -> str:
        if not verdict.culprits:
            return ""
        rank = self._picture.by_rank[verdict.culprits[0]].rank
        if verdict.cause is Cause.FROZEN:
            return hint(verdict, rank.pid)
        at = f"--pid {rank.pid} on {clean_name(rank.host)}"
        return "" if verdict.cause is Cause.EXITED else f"look closer, which pauses it: py-spy dump --native {at}"

    def ranks(self, wanted: Sequence[int] | None = None) -> list[RankRow]:
        return [self._known(row) for row in super().ranks(wanted)]

    def _known(self, row: RankRow) -> RankRow:
        """Return a row with what is known from outside, and without the rest."""
        one = self._picture.by_rank.get(row.rank)
        if one is None:
            return msgspec.structs.replace(row, detail="not seen: ended, or on a host that is not looked at")
        detail = {
            Kind.ENDED: "ended, it is not known how",
            Kind.UNSEEN: clean(one.trouble, LINE_LIMIT),
            Kind.ENDING: f"has finished its program; {facts_text([one])}",
            Kind.BLOCKED: f"blocked in the kernel; {facts_text([one])}",
        }.get(one.kind, facts_text([one]))
        if row.state is RankState.RUNNING and not one.is_moving and one.kind is Kind.ELSEWHERE:
            detail = f"stands; {detail}"
        return msgspec.structs.replace(
            row,
            local_rank=None,
            phase_s=None,
            seq=None,
            # At least so long: when it began to wait was not seen.
            waiting_s=one.seen_s if one.is_waiting else None,
            quiet_s=None,
            rss_bytes=None,
            detail=detail,
        )

    def _node_row(self, node: Node) -> NodeRow:
        return msgspec.structs.replace(super()._node_row(node), cpu_frac=None)


class _OutsideTable(RankTable):
    """The ranks of a picture as arrays."""

    def __init__(self, cluster: Cluster, job: JobModel, found: JobDiagnosis, picture: Picture) -> None:
        super().__init__(cluster, job, found, 0.0)
        self._picture = picture

    @property
    def rss_bytes(self) -> NDArray[np.float64]:
        """NaN: memory is not looked at."""
        return np.full(self.num_ranks, np.nan)

    @property
    def waiting_s(self) -> NDArray[np.float64]:
        """Least seconds that each rank has waited; NaN when it does not wait."""
        waiting_s = np.full(self.num_ranks, np.nan)
        for one in self._picture.standings:
            if one.is_waiting:
                waiting_s[one.rank.rank] = one.seen_s
        return waiting_s


class NothingSeen(View):
    """The rows while no job is seen: the hosts, and a sentence."""

    def __init__(self, cluster: Cluster, now_s: float, headline: Headline) -> None:
        super().__init__(cluster, Diagnosis(all_nodes(cluster, THRESHOLDS, now_s), {}), now_s, "", attach="")
        self._headline = headline

    def still(self) -> NothingSeen:
        """Return this view: it never changes."""
        return self

    def headline(self) -> Headline:
        return self._headline
