"""The jobs of a cluster, as the tables `[job.NAME]` of a `rankdeck.toml` name them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from agent.wire.jobs import MAX_LOCAL_WORLD_SIZE, MAX_PATTERN_CHARS, MAX_PATTERNS, MAX_RESTARTS
from app.errors import UsageError
from app.inventory.program import check_command, check_job_id
from app.inventory.tables import (
    WrongValueError,
    seconds,
    text,
    texts,
    whole_number,
    yes_or_no,
)
from app.settings.schema import repeated

if TYPE_CHECKING:
    from app.inventory.tables import Fields, TableReader

MAX_JOBS = 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobEntry(msgspec.Struct, frozen=True):
    """A job that can be started by its name; empty fields are as for `rankdeck run`."""

    name: str
    command: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    """Host patterns of the inventory; empty is all of it."""
    num_ranks: int | None = None
    """Ranks of each host."""
    workdir: str = ""
    python: str = ""
    """Python of the ranks."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables added to those of the agents."""
    master_addr: str = ""
    max_restarts: int = 0
    grace_s: float | None = None
    save_s: float | None = None
    abandon_s: float = 0.0
    metrics: tuple[str, ...] = ()
    shares_gpus: bool = False
    is_probed: bool = True
    allow_faults: bool = False


def read_jobs(tables: object, reader: TableReader) -> tuple[JobEntry, ...]:
    """Return the jobs of a file; the reader keeps their errors."""
    if not isinstance(tables, dict):
        reader.complain(("job",), "job is a table of tables: write [job.NAME] above each job")
        return ()
    if len(tables) > MAX_JOBS:
        reader.complain(("job",), f"{len(tables)} jobs are more than {MAX_JOBS}")
    jobs = []
    for name, table in list(tables.items())[:MAX_JOBS]:
        path = ("job", name)
        try:
            check_job_id(name)
        except UsageError as error:
            reader.complain(path, f"{error}: {error.hint}")
        values: dict[str, Any] = reader.values(table, _JOB, path, f"[job.{name}]")
        if "command" in values:
            jobs.append(JobEntry(name, **values))
        elif isinstance(table, dict) and "command" not in table:
            reader.complain(path, 'a job has a command: command = ["train.py", "--epochs", "3"]')
    return tuple(jobs)


def is_variable(name: str) -> bool:
    """Return whether a name is valid for an environment variable."""
    return _VARIABLE.fullmatch(name) is not None


def _command(value: object) -> tuple[str, ...]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(word, str) and "\0" not in word for word in value)
    ):
        raise WrongValueError(f'{repeated(value)} is no list of words, as ["train.py", "--epochs", "3"]')
    try:
        return check_command(tuple(value))
    except UsageError as error:
        raise WrongValueError(str(error)) from None


def _patterns(value: object) -> tuple[str, ...]:
    patterns = texts(value)
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise WrongValueError(f"at most {MAX_PATTERNS} patterns of at most {MAX_PATTERN_CHARS} characters are taken")
    return patterns


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise WrongValueError(f'{repeated(value)} is no table of variables: {{ NAME = "value" }}')
    for name, given in value.items():
        if not is_variable(name):
            raise WrongValueError(f"{repeated(name)} is no name of a variable")
        if not isinstance(given, str) or "\0" in given:
            raise WrongValueError(f"{name}: {repeated(given)} is no text")
    return tuple(value.items())


_JOB: Fields = {
    "command": ("command", _command),
    "hosts": ("hosts", texts),
    "nproc": ("num_ranks", whole_number(1, MAX_LOCAL_WORLD_SIZE)),
    "workdir": ("workdir", text),
    "python": ("python", text),
    "env": ("env", _environment),
    "master_addr": ("master_addr", text),
    "max_restarts": ("max_restarts", whole_number(0, MAX_RESTARTS)),
    "grace_s": ("grace_s", seconds),
    "save_s": ("save_s", seconds),
    "abandon_s": ("abandon_s", seconds),
    "metrics": ("metrics", _patterns),
    "share_gpus": ("shares_gpus", yes_or_no),
    "probe": ("is_probed", yes_or_no),
    "allow_faults": ("allow_faults", yes_or_no),
}
