"""What every output shows: the model and its diagnosis as rows, sentences and severities.

One source for the screen, the printed lines and `--json`. Everything is computed on request, and only for the
requested ranks.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.machine import GpuWatchState
from agent.wire.reports import epoch_of
from app.diagnosis.causes import Severity
from app.model.cluster import ended_s, still_cluster
from app.text import LINE_LIMIT, clean, clean_name, finite, place_text
from app.view.because_text import because_rows, differing_rows
from app.view.end_causes import end_row
from app.view.gpus import BrokenGpu, broken_gpus, findings, gpu_rows
from app.view.headline import (
    idle_headline,
    job_detail,
    job_headline,
    node_headline,
    root_cause_row,
)
from app.view.job_figures import job_figures, mean_of
from app.view.memory import JobMemory, growth_row, memory_findings
from app.view.nodes import (
    JUST_ENDED_S,
    are_well,
    beside_sentences,
    clean_names,
    disbelief_text,
    job_severity,
    new_nodes_text,
    node_row,
    other_job_rows,
    other_jobs_text,
    short_other_jobs_texts,
)
from app.view.pace import JobPace
from app.view.ranks import RankTable, barrier_row, is_step_least, rank_row
from app.view.rows import (
    Finding,
    GpuRow,
    Headline,
    JobRow,
    NodeRow,
    OtherJobRow,
    Progress,
    RankRow,
    VerdictRow,
)
from app.view.verdict_hints import hint
from app.view.verdict_text import sentence
from ddpcore.wire import TrainingReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.diagnosis.diagnoser import Diagnosis
    from app.diagnosis.rank_pace import RankPace
    from app.diagnosis.verdicts import Verdict
    from app.diagnosis.waits import Wait
    from app.model.cluster import Cluster, Node
    from app.view.memory import MemoryRow, MemorySummary
    from app.view.ranks import BarrierRow
    from app.view.rows import Figure


class View:
    """The rows of one moment. Each frame makes a new view and reads it immediately, before the model changes."""

    def __init__(
        self,
        cluster: Cluster,
        diagnosis: Diagnosis,
        now_s: float,
        job_id: str | None = None,
        attach: str = "rankdeck attach JOB",
    ) -> None:
        """Show one job, with its own verdicts and waits.

        Args:
            cluster: The model.
            diagnosis: The diagnosis of that moment.
            now_s: The moment.
            job_id: The job to show; empty shows none, None the current job of the cluster.
            attach: The command that shows another job, as a user types it, with JOB in place of its id; empty where
                none does, as in a recording.
        """
        self._cluster = cluster
        self._diagnosis = diagnosis
        self.now_s = now_s
        self._job = cluster.current_job() if job_id is None else cluster.jobs.get(job_id)
        self._found = None if self._job is None else diagnosis.jobs.get(self._job.job_id)
        self._attach = attach

    def still(self) -> View:
        """Return a permanent copy of this view, over a copy of the model, which changes no more."""
        jobs = {
            job_id: msgspec.structs.replace(found, pace=partial(_given, found.pace()))
            for job_id, found in self._diagnosis.jobs.items()
        }
        diagnosis = msgspec.structs.replace(self._diagnosis, jobs=jobs)
        shown = self.job_id
        return View(still_cluster(self._cluster), diagnosis, self.now_s, shown, self._attach)

    @property
    def _verdicts(self) -> list[Verdict]:
        return [] if self._found is None else self._found.verdicts

    @property
    def job_id(self) -> str:
        """Id of the job shown, as its agents name it; empty without a job."""
        return "" if self._job is None else self._job.job_id

    @property
    def num_ranks(self) -> int:
        """World size of the job; 0 without a job."""
        return 0 if self._job is None else self._job.world_size

    @property
    def why_unknown(self) -> str:
        """Why waits, time, memory and output of the job are not known; empty of a job that an agent reports."""
        return ""

    def headline(self) -> Headline:
        """Return the first line: the worst verdict, or the state of nodes and job."""
        verdicts = self._verdicts
        broken = [gpu for gpu in self._broken_gpus if gpu.ranks]
        is_over = self._job is None or self._job.is_ended()
        if broken and not is_over and (not verdicts or verdicts[0].severity is not Severity.CRITICAL):
            return Headline(Severity.CRITICAL, broken[0].text)
        if verdicts:
            others = f" (and {len(verdicts) - 1} more)" if len(verdicts) > 1 else ""
            return Headline(verdicts[0].severity, sentence(verdicts[0]) + others)
        about_nodes = node_headline(self._cluster, self._diagnosis, self._job)
        row = self.job()
        if self._job is None or self._found is None or row is None:
            return about_nodes or idle_headline(self._cluster, self._attach)
        if about_nodes is not None and not self._job.is_ended():
            return about_nodes
        return job_headline(self._cluster, self._job, row, self._found, self.now_s)

    def job(self) -> JobRow | None:
        """Return the row of the job; None without a job."""
        return self._job_row

    @cached_property
    def _job_row(self) -> JobRow | None:
        job = self._job
        if job is None or self._found is None:
            return None
        state = job.state()
        first = job.worker(0)
        training = (first and first.report and first.report.training) or TrainingReport()
        loss, loss_step = job.mean_loss()
        # The steps of ranks that are not seen are of the past.
        is_lost = self._found.facts.is_lost
        step = job.lowest_shown_step(~is_lost)
        step = job.lowest_shown_step(is_lost) if step is None else step
        steps_per_s = None if job.is_ended() else job.steps_per_s(self.now_s)
        severity = job_severity(state, self._verdicts)
        root_cause = root_cause_row(job, self._cluster.node_names, self._verdicts, self._diagnosis.nodes)
        return JobRow(
            job_id=clean_name(job.job_id),
            attempt=job.attempt,
            state=state,
            severity=severity,
            world_size=job.world_size,
            num_nodes=job.num_nodes,
            step=step,
            is_step_least=step is not None and is_step_least(job, self._found, job.shown_step == step),
            is_step_counted=job.is_step_counted,
            epoch=None if first is None else epoch_of(first),
            loss=loss,
            loss_step=loss_step,
            steps_per_s=steps_per_s,
            last_step=training.last_step,
            # A job that hangs or has failed does not reach its last step.
            remaining_s=None if severity is Severity.CRITICAL else job.remaining_s(training.last_step, steps_per_s),
            goodput_frac=None if training.goodput_frac is None else finite(training.goodput_frac),
            checkpoint_step=training.checkpoint_step,
            checkpoint_age_s=training.checkpoint_age_s,
            allow_faults=job.together.allows_faults,
            is_adopted=job.together.is_adopted,
            exit_code=job.together.exit_code,
            detail=clean(job_detail(job, root_cause, self._verdicts, self._diagnosis.nodes), LINE_LIMIT),
            notes=list(self.notes().values()),
            root_cause=root_cause,
        )

    @property
    def ends_in_step(self) -> bool:
        """Whether a stop ends the job at a step that its ranks agree on, as rank 0 reports; else by SIGTERM."""
        first = None if self._job is None else self._job.worker(0)
        return first is not None and first.report is not None and first.report.can_stop

    @property
    def job_state_s(self) -> float:
        """Seconds for which the job has been in its state; 0 where that is not known."""
        return 0.0 if self._job is None else self._job.state_s(self.now_s)

    @property
    def is_over_everywhere(self) -> bool:
        """Whether the job has ended on every node that has reported it: a failure on one is a failure of the job."""
        return self._job is None or self._job.is_ended()

    def notes(self) -> dict[str, str]:
        """Return the notes of the job by topic; a note's text changes with each rank that joins."""
        notes = {} if self._job is None else self._job.notes(self._cluster.unreported_of(self._job))
        return {about: clean(note, LINE_LIMIT) for about, note in notes.items()}

    def other_jobs(self) -> list[OtherJobRow]:
        """Return a row for each other job that the nodes know, the latest start first."""
        return self._other_jobs

    @cached_property
    def _other_jobs(self) -> list[OtherJobRow]:
        return other_job_rows(self._cluster, self._diagnosis, self._job)

    def jobs_beside(self) -> dict[str, list[str]]:
        """Return the other jobs that run, or are about to, each with its nodes."""
        names, others = self.node_names, [job for job in self._cluster.jobs.values() if job is not self._job]
        on = {clean_name(job.job_id): set(job.assignments) - set(job.together.over_nodes) for job in others}
        return {job_id: [names[node] for node in sorted(nodes)] for job_id, nodes in on.items() if nodes}

    @property
    def other_jobs_text(self) -> str:
        """Line about other jobs on these nodes; empty without other jobs."""
        shown = "" if self._job is None else clean_name(self._job.job_id)
        return other_jobs_text(self._other_jobs, shown, self._attach)

    @property
    def company_texts(self) -> list[str]:
        """Lines about other jobs, the longest first, all with the whole command; the job shown is named before."""
        others = other_jobs_text(self._other_jobs, "", self._attach)
        lines = [others, *short_other_jobs_texts(self._other_jobs, self._attach)] if others else []
        return lines if self._job is None else [f"also {line}" for line in lines]

    def remarks(self) -> dict[str, str]:
        """Return the notes of the job to report once, by topic."""
        notes = self.notes()
        if self._job is not None and self._cluster.unreported_of(self._job):
            notes.pop("unknown", None)  # the node's own events tell of it
        return notes

    def beside(self) -> dict[str, OtherJobRow]:
        """Return a sentence about each other job that runs, or has just ended, with its row: to report once."""
        ended = (job for job in self._cluster.jobs.values() if job.is_ended())
        over_s = {clean_name(job.job_id): self.now_s - ended_s(job) for job in ended}
        rows = [row for row in self._other_jobs if over_s.get(row.job_id, 0.0) < JUST_ENDED_S]
        return beside_sentences(rows, "" if self._job is None else clean_name(self._job.job_id), self._attach)

    def progress(self) -> Progress:
        """Return the progress of the job."""
        workers = [] if self._job is None else self._job.workers(range(self._job.world_size))
        reports = [worker.report for worker in workers if worker.report is not None]
        return Progress(
            steps=min((report.steps_done for report in reports), default=None),
            loss_first=mean_of([report.loss_first for report in reports if report.loss_first is not None]),
            loss_last=None if self._job is None else self._job.mean_loss()[0],
        )

    @property
    def node_codes(self) -> NDArray[np.int8]:
        """State of each node, in the order of the cluster: indices into `app.diagnosis.rank_facts.NODE_STATES`."""
        return self._diagnosis.nodes.codes

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._cluster.nodes)

    @property
    def node_names(self) -> list[str]:
        """Names of all nodes, clean, in the order of the cluster."""
        return clean_names(self._cluster.node_names)

    @property
    def new_nodes(self) -> str:
        """Line about nodes that registered since the start and are not shown; empty without any."""
        return new_nodes_text(self._cluster.new_nodes)

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds since the oldest of the latest reports of the job's nodes, without a job of all; None before any."""
        ages_s = self._diagnosis.nodes.age_s
        is_shown = ~np.isnan(ages_s) & (self._job is None or self._job.may_be_on(len(ages_s)))
        known = ages_s[is_shown]
        return float(known.max()) if len(known) else None

    def nodes(self) -> list[NodeRow]:
        """Return a row per node, in the order of the cluster; with many nodes, use `first_nodes`."""
        return [self._node_row(node) for node in self._cluster.nodes.values()]

    def first_nodes(self, max_rows: int, *, odd_first: bool = False) -> list[NodeRow]:
        """Return the rows of the first nodes; `odd_first` puts nodes with a problem or a culprit first."""
        order = np.arange(self.num_nodes)
        if odd_first:
            is_odd = ~are_well(self._cluster, self._diagnosis.nodes)
            is_odd[[self._cluster.nodes[name].index for name in self._blamed_nodes]] = True
            order = np.argsort(~is_odd, kind="stable")
        names = self._cluster.node_names
        return [self._node_row(self._cluster.nodes[names[index]]) for index in order[:max_rows].tolist()]

    @property
    def _blamed_nodes(self) -> set[str]:
        return {node for verdict in self._verdicts for node in verdict.nodes}

    def _node_row(self, node: Node) -> NodeRow:
        disbelief = disbelief_text(self._cluster.node_names, self._job, node.index)
        return node_row(node, self._diagnosis.nodes[node.index], self._job, self._found, disbelief)

    def ranks(self, wanted: Sequence[int] | None = None) -> list[RankRow]:
        """Return rows of the wanted ranks that exist, in the order asked for; without an argument of all ranks."""
        job, found = self._job, self._found
        if job is None or found is None:
            return []
        asked = range(job.world_size) if wanted is None else [rank for rank in wanted if 0 <= rank < job.world_size]
        return [rank_row(self._cluster, job, found, rank, self.now_s) for rank in asked]

    def usual_place(self, rank: int) -> str:
        """Return the line at which a verdict sees a rank most often; empty where no verdict names it for that."""
        found = (one for one in self._verdicts if one.is_usual_place and one.culprits[:1] == (rank,))
        return next((place_text(verdict.place) for verdict in found), "")

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks of a node, given its index in the cluster."""
        return [] if self._job is None else self._job.ranks_of(node)

    @cached_property
    def rank_table(self) -> RankTable | None:
        """Facts of all ranks, as arrays; None without a job."""
        if self._job is None or self._found is None:
            return None
        return RankTable(self._cluster, self._job, self._found, self.now_s)

    def barriers(self) -> list[BarrierRow]:
        """Return the current waits, the longest first."""
        waits = sorted(self.waits, key=lambda wait: -wait.waited_s)
        return [self.barrier_row(wait) for wait in waits]

    @property
    def waits(self) -> Sequence[Wait]:
        """Current waits of the job, from the diagnosis."""
        return [] if self._found is None else self._found.waits

    def barrier_row(self, wait: Wait) -> BarrierRow:
        return barrier_row(self._cluster.jobs[wait.job], wait, self._verdicts)

    def verdicts(self) -> list[VerdictRow]:
        """Return the verdicts, the worst first."""
        return self._verdict_rows

    @cached_property
    def _verdict_rows(self) -> list[VerdictRow]:
        return [self._verdict_row(verdict) for verdict in self._verdicts]

    def _verdict_row(self, verdict: Verdict) -> VerdictRow:
        job = self._cluster.jobs[verdict.job]
        worker = job.worker(verdict.culprits[0]) if verdict.culprits else None
        pid = None if worker is None else worker.pid or None
        return VerdictRow(
            cause=verdict.cause,
            culprits=list(verdict.culprits),
            waiting=sorted({*verdict.waiting, *verdict.lost_connection}),
            node=", ".join(clean_name(node) for node in verdict.nodes[:8]),
            job=clean_name(verdict.job),
            attempt=verdict.attempt,
            group=clean_name(verdict.group),
            seq=verdict.seq,
            op=clean_name(verdict.op),
            label=clean_name(verdict.label),
            waited_s=verdict.waited_s,
            where=place_text(verdict.place),
            severity=verdict.severity,
            text=sentence(verdict),
            hint=clean("; ".join([*self._broken_of(verdict), hint(verdict, pid)]), LINE_LIMIT),
            memory=growth_row(verdict.growth),
            end=end_row(verdict.exit),
            because=because_rows(verdict),
            num_signals_compared=None if verdict.comparison is None else verdict.comparison.num_signals,
            differing=differing_rows(verdict),
        )

    def memory(self, wanted: Sequence[int] | None = None) -> list[MemoryRow]:
        """Return memory rows of the wanted ranks that exist; without an argument of all ranks."""
        memory = self._memory
        if memory is None:
            return []
        asked = range(self.num_ranks) if wanted is None else [rank for rank in wanted if 0 <= rank < self.num_ranks]
        return [memory.row(rank) for rank in asked]

    def memory_summary(self) -> MemorySummary | None:
        """Return the memory of all ranks together; None while none is known."""
        return None if self._memory is None else self._memory.summary()

    def memory_findings(self, rows: Sequence[MemoryRow]) -> list[Finding]:
        """Return the memory anomalies of these ranks, and of all ranks together."""
        return memory_findings(rows, self.memory_summary())

    @cached_property
    def _memory(self) -> JobMemory | None:
        return None if self._job is None else JobMemory(self._cluster, self._job, self.now_s)

    @cached_property
    def pace(self) -> JobPace | None:
        """How the ranks spend their time, the costliest first; None without a job."""
        if self._job is None or self._found is None:
            return None
        return JobPace(self._cluster, self._job, self._found)

    def figures(self) -> list[Figure]:
        """Return the figures that the charts follow; empty before a job starts and after it ended."""
        if self._job is None or self._found is None or self._job.is_ended():
            return []
        return job_figures(self._cluster, self._job, self._found, self._diagnosis.nodes, self.now_s)

    def gpus(self) -> list[GpuRow]:
        """Return a row per GPU, in the order of the nodes."""
        return gpu_rows(self._cluster, self._job, self.now_s)

    def oddest_gpus(self, max_rows: int) -> list[GpuRow]:
        """Return rows of GPUs, the most severe first."""
        return gpu_rows(self._cluster, self._job, self.now_s, max_rows)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the nodes report."""
        reports = (node.report for node in self._cluster.nodes.values())
        return sum(len(report.gpus.gpus) for report in reports if report is not None)

    def gpu_findings(self, gpus: Sequence[GpuRow]) -> list[Finding]:
        """Return the problems of these GPUs, of their use and of the nodes' GPU monitoring; the worst first."""
        nodes = self._cluster.nodes.values()
        silent = [one for one in nodes if one.report is not None and one.report.gpus.state is GpuWatchState.SILENT]
        return findings(gpus, [self._node_row(node) for node in silent])

    def broken_gpus(self) -> list[str]:
        """Return a sentence for each GPU with a critical failure, in the order of the nodes."""
        return [gpu.text for gpu in self._broken_gpus]

    @cached_property
    def _broken_gpus(self) -> list[BrokenGpu]:
        return broken_gpus(self._cluster, self._job, self.now_s)

    def _broken_of(self, verdict: Verdict) -> list[str]:
        """Return the failure of a culprit's GPU, at most one; it may be the reason of the verdict."""
        culprits = set(verdict.culprits)
        return [gpu.text for gpu in self._broken_gpus if culprits.intersection(gpu.ranks)][:1]


def _given(pace: RankPace) -> RankPace:
    return pace
