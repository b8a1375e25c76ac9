"""Listeners on hosts, and tries to reach them, by the verbs `listen` and `reach` of the agents' program.

Everything here blocks, within bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError
from agent.wire.examination import Listening, Reached, decode_listening, decode_reach_report
from app.errors import AgentUnreachableError
from app.preflight.findings import cleaned
from app.safe_text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from app.ssh.agent_link import AgentLink
    from app.ssh.talk import Talk


def begin_listening(link: AgentLink, talks: ExitStack, *options: str) -> tuple[Talk, Listening]:
    """Have a host listen until `talks` is closed; return what it says to lines, and where it listens.

    Raises:
        AgentUnreachableError: It says something else.
        HostUnreachableError: It cannot be asked.
    """
    talk = link.begin_verb("listen", *options)
    talks.callback(talk.close)
    try:
        return talk, cleaned(decode_listening(talk.line()))
    except MalformedMessageError as error:
        raise AgentUnreachableError(link.host, clean(str(error))) from error


def try_to_reach(link: AgentLink, targets: Sequence[str]) -> dict[str, Reached]:
    """Have a host connect to others that listen; return how each connection went, in the order of the targets.

    Raises:
        AppError: See `AgentLink.ask_verb`.
    """
    try:
        report = cleaned(decode_reach_report(link.ask_verb("reach", *targets)))
    except MalformedMessageError as error:
        raise AgentUnreachableError(link.host, clean(str(error))) from error
    found = {one.target: one for one in report.reached}
    unsaid = Reached("", error="nothing was said of it")
    return {target: found.get(target, unsaid) for target in targets}
