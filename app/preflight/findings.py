"""What hosts were asked before a job, their answers, and the findings. Pure.

A host's answer is decoded by its schema and then cleaned: from here on it is safe to show.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any, TypeVar

import msgspec

from agent.wire.examination import Examination, Facts, Health, Listening, Reached, Row
from app.errors import ExitCode
from app.text import LINE_LIMIT, NAME_LIMIT, clean

_LONG_FIELDS = frozenset({"detail", "todo", "path", "workdir"})
_WORD_LIMIT = 64
_NAMES = frozenset({"hostname", "gpus", "name"})


class HostStep(StrEnum):
    """How far a host is on the way to its agent; the words are for people."""

    CONNECTING = "connecting"
    ASKING_AGENT = "looking for its agent"
    READY = "ready"
    FAILED = "failed"


class Step(StrEnum):
    """Step of a host's examination; the values are shown to users."""

    EXAMINING = "looks at itself"
    WAITING = "waits for the others"
    LISTENING = "listens, and answers the time"
    REACHING = "tries to reach the others"
    DONE = "has answered"
    FAILED = "does not answer"


class Wanted(msgspec.Struct, frozen=True):
    """A host, and what a job would use there."""

    host: str
    """Name of the host, as the user typed it."""
    num_ranks: int | None = None
    """Ranks; None is one for each GPU."""
    python: str = ""
    """Python of the job; empty is the one that has rankdeck."""
    workdir: str = ""
    """Working directory; empty leaves the program there uncompared."""


class ClockDifference(msgspec.Struct, frozen=True):
    """How far a host's clock is ahead of this machine's; less than `uncertainty_s` may be none."""

    offset_s: float
    uncertainty_s: float


class FailureKind(Enum):
    """Why a host did not answer, by how far the connection got."""

    HOST_KEY = "host_key"
    UNREACHABLE = "reachable"
    RANKDECK = "agent_python"


class Failure(msgspec.Struct, frozen=True):
    """Why a host did not answer."""

    kind: FailureKind
    message: str
    hint: str
    exit_code: ExitCode


class Answers(msgspec.Struct, frozen=True):
    """A host's answers; what was not asked, or not answered, is None."""

    wanted: Wanted
    is_remote: bool = True
    """False for this machine, without SSH."""
    failure: Failure | None = None
    examination: Examination | None = None
    clock: ClockDifference | None = None
    listening: Listening | None = None
    reached: dict[str, Reached] | None = None
    """Results by host that was to be reached; None if this host could not be asked."""
    reach_error: str = ""

    @property
    def host(self) -> str:
        """Name of the host, as the user typed it."""
        return self.wanted.host


class HostFindings(msgspec.Struct, frozen=True):
    """All rows of a host: its own report, and the comparison with the others."""

    host: str
    rows: tuple[Row, ...]
    facts: Facts | None = None
    clock: ClockDifference | None = None
    failure: Failure | None = None

    @property
    def health(self) -> Health:
        """The worst of its rows."""
        return worst(self.rows)


class Preflight(msgspec.Struct, frozen=True):
    """Findings on all hosts."""

    hosts: tuple[HostFindings, ...]
    rows: tuple[Row, ...]
    """Rows about all hosts together."""

    def without(self, name: str) -> Preflight:
        """Return the same without the rows of a name."""
        hosts = (
            msgspec.structs.replace(one, rows=tuple(row for row in one.rows if row.name != name)) for one in self.hosts
        )
        return Preflight(tuple(hosts), tuple(row for row in self.rows if row.name != name))

    @property
    def problems(self) -> list[str]:
        """A sentence for each cause that would make a job over these hosts fail, safe to show."""
        of_all = [_sentence("", row) for row in self.rows if row.status is Health.BAD]
        return of_all + [_sentence(one.host, row) for one in self.hosts for row in one.rows if row.status is Health.BAD]

    @property
    def exit_code(self) -> ExitCode:
        """That of the first host that did not answer; else 1 where a job would fail."""
        failed = next((one.failure for one in self.hosts if one.failure is not None), None)
        if failed is not None:
            return failed.exit_code
        return ExitCode.JOB_FAILED if self.problems else ExitCode.WELL


def _sentence(host: str, row: Row) -> str:
    where = f"{host}: " if host else ""
    return f"{where}{row.name.replace('_', ' ')}: {row.detail}{f' ({row.todo})' if row.todo else ''}"


def worst(rows: tuple[Row, ...]) -> Health:
    return max((row.status for row in rows), key=list(Health).index, default=Health.OK)


_Answer = TypeVar("_Answer", bound=msgspec.Struct)


def cleaned(answer: _Answer) -> _Answer:
    """Return a host's answer with all its text safe to show; no text exceeds its schema's limit."""
    return msgspec.convert(_cleaned(msgspec.to_builtins(answer), ""), type(answer))


def _cleaned(value: Any, field: str) -> Any:
    match value:
        case str():
            limit = LINE_LIMIT if field in _LONG_FIELDS else NAME_LIMIT if field in _NAMES else _WORD_LIMIT
            return clean(value, 1024 if field == "error" else limit)
        case dict():
            return {key: _cleaned(inner, key) for key, inner in value.items()}
        case list():
            return [_cleaned(inner, field) for inner in value]
    return value
