"""Whether reports can come straight over TCP: hosts listen where their agents would, and we try to get there.

Everything here blocks, within bounds.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from agent.wire.examination import MAX_TARGETS, Listening
from app.at_once import at_once
from app.errors import AppError
from app.preflight.findings import TelemetryLook
from app.preflight.listeners import begin_listening, try_to_reach
from app.preflight.mesh import target_text
from app.safe_text import LINE_LIMIT, clean
from app.ssh.local_link import LocalLink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.examination import Reached
    from app.preflight.findings import Answers
    from app.ssh.agent_link import AgentLink


def look_at_telemetry(links: Mapping[str, AgentLink], answers: dict[str, Answers]) -> None:
    """Put what is found into the answers of hosts that have a `TelemetryWish`."""
    with ExitStack() as talks:

        def begin(host: str) -> Listening:
            wish = answers[host].wanted.telemetry
            assert wish is not None
            first, last = map(str, wish.ports)
            options = ("--interface", wish.interface, "--port", first, "--last-port", last)
            return begin_listening(links[host], talks, *options)[1]

        begun = dict(zip(links, at_once([*links], begin), strict=True))
        targets = {host: _targets(found) for host, found in begun.items() if isinstance(found, Listening)}
        reached = _reached_from_here([target for some in targets.values() for target in some])
    for host, found in begun.items():
        if isinstance(found, AppError):
            look = TelemetryLook(error=clean(found.said_of(host), LINE_LIMIT))
        elif isinstance(reached, AppError):
            look = TelemetryLook(found, error=clean(str(reached), LINE_LIMIT) if targets[host] else "")
        else:
            look = TelemetryLook(found, tuple(reached[target] for target in targets[host]))
        answers[host] = msgspec.structs.replace(answers[host], telemetry=look)


def _targets(listening: Listening) -> list[str]:
    """Return where to knock: nowhere if the agent listens itself, which says nothing to strangers."""
    if listening.error or listening.is_agents:
        return []
    return [target for address in listening.addresses if (target := target_text(listening, address))]


def _reached_from_here(targets: list[str]) -> dict[str, Reached] | AppError:
    pieces = [targets[begin : begin + MAX_TARGETS] for begin in range(0, len(targets), MAX_TARGETS)]
    found: dict[str, Reached] = {}
    for piece in at_once(pieces, lambda piece: try_to_reach(LocalLink(), piece)):
        if isinstance(piece, AppError):
            return piece
        found |= piece
    return found
