"""A job in short: its first line, its summary, its end. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from app.diagnosis.causes import RankState, Severity
from app.errors import ExitCode
from app.text import bytes_text, json_value, step_text
from app.view.nodes import ended_jobs_text
from app.view.rows import SCHEMA, SEVERITY_TEXTS
from app.view.verdict_hints import failure_hint

if TYPE_CHECKING:
    from app.view.view import View


_WITHOUT_ERROR = re.compile("[:;] ")
ENDED = frozenset({"succeeded", "failed", "stopped", "lost"})


def ended_beside(view: View) -> list[tuple[str, str]]:
    """Return the id and the state of each job that has ended, without the one shown."""
    return [(row.job_id, row.state) for row in view.other_jobs() if row.state in ENDED and not row.is_concurrent]


def no_job_text(view: View, attach: str, verb: str) -> str:
    """Return what stands in place of the rows of a job where none is shown: `no job runs; ended: gpt; rankdeck ...`."""
    ended = ended_jobs_text(ended_beside(view), attach, verb)
    return f"no job runs; {ended}" if ended else "no job is known there"


def headline_text(view: View) -> str:
    """Return the first line with the name of its severity, as the screen shows it."""
    headline = view.headline()
    return f"{SEVERITY_TEXTS[headline.severity]}  {headline.text}"


def headline_hint(view: View) -> str:
    """Return what to do about the verdict, or the failure, that the first line names; empty when it names none."""
    verdicts, job = view.verdicts(), view.job()
    if not verdicts:
        return "" if job is None else failure_hint(job)
    return verdicts[0].hint if view.headline().text.startswith(verdicts[0].text) else ""


def summary_object(view: View) -> dict[str, Any]:
    """Return the object of `rankdeck demo --json`: schema, job, steps, losses, and the rows of `status --json`."""
    status = status_object(view)
    job = status.pop("jobs")[0] if status["jobs"] else None
    progress = view.progress()
    return {
        "schema": status.pop("schema"),
        "job": job,
        "steps": progress.steps,
        "loss_first": progress.loss_first,
        "loss_last": progress.loss_last,
        **status,
    }


def summary_lines(summary: dict[str, Any], *, headline: str = "") -> list[str]:
    """Return the summary object as lines of text, without the verdict that `headline`, printed above, begins with."""
    job = summary["job"]
    if job is None:
        return ["the job did not start"]
    lines = [f"job {job['job_id']}: {end_text(job['state'], job['exit_code'])}"]
    if summary["loss_first"] is not None and summary["loss_last"] is not None:
        lines.append(f"{summary['steps']} steps, loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}")
    is_in_verdicts = job["root_cause"] is not None and job["root_cause"]["text"] in {
        v["text"] for v in summary["verdicts"]
    }
    if job["root_cause"] is not None and not is_in_verdicts:
        lines.append(f"root cause: {job['root_cause']['text']}")
        lines += [f"  | {line}" for line in job["root_cause"]["traceback"]]
    for row in summary["ranks"]:
        memory = "" if row["rss_bytes"] is None else f", {bytes_text(row['rss_bytes'])}"
        step = "" if row["step"] is None else f", step {step_text(row['step'], is_least=row['is_step_least'])}"
        on_node = f" on {row['node']}" if row["node"] else ""
        lines.append(f"  rank {row['rank']}{on_node}: {_how(row)}{step}{memory}")
    lines += [f"  {wait['text']}" for wait in summary["barriers"]]
    for verdict in summary["verdicts"]:
        if headline.startswith(verdict["text"]):
            continue
        lines.append(f"verdict: {SEVERITY_TEXTS[Severity(verdict['severity'])]}  {verdict['text']}")
        if verdict["hint"]:
            lines.append(f"  {verdict['hint']}")
    return lines


def end_text(state: str, code: int | None) -> str:
    """Return `failed, exit code 1`; of a job that runs or was stopped a code means nothing: the state alone."""
    has_code = code is not None and state in ENDED - {"stopped"}
    return f"{state}, exit code {code}" if has_code else state


def _how(row: dict[str, Any]) -> str:
    """Return the state of a rank; of one that ended badly how, without its error: `killed by SIGTERM`."""
    end = row["detail"] if row["state"] in {RankState.EXITED, RankState.ENDED} else ""
    return _WITHOUT_ERROR.split(end)[0] or str(row["state"])


def exit_code(view: View, *, is_fault_unnamed: bool = False, must_succeed: bool = False) -> ExitCode:
    """Return the command's exit code: 10 while a verdict stands, else by how the job ended.

    Args:
        view: The rows of now.
        is_fault_unnamed: Whether an injected fault was not named in time.
        must_succeed: Whether a job that was stopped has failed, for a command that started it.
    """
    if is_fault_unnamed:
        return ExitCode.JOB_FAILED
    if any(verdict.severity is not Severity.QUIET for verdict in view.verdicts()):
        return ExitCode.VERDICT_STANDS
    job = view.job()
    bad_ends = {"failed", "lost", "stopped"} if must_succeed else {"failed", "lost"}
    return ExitCode.JOB_FAILED if job is not None and job.state in bad_ends else ExitCode.WELL


def is_over(view: View, job_id: str = "") -> bool:
    """Return whether the given job, or the one shown, has ended."""
    job = view.job()
    return job is not None and job.state in ENDED and job_id in ("", job.job_id)


def status_object(view: View) -> dict[str, Any]:
    """Return the object of `--json`: built-in types only, numbers rounded, unknown values None."""
    job = view.job()
    rows = {
        "nodes": view.nodes(),
        "jobs": [] if job is None else [job],
        "other_jobs": view.other_jobs(),
        "gpus": view.gpus(),
        "ranks": view.ranks(),
        "barriers": view.barriers(),
        "verdicts": view.verdicts(),
    }
    return {"schema": SCHEMA} | {key: json_value(value) for key, value in rows.items()}
