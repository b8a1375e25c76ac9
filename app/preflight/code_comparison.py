"""Whether all hosts would run the same program: by the digests of its files, and by git's commit. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.examination import Health, Row
from app.preflight.oddity import MAX_HOSTS_NAMED, odd_ones
from app.words import nodes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.wire.examination import Code
    from app.preflight.findings import Answers
    from app.preflight.oddity import Odd

MAX_NAMED = 3
SHORT = 9
_TODO = "bring all to the same: git pull, or rsync -a --delete"


def code_remarks(answers: Sequence[Answers]) -> Iterator[tuple[str, Row]]:
    """Yield whose program differs from the others': the host, or nothing for all of them, and a row."""
    codes = {
        one.host: one.examination.facts.code
        for one in answers
        if one.examination is not None and one.examination.facts.code is not None
    }
    if len(codes) < 2:
        return
    if not all(code.digest for code in codes.values()):
        yield from _by_commit(codes)
        return
    odd = odd_ones({host: code.digest for host, code in codes.items()})
    if odd is not None:
        yield from _by_files(codes, odd)
        return
    odd = odd_ones({host: commit_text(code) for host, code in codes.items() if code.commit})
    for host, detail in _told(odd):
        yield host, Row("code", Health.WARN, f"{detail}; its source files are the same", _TODO)


def commit_text(code: Code) -> str:
    """Return `9f3a1c2e4`, with a plus where files are not as in that commit."""
    return f"{code.commit[:SHORT]}{'+' if code.num_changed else ''}" if code.commit else "no commit"


def _by_commit(codes: Mapping[str, Code]) -> Iterator[tuple[str, Row]]:
    """Compare what has too many files to be read."""
    if all(code.commit for code in codes.values()):
        odd = odd_ones({host: commit_text(code) for host, code in codes.items()})
        for host, detail in _told(odd):
            yield host, Row("code", Health.BAD, detail, _TODO)
        if odd is not None or not any(code.num_changed for code in codes.values()):
            return
    many = nodes_text([host for host, code in codes.items() if not code.digest], MAX_HOSTS_NAMED)
    yield "", Row("code", Health.WARN, f"not compared: too many source files on {many}", "name a smaller --workdir")


def _told(odd: Odd | None) -> Iterator[tuple[str, str]]:
    """Yield who differs by commit, and how."""
    if odd is None:
        return
    if odd.usual is None:
        yield "", "; ".join(f"{value} on {nodes_text(hosts, MAX_HOSTS_NAMED)}" for value, hosts in odd.by_value.items())
        return
    for value, hosts in odd.by_value.items():
        for host in hosts:
            yield host, f"{value}; {odd.others} are at {odd.usual}"


def _by_files(codes: Mapping[str, Code], odd: Odd) -> Iterator[tuple[str, Row]]:
    """Name the files that differ."""
    if odd.usual is None:
        groups = [nodes_text(hosts, MAX_HOSTS_NAMED) for hosts in odd.by_value.values()]
        first, second, *_ = (codes[hosts[0]] for hosts in odd.by_value.values())
        detail = f"{len(groups)} different programs: {' | '.join(groups[:MAX_NAMED])}{_difference(first, second)}"
        yield "", Row("code", Health.BAD, detail, _TODO)
        return
    usual = next(code for code in codes.values() if code.digest == odd.usual)
    for hosts in odd.by_value.values():
        for host in hosts:
            detail = f"not the program of {odd.others}{_difference(codes[host], usual)}"
            yield host, Row("code", Health.BAD, detail, _TODO)


def _difference(code: Code, usual: Code) -> str:
    """Return in what one program differs from another, as far as that is known."""
    told = []
    if code.commit and usual.commit and code.commit != usual.commit:
        told.append(f"commit {code.commit[:SHORT]}, not {usual.commit[:SHORT]}")
    if code.files and usual.files:
        mine = {file.path: file.digest for file in code.files}
        theirs = {file.path: file.digest for file in usual.files}
        told += [f"{path} is missing" for path in theirs if path not in mine]
        told += [f"{path} is only there" for path in mine if path not in theirs]
        told += [f"{path} differs" for path in mine if path in theirs and mine[path] != theirs[path]]
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return f": {', '.join(told[:MAX_NAMED])}{more}" if told else ""
