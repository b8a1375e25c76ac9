"""What is to be said of the way that reports take which come straight over TCP. Pure.

Nothing here is worse than a warning: where that way is closed, reports come over SSH.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.examination import Health, Row
from app.preflight.mesh import why_not_reached
from app.words import short_seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.examination import Listening
    from app.preflight.findings import Answers, TelemetryLook, TelemetryWish

ROW = "telemetry"
_ELSE = "until then its reports come over SSH"


def telemetry_remarks(answers: Sequence[Answers]) -> Iterator[tuple[str, Row]]:
    """Yield hosts that are to send their reports straight over TCP, each with a row."""
    for one in answers:
        if one.wanted.telemetry is not None and one.telemetry is not None:
            yield one.host, _row(one.wanted.telemetry, one.telemetry)


def _row(wish: TelemetryWish, look: TelemetryLook) -> Row:
    listening = look.listening
    if listening is None:
        todo = f"try again, or bring the same rankdeck there as here: rankdeck install; {_ELSE}"
        return Row(ROW, Health.WARN, f"it does not say where it would listen: {look.error}", todo)
    if listening.error and not listening.address:
        todo = f"name one that it has by telemetry_interface (there: ip addr); {_ELSE}"
        return Row(ROW, Health.WARN, listening.error, todo)
    if listening.error:
        detail = f"it cannot listen on {wish.interface}: {listening.error}"
        return Row(ROW, Health.WARN, detail, f"name other ports by telemetry_port; {_ELSE}")
    place = f"{wish.interface}, {', '.join(listening.addresses)}, TCP port {listening.port}"
    if listening.is_agents:
        return Row(ROW, Health.OK, f"its agent listens at {place} for a console that looks on; not tried")
    return _reached_row(wish, look, listening, place)


def _reached_row(wish: TelemetryWish, look: TelemetryLook, listening: Listening, place: str) -> Row:
    if look.error:
        return Row(ROW, Health.WARN, f"{place}: whether it is reached is not known: {look.error}", "try again")
    if not look.reached:
        todo = f"name one with an address that this machine has a route to by telemetry_interface; {_ELSE}"
        return Row(ROW, Health.WARN, f"it listens at {place}, where no other machine can reach it", todo)
    whys = [why_not_reached(reached, listening.token) for reached in look.reached]
    ways_s = [reached.connect_s for reached, why in zip(look.reached, whys, strict=True) if not why]
    if ways_s:
        return Row(ROW, Health.OK, f"{place}, is reached from this machine in {short_seconds_text(min(ways_s))}")
    first, last = wish.ports
    ports = f"TCP ports {first}-{last}" if last > first else f"TCP port {first}"
    through = (
        f"let {ports} through the firewalls" if first else "let it through the firewalls (telemetry_port fixes it)"
    )
    return Row(
        ROW,
        Health.WARN,
        f"this machine does not reach {place}: {whys[0]}",
        f"{through}, or name another telemetry_interface; {_ELSE}",
    )
