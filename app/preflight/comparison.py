"""Compares hosts before a job: which one differs from the others, in what, and what to do about it.

Pure. `compare` compares what the hosts report of themselves. `code_remarks` checks whether all hosts would run the same
program: by the digests of its files, and by git's commit. `odd_ones` finds the hosts that differ.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.examination import Health, Row
from app.preflight.findings import Answers, FailureKind, HostFindings, Preflight
from app.preflight.mesh import reach_remarks
from app.text import nodes_text, seconds_text, short_seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.wire.examination import Code, Facts
    from app.preflight.findings import ClockDifference

    Remark = tuple[str, Row]
    """A host, or an empty name for all of them together, and its finding."""

MAX_CLOCK_DIFFERENCE_S = 1.0
"""Seconds allowed: logs of two nodes are merged by their clocks, and a file dated in the future is not rebuilt."""
_COMPARED = (
    ("rankdeck", "rankdeck", Health.WARN, "install the same rankdeck there: {usual}"),
    ("job_python", "python", Health.WARN, "use the same Python there: {usual}"),
    ("torch", "torch", Health.BAD, "install the same torch there: {usual}"),
    ("cuda", "cuda", Health.WARN, "install a torch that is built for the same: {usual}"),
    ("nccl", "nccl", Health.BAD, "install a torch with the same NCCL: {usual}"),
    ("driver", "driver", Health.WARN, "install the same driver there: {usual}"),
)
"""Rows that compare: name, the field of `Facts`, how bad a difference is, what to do."""


def compare(answers: Sequence[Answers]) -> Preflight:
    """Return the findings on hosts, each by itself and beside the others, in their order."""
    remarks = [
        *_version_remarks(answers),
        *_gpu_remarks(answers),
        *code_remarks(answers),
        *_name_remarks(answers),
        *_mtu_remarks(answers),
        *_clock_remarks(answers),
        *reach_remarks(answers),
    ]
    hosts = []
    for one in answers:
        beside = [row for host, row in remarks if host == one.host]
        replaced = {row.name for row in beside}
        own = [
            row
            for row in (*_access_rows(one), *(one.examination.rows if one.examination else ()))
            if row.name not in replaced or row.status is not Health.OK
        ]
        facts = one.examination.facts if one.examination else None
        hosts.append(HostFindings(one.host, (*own, *beside), facts, one.clock, one.failure))
    return Preflight(tuple(hosts), tuple(row for host, row in remarks if not host))


def _access_rows(one: Answers) -> Iterator[Row]:
    """Yield the rows about reaching a host."""
    if one.is_remote:
        kind = one.failure.kind if one.failure else None
        if kind is not FailureKind.UNREACHABLE:
            yield Row("reachable", Health.OK, "SSH answers")
        if kind is None or kind is FailureKind.RANKDECK:
            yield Row("host_key", Health.OK, "known, and the same")
    if one.failure:
        yield Row(one.failure.kind.value, Health.BAD, one.failure.message, one.failure.hint)


def _facts(answers: Sequence[Answers]) -> dict[str, Facts]:
    return {one.host: one.examination.facts for one in answers if one.examination is not None}


def _version_remarks(answers: Sequence[Answers]) -> Iterator[Remark]:
    facts = _facts(answers)
    for name, field, status, todo in _COMPARED:
        values = {host: getattr(found, field) for host, found in facts.items() if getattr(found, field)}
        yield from _odd_remarks(name, values, status, todo)


def _odd_remarks(name: str, values: dict[str, str], status: Health, todo: str) -> Iterator[Remark]:
    """Yield the hosts that differ; `todo` may contain the usual value."""
    odd = odd_ones(values)
    if odd is None:
        return
    if odd.usual is None:
        detail = "; ".join(f"{value} on {nodes_text(hosts, MAX_HOSTS_NAMED)}" for value, hosts in odd.by_value.items())
        yield "", Row(name, status, detail, todo.format(usual="whichever it is"))
        return
    for value, hosts in odd.by_value.items():
        for host in hosts:
            detail = f"{value}; {odd.others} have {odd.usual}"
            yield host, Row(name, status, detail, todo.format(usual=odd.usual))


def _gpu_remarks(answers: Sequence[Answers]) -> Iterator[Remark]:
    gpus = {host: found.gpus for host, found in _facts(answers).items()}
    if not any(gpus.values()):
        return
    free_counts = {}
    for one in answers:
        if one.host not in gpus:
            continue
        count = len(gpus[one.host])
        if one.wanted.num_ranks is None:
            free_counts[one.host] = _gpus_text(count)
        elif count < one.wanted.num_ranks:
            detail = f"{_gpus_text(count)} for the {one.wanted.num_ranks} ranks asked for"
            yield one.host, Row("gpus", Health.BAD, detail, _FEW_GPUS.format(count) if count else _NO_GPUS)
    todo = "find the lost one (nvidia-smi -L; dmesg), or give the hosts their nproc in the inventory"
    yield from _odd_remarks("gpus", free_counts, Health.WARN, todo)
    kinds = {host: ", ".join(dict.fromkeys(names)) for host, names in gpus.items() if names}
    yield from _odd_remarks("gpu_models", kinds, Health.WARN, "the slowest sets the pace of all: leave it out?")


_FEW_GPUS = (
    "find the lost one (nvidia-smi -L; dmesg), ask for {} (--nproc-per-node, nproc in the inventory), or: --share-gpus"
)
_NO_GPUS = "is it the host? for ranks on CPUs: --env CUDA_VISIBLE_DEVICES="


def _gpus_text(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}"


def _name_remarks(answers: Sequence[Answers]) -> Iterator[Remark]:
    """Yield hosts that share a name, by which agents' directories are named."""
    same: dict[str, list[str]] = {}
    facts = _facts(answers)
    for host, found in facts.items():
        same.setdefault(found.hostname, []).append(host)
    for hostname, hosts in same.items():
        if len(hosts) < 2:
            continue
        named = nodes_text(hosts, MAX_HOSTS_NAMED)
        addresses = {facts[host].address for host in hosts}
        if len(addresses) == 1:
            detail = f"{named} are the same machine: {hostname}, {addresses.pop() or 'without an address'}"
            yield "", Row("same_machine", Health.BAD, detail, "name it once")
        else:
            todo = "give each a name of its own (hostnamectl set-hostname): where homes are shared, agents live by it"
            yield "", Row("hostname", Health.WARN, f"{named} all call themselves {hostname}", todo)


def _mtu_remarks(answers: Sequence[Answers]) -> Iterator[Remark]:
    values = {}
    for host, found in _facts(answers).items():
        mtu = next((one.mtu for one in found.interfaces if one.address == found.address), 0)
        if mtu:
            values[host] = f"packets of {mtu} bytes"
    todo = "ip link set dev INTERFACE mtu N, alike on all: what is larger than the way takes vanishes, and a job hangs"
    yield from _odd_remarks("mtu", values, Health.WARN, todo)


def _clock_remarks(answers: Sequence[Answers]) -> Iterator[Remark]:
    clocks = {one.host: one.clock for one in answers if one.clock is not None}
    off = {host: clock for host, clock in clocks.items() if _is_off(clock)}
    if len(off) > 1 and len(off) == len(clocks) and _are_together([*off.values()]):
        offset_s = next(iter(off.values())).offset_s
        detail = f"this machine is {difference_text(-offset_s, 'all hosts')}, which agree"
        yield "", Row("clock", Health.WARN, detail, "set its clock: timedatectl set-ntp true")
        return
    for host, clock in clocks.items():
        if host in off:
            within = short_seconds_text(clock.uncertainty_s)
            detail = f"{difference_text(clock.offset_s, 'this machine')}, to within {within}"
            yield host, Row("clock", Health.WARN, detail, "set it: timedatectl set-ntp true, or chronyc makestep")
        else:
            detail = f"as this machine's, to within {short_seconds_text(abs(clock.offset_s) + clock.uncertainty_s)}"
            yield host, Row("clock", Health.OK, detail)


def _is_off(clock: ClockDifference) -> bool:
    return abs(clock.offset_s) - clock.uncertainty_s > MAX_CLOCK_DIFFERENCE_S


def _are_together(clocks: Sequence[ClockDifference]) -> bool:
    spread_s = max(clock.offset_s for clock in clocks) - min(clock.offset_s for clock in clocks)
    return spread_s <= MAX_CLOCK_DIFFERENCE_S + 2 * max(clock.uncertainty_s for clock in clocks)


def difference_text(offset_s: float, whose: str) -> str:
    """Return `42 s ahead of h1` or `42 s behind h1`."""
    return f"{seconds_text(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} {whose}"


MAX_NAMED = 3
SHORT = 9
_TODO = "bring all to the same: git pull, or rsync -a --delete"


def code_remarks(answers: Sequence[Answers]) -> Iterator[tuple[str, Row]]:
    """Yield the hosts whose program differs, each with a row; an empty name stands for all of them."""
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
    for host, detail in _odd_details(odd):
        yield host, Row("code", Health.WARN, f"{detail}; its source files are the same", _TODO)


def commit_text(code: Code) -> str:
    """Return `9f3a1c2e4`, with a plus where files differ from that commit."""
    return f"{code.commit[:SHORT]}{'+' if code.num_changed else ''}" if code.commit else "no commit"


def _by_commit(codes: Mapping[str, Code]) -> Iterator[tuple[str, Row]]:
    """Compare programs with too many files to be read."""
    if all(code.commit for code in codes.values()):
        odd = odd_ones({host: commit_text(code) for host, code in codes.items()})
        for host, detail in _odd_details(odd):
            yield host, Row("code", Health.BAD, detail, _TODO)
        if odd is not None or not any(code.num_changed for code in codes.values()):
            return
    many = nodes_text([host for host, code in codes.items() if not code.digest], MAX_HOSTS_NAMED)
    yield "", Row("code", Health.WARN, f"not compared: too many source files on {many}", "name a smaller --workdir")


def _odd_details(odd: Odd | None) -> Iterator[tuple[str, str]]:
    """Yield the hosts that differ by commit, and how."""
    if odd is None:
        return
    if odd.usual is None:
        yield "", "; ".join(f"{value} on {nodes_text(hosts, MAX_HOSTS_NAMED)}" for value, hosts in odd.by_value.items())
        return
    for value, hosts in odd.by_value.items():
        for host in hosts:
            yield host, f"{value}; {odd.others} are at {odd.usual}"


def _by_files(codes: Mapping[str, Code], odd: Odd) -> Iterator[tuple[str, Row]]:
    """Yield the hosts whose files differ, with the files."""
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
    """Return the known differences of one program from another."""
    differences = []
    if code.commit and usual.commit and code.commit != usual.commit:
        differences.append(f"commit {code.commit[:SHORT]}, not {usual.commit[:SHORT]}")
    if code.files and usual.files:
        mine = {file.path: file.digest for file in code.files}
        theirs = {file.path: file.digest for file in usual.files}
        differences += [f"{path} is missing" for path in theirs if path not in mine]
        differences += [f"{path} is only there" for path in mine if path not in theirs]
        differences += [f"{path} differs" for path in mine if path in theirs and mine[path] != theirs[path]]
    more = f" and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    return f": {', '.join(differences[:MAX_NAMED])}{more}" if differences else ""


MAX_HOSTS_NAMED = 4
"""Hosts named in one sentence."""


class Odd(NamedTuple):
    """Differences of a value between hosts."""

    usual: str | None
    """Value of more than half of the hosts; None if there is none."""
    others: str
    """Text for the hosts with the usual value: `the others` or `most others`."""
    by_value: dict[str, list[str]]
    """Hosts of each value that is not the usual one, in the order of the hosts."""


def odd_ones(values: Mapping[str, str]) -> Odd | None:
    """Return the differences; None where all values are equal.

    Args:
        values: By host.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    most, count = counts.most_common(1)[0]
    usual = most if 2 * count > len(values) else None
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        if value != usual:
            by_value.setdefault(value, []).append(host)
    num_odd = len(values) - count
    return Odd(usual, "the others" if num_odd == 1 else "most others", by_value)
