"""Hosts as they answer before a job, for tests of what is made of it."""

from __future__ import annotations

from typing import Any

import msgspec

from agent.wire.examination import Code, Examination, Facts, FileDigest, Health, Interface, Listening, Reached, Row
from app.errors import ExitCode
from app.preflight.findings import Answers, ClockDifference, Failure, FailureKind, HostFindings, Preflight, Wanted

FACTS = Facts(
    hostname="",
    rankdeck="0.1.0",
    python="3.11.9",
    torch="2.13.0+cu129",
    cuda="12.9",
    nccl="2.27.5",
    driver="570.172.08",
    gpus=["NVIDIA H100 80GB HBM3"] * 8,
)
ROWS = [Row("torch", Health.OK, "2.13.0+cu129"), Row("disk", Health.OK, "500 MiB free at /")]
H1, H2, H3, H4 = "h1", "h2", "h3", "h4"


def address(host: str) -> str:
    """Return where a host is."""
    return f"10.0.0.{sum(map(ord, host)) % 250 + 1}"


def facts(host: str, **changes: Any) -> Facts:
    """Return what a host is like, and the others too but for `changes`."""
    place = {"hostname": host, "address": address(host), "interfaces": [Interface("eth0", address(host), 1500)]}
    return msgspec.structs.replace(FACTS, **(place | changes))


def code(commit: str = "a" * 40, num_changed: int = 0, digest: str = "d1", **files: str) -> Code:
    """Return a program; `train="1"` is a file `train.py` with that digest."""
    listed = [FileDigest(f"{name}.py", value) for name, value in files.items()]
    return Code("/work", commit, num_changed, digest, listed)


def answers(
    host: str,
    *rows: Row,
    num_ranks: int | None = None,
    clock: ClockDifference | None = None,
    changes: dict[str, Any] | None = None,
    **more_changes: Any,
) -> Answers:
    """Return a host that is well but for what is said; `changes` and what is left are of its facts."""
    examination = Examination(1, [*ROWS, *rows], facts(host, **(changes or {}), **more_changes))
    return Answers(Wanted(host, num_ranks), examination=examination, clock=clock)


def failed(
    host: str, kind: FailureKind = FailureKind.UNREACHABLE, exit_code: ExitCode = ExitCode.UNREACHABLE
) -> Answers:
    """Return a host that does not answer."""
    return Answers(Wanted(host), failure=Failure(kind, "it sleeps", "wake it", exit_code))


def meshed(*hosts: Answers, broken: dict[tuple[str, str], str] | None = None) -> list[Answers]:
    """Return hosts that have tried to reach each other; `broken` has what went wrong between two."""

    def reached(source: str, target: str) -> Reached:
        error = (broken or {}).get((source, target), "")
        return Reached("", "" if error else token(target), 0.0004, "eth0", error)

    names = [one.host for one in hosts]
    return [
        msgspec.structs.replace(
            one,
            listening=Listening(1, address(one.host), 40_000, token(one.host)),
            reached={other: reached(one.host, other) for other in names if other != one.host},
        )
        for one in hosts
    ]


def token(host: str) -> str:
    """Return what a host's listener says."""
    return f"token of {host}"


def of_host(found: Preflight, host: str) -> HostFindings:
    """Return what is said of a host."""
    return next(one for one in found.hosts if one.host == host)


def unwell(found: Preflight) -> list[tuple[str, str, str]]:
    """Return host, or nothing, name and detail of every row that is not well."""
    of_all = [("", row.name, row.detail) for row in found.rows if row.status is not Health.OK]
    return of_all + [
        (one.host, row.name, row.detail) for one in found.hosts for row in one.rows if row.status is not Health.OK
    ]
