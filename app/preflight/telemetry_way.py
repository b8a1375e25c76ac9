"""Whether reports can come straight over TCP: hosts listen where their agents would, and we try to get there.

Each host for itself, and no longer than that takes: where the inventory names one port, an agent that is asked to
listen for a console meanwhile finds it taken. Everything here blocks, within bounds.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from app.at_once import at_once
from app.errors import AgentUnreachableError, AppError
from app.preflight.findings import TelemetryLook
from app.preflight.listeners import begin_listening, try_to_reach
from app.preflight.mesh import target_text
from app.roads.direct_addresses import addresses_to_try
from app.safe_text import LINE_LIMIT, clean
from app.ssh.local_link import LocalLink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.examination import Listening
    from app.preflight.findings import Answers
    from app.ssh.agent_link import AgentLink


def look_at_telemetry(links: Mapping[str, AgentLink], answers: dict[str, Answers]) -> None:
    """Put what is found into the answers of hosts that have a `TelemetryWish`."""
    looks = at_once([*links], lambda host: _look(links[host], answers[host]))
    for host, found in zip(links, looks, strict=True):
        look = TelemetryLook(error=clean(found.said_of(host), LINE_LIMIT)) if isinstance(found, AppError) else found
        answers[host] = msgspec.structs.replace(answers[host], telemetry=look)


def _look(link: AgentLink, one: Answers) -> TelemetryLook:
    wish = one.wanted.telemetry
    assert wish is not None
    first, last = wish.ports
    options = ("--interface", wish.interface, "--port", str(first), "--last-port", str(last))
    with ExitStack() as talks:
        talk, listening = begin_listening(link, talks, *options)
        talks.callback(talk.end)
        # Its word is where this machine connects.
        if not listening.error and first and not first <= listening.port <= last:
            raise AgentUnreachableError(link.host, f"it names port {listening.port}, which telemetry_port does not")
        targets = _targets(listening, one.examination.facts.address if one.examination else "")
        try:
            reached = try_to_reach(LocalLink(), targets) if targets else {}
        except AppError as error:
            return TelemetryLook(listening, error=clean(str(error), LINE_LIMIT))
        return TelemetryLook(listening, tuple(reached.values()))


def _targets(listening: Listening, preferred: str) -> list[str]:
    """Return where to knock, as a console would; nowhere if the agent listens itself: it says nothing to strangers."""
    if listening.error or listening.is_agents:
        return []
    addresses = addresses_to_try(listening.addresses, preferred)
    return [target for address in addresses if (target := target_text(listening, address))]
