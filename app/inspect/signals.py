"""Signals to ranks that rankdeck did not start: sent to the processes that were seen, by `signal_on_host` there."""

from __future__ import annotations

import inspect as sources
import signal
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from app.errors import AppError, HostUnreachableError, SessionError
from app.inspect import signal_on_host
from app.inspect.inspector import last_line
from app.text import clean, nodes_text, ranks_text
from app.threads import run_parallel
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.agent_link import AgentLink
    from app.inspect.outside_view import Target


def send_signal(links: Sequence[AgentLink], targets: Sequence[Target], number: int) -> str:
    """Send a signal to some processes, and return a sentence about it; blocks.

    Raises:
        AppError: It did not reach all that are left of them.
    """
    meant = {link: [target for target in targets if target.host == link.host] for link in links}
    asked = [link for link, its in meant.items() if its]
    name = signal.Signals(number).name
    num_sent, num_gone, problems = 0, 0, []
    for link, answer in zip(asked, run_parallel(asked, lambda link: _send(link, meant[link], number)), strict=True):
        if isinstance(answer, AppError):
            problems.append(answer.whole)
            continue
        num_sent += answer.count(signal_on_host.SENT)
        num_gone += answer.count(signal_on_host.GONE)
        problems += _problems(meant[link], answer)
    whose = f"{ranks_text([target.rank for target in targets])} on {nodes_text([link.host for link in asked])}"
    text = f"{name} sent to {num_sent} of {len(targets)} processes of {whose}"
    text += f"; {num_gone} had ended" if num_gone else ""
    if problems:
        raise SessionError("; ".join([text, *problems]))
    return clean(text)


def _send(link: AgentLink, targets: Sequence[Target], number: int) -> list[str]:
    processes = [f"{target.pid}:{target.start}:{target.uid}" for target in targets]
    answer = last_line(link, sources.getsource(signal_on_host), str(number), *processes)
    try:
        return msgspec.json.decode(answer, type=list[str])
    except DECODE_ERRORS as error:
        raise HostUnreachableError(link.host, f"its Python answers something else: {clean(str(error))}") from error


def _problems(targets: Sequence[Target], answers: Sequence[str]) -> list[str]:
    """Return why signals were not sent, by reason."""
    problems = []
    whys = Counter(answer for answer in answers if answer not in (signal_on_host.SENT, signal_on_host.GONE))
    for why in whys:
        pids = ", ".join(str(target.pid) for target, answer in zip(targets, answers, strict=True) if answer == why)
        is_another = why == signal_on_host.ANOTHER
        reason = "is another process by now, and was left alone" if is_another else clean(why)
        problems.append(f"pid {pids} on {targets[0].host}: {reason}")
    return problems
