"""Asks hosts what a job over them would meet, over open connections: in parallel, each within bounds.

First each examines itself. Then each listens at a free port of its address, reports its time, and tries to reach
others. The store and the ranks of a job will connect likewise. No agent needs to serve.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.commands import RefusalReason, Refused, Status, decode_reply
from agent.wire.examination import (
    Listening,
    Reached,
    decode_clock,
    decode_examination,
    decode_listening,
    decode_reach_report,
)
from agent.wire.jobs import ENDED_STATES
from app.errors import (
    AgentRefusedError,
    AgentUnreachableError,
    AppError,
    ExitCode,
    HostKeyError,
    IncompatibleAgentError,
)
from app.preflight.comparison import compare
from app.preflight.findings import Answers, ClockDifference, Failure, FailureKind, Preflight, Step, Wanted, cleaned
from app.preflight.mesh import routes, target_text
from app.ssh.config import LOOPBACK, THIS_MACHINE
from app.text import LINE_LIMIT, clean
from app.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.wire.commands import Reply
    from agent.wire.examination import Examination
    from agent.wire.reports import NodeReport
    from app.fleet.agent_link import AgentLink, Talk

NUM_PINGS = 4
"""Pings for a clock; the quickest counts, as a delayed one does not show the clock."""
_FOUND_BAD = (1,)
"""Exit code of `agent doctor` where a row is bad."""


def preflight(
    links: Sequence[tuple[Wanted, AgentLink | AppError]],
    port: int = 0,
    notify: Callable[[str, Step], None] = lambda _host, _step: None,
) -> Preflight:
    """Examine hosts and compare them; blocks for as long as the slowest takes, a minute at most.

    Args:
        links: Each host with a connected link, which stays connected, or why there is none.
        port: Port at which each host listens for the others; 0 is a free one.
        notify: Takes a host and its step, from any thread.
    """
    answers = {}
    for wanted, link in links:
        failure = failure_of(wanted.host, link) if isinstance(link, AppError) else None
        answers[wanted.host] = Answers(wanted, wanted.host != THIS_MACHINE, failure)
        notify(wanted.host, Step.FAILED if failure else Step.EXAMINING)
    connected = {wanted.host: (wanted, link) for wanted, link in links if not isinstance(link, AppError)}

    def examine(wanted: Wanted, link: AgentLink) -> Examination:
        examination = _examine(wanted, link)
        notify(wanted.host, Step.WAITING)
        return examination

    asked = run_parallel([*connected.values()], lambda one: examine(*one))
    for host, examination in zip(connected, asked, strict=True):
        if isinstance(examination, AppError):
            answers[host] = msgspec.structs.replace(answers[host], failure=failure_of(host, examination))
            notify(host, Step.FAILED)
        else:
            answers[host] = msgspec.structs.replace(answers[host], examination=examination)
    fit = {host: link for host, (_, link) in connected.items() if answers[host].examination is not None}
    with ExitStack() as talks:
        for step, ask in ((Step.LISTENING, partial(_listen, port=port, talks=talks)), (Step.REACHING, _reach)):
            for host in fit:
                notify(host, step)
            ask(fit, answers)
    for host in fit:
        notify(host, Step.DONE)
    return compare([*answers.values()])


def refuse_before_examining(
    links: Sequence[tuple[AgentLink, str]], job_id: str, command: Sequence[str]
) -> dict[str, NodeReport]:
    """Refuse a job for what takes no examination: one of its name is under way, or its program is not there.

    Args:
        links: Each host, and the working directory there; empty is the home.
        job_id: The job.
        command: Its command.

    Returns:
        The report of each host whose agent gives one.

    Raises:
        AgentRefusedError: A host would refuse it.
    """

    def look(link: AgentLink, workdir: str) -> Reply | None:
        is_script = not command[0].startswith("-")
        options = ("--script", command[0], "--workdir", workdir or "~") if is_script else ()
        try:
            return decode_reply(link.ask_verb("status", *options, answered=(ExitCode.REFUSED,)))
        except MalformedMessageError:
            return None

    reports = {}
    for (link, _), reply in zip(links, run_parallel(links, lambda one: look(*one)), strict=True):
        if isinstance(reply, Refused):
            raise AgentRefusedError(link.host, reply.reason, clean(reply.message, LINE_LIMIT))
        # An agent that cannot say, perhaps an older one, is examined like the others.
        if not isinstance(reply, Status):
            continue
        reports[link.host] = reply.report
        for job in reply.report.jobs:
            if job.job_id == job_id and job.state not in ENDED_STATES:
                error = AgentRefusedError(link.host, RefusalReason.JOB_EXISTS, f"job {job_id} is {job.state} there")
                error.hint = f"rankdeck stop {job_id} first, or another --name"
                raise error
    return reports


def failure_of(host: str, error: AppError) -> Failure:
    """Return why a host did not answer."""
    if isinstance(error, HostKeyError):
        kind = FailureKind.HOST_KEY
    elif isinstance(error, AgentUnreachableError | AgentRefusedError | IncompatibleAgentError):
        kind = FailureKind.RANKDECK
    else:
        kind = FailureKind.UNREACHABLE
    return Failure(
        kind, clean(error.text_for(host), LINE_LIMIT), clean(error.hint, LINE_LIMIT), ExitCode(error.exit_code)
    )


def _examine(wanted: Wanted, link: AgentLink) -> Examination:
    options = [*(("--python", wanted.python) if wanted.python else ())]
    options += [*(("--workdir", wanted.workdir) if wanted.workdir else ())]
    line = link.ask_verb("doctor", *options, answered=_FOUND_BAD)
    try:
        return cleaned(decode_examination(line))
    except MalformedMessageError as error:
        raise AgentUnreachableError(link.host, clean(str(error))) from error


def _listen(links: Mapping[str, AgentLink], answers: dict[str, Answers], port: int, talks: ExitStack) -> None:
    """Make each host listen until `talks` is closed, and read its clock while it does."""

    def begin(host: str) -> tuple[Listening, ClockDifference | None]:
        examination = answers[host].examination
        assert examination is not None
        # A host without an address of its own still reports its time.
        address = examination.facts.address or LOOPBACK
        talk = links[host].begin_verb("listen", "--address", address, "--port", str(port))
        talks.callback(talk.close)
        try:
            listening = cleaned(decode_listening(talk.line()))
            return listening, None if listening.error else _clock(talk)
        except MalformedMessageError as error:
            raise AgentUnreachableError(host, clean(str(error))) from error

    for host, begun in zip(links, run_parallel([*links], begin), strict=True):
        if isinstance(begun, AppError):
            listening = Listening(1, error=failure_of(host, begun).message[:1024])
            answers[host] = msgspec.structs.replace(answers[host], listening=listening)
        else:
            answers[host] = msgspec.structs.replace(answers[host], listening=begun[0], clock=begun[1])


def _clock(talk: Talk) -> ClockDifference:
    """Return how far a clock is ahead of ours: its reply, less the middle of the time between request and reply.

    A reply that contradicts those before it counts instead of them: a clock was set in between.
    """
    best: ClockDifference | None = None
    for _ in range(NUM_PINGS):
        asked_s, wall_time_s = time.monotonic(), time.time()  # noqa: TID251 - clocks are what is compared
        talk.send(b"")
        answer = decode_clock(talk.line())
        half_s = (time.monotonic() - asked_s) / 2
        one = ClockDifference(answer.wall_time_s - wall_time_s - half_s, half_s)
        is_set = best is not None and abs(one.offset_s - best.offset_s) > half_s + best.uncertainty_s
        if best is None or is_set or half_s < best.uncertainty_s:
            best = one
    assert best is not None
    return best


def _reach(links: Mapping[str, AgentLink], answers: dict[str, Answers]) -> None:
    """Make each host try to reach others that listen."""
    targets = {
        host: place
        for host in links
        if (listening := answers[host].listening) and not listening.error and (place := target_text(listening))
    }
    wanted = {host: others for host, others in routes([*targets]).items() if others}

    def ask(host: str) -> dict[str, Reached]:
        hosts = {targets[other]: other for other in wanted[host]}
        return {hosts[target]: reached for target, reached in _tried(links[host], [*hosts]).items()}

    for host, found in zip(wanted, run_parallel([*wanted], ask), strict=True):
        if isinstance(found, AppError):
            answers[host] = msgspec.structs.replace(answers[host], reach_error=failure_of(host, found).message)
        else:
            answers[host] = msgspec.structs.replace(answers[host], reached=found)


def _tried(link: AgentLink, targets: Sequence[str]) -> dict[str, Reached]:
    """Make a host connect to others that listen; return the result of each connection, in the order of the targets."""
    try:
        report = cleaned(decode_reach_report(link.ask_verb("reach", *targets)))
    except MalformedMessageError as error:
        raise AgentUnreachableError(link.host, clean(str(error))) from error
    found = {one.target: one for one in report.reached}
    unreported = Reached("", error="nothing was reported of it")
    return {target: found.get(target, unreported) for target in targets}
