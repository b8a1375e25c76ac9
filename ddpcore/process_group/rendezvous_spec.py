"""How this rank is to meet the others: arguments, URL and environment made one, or refused.

Pure: the environment is an argument. What contradicts itself is refused here, before any rank waits for another.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from ddpcore.errors import ContradictoryLaunchError, NotLaunchedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOW_TO_RUN = "start the program with `torchrun --nproc-per-node 4 SCRIPT`, or give rank, world_size and init_method"
_HOW_TO_MEET = "use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"
_MAX_PORT = 65_535
_URL_KEYS = frozenset({"rank", "world_size", "use_libuv"})
_FOREIGN_RANKS = {
    "SLURM_PROCID": "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}
"""Variables in which other launchers keep rank and world size."""

NUM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Tasks of a step of srun. SLURM_NTASKS is the allocation's: with it and SLURM_PROCID=0 a batch script looks like one
of several tasks, which it is not (Slurm 22.05)."""

_FIRST_PORT, _NUM_PORTS = 15_000, 10_000
"""Ports of steps of srun, all below those that Linux gives to clients."""

_NUMBER = re.compile("[0-9]{1,10}")
_PORTS_A_STEP = 101
"""Distance between the ports of a job's steps, more than the jobs that share a node differ in their numbers."""


class Scheme(StrEnum):
    """Kind of a rendezvous."""

    ENV = "env"
    """MASTER_ADDR:MASTER_PORT."""
    TCP = "tcp"
    FILE = "file"


class LocalNumbers(NamedTuple):
    """Numbers of this rank on its node, by its launcher; None is unknown."""

    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class RendezvousSpec(msgspec.Struct, frozen=True):
    """Rendezvous of this rank with the others."""

    scheme: Scheme
    rank: int
    world_size: int
    url: str
    """URL for `torch.distributed.rendezvous`. Its world size is -1: the join check waits, the store does not."""
    master_addr: str = ""
    master_port: int = 0
    path: str = ""
    """Path of the rendezvous file."""
    local: LocalNumbers = LocalNumbers()
    is_by_slurm: bool = False
    """srun has placed the ranks; the master is that of the environment, or the step's first node."""
    has_agent_store: bool = False
    """torchrun hosts the store: it outlives the ranks, and a second attempt finds the entries of the first one."""

    @property
    def hosts_store(self) -> bool:
        """True if the store lives and ends with this process."""
        return self.rank == 0 and self.scheme is not Scheme.FILE and not self.has_agent_store

    @property
    def where(self) -> str:
        """The rendezvous, for messages."""
        if self.scheme is Scheme.FILE:
            return f"file://{self.path}"
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{self.scheme}://{host}:{self.master_port}"


def read_rendezvous(
    init_method: str | None, rank: int | None, world_size: int | None, environ: Mapping[str, str]
) -> RendezvousSpec | None:
    """Return where and as which rank this process joins the others; None if it was not launched with others.

    `init_method` is env://, tcp://HOST:PORT or file:///PATH; None is env:// if a launcher or the arguments mean that
    there are ranks. `rank` and `world_size` come from the URL or the environment where they are None; the environment
    is torchrun's, or a step of srun with several tasks, each of which is a rank. Raises NotLaunchedError if something
    is absent or no number, ContradictoryLaunchError if two sources disagree, a number is out of range, or the URL makes
    no sense.
    """
    given, slurm = init_method, {} if rank is not None or world_size is not None else slurm_variables(environ)
    if slurm:
        environ = slurm | {name: value for name, value in environ.items() if value}
        if given in {None, "env://"} and "MASTER_ADDR" in environ:
            # By a URL: torch takes env:// from the process's own environment alone.
            host = environ["MASTER_ADDR"]
            init_method = f"tcp://{f'[{host}]' if ':' in host else host}:{environ['MASTER_PORT']}"
    if init_method is None:
        if not _is_launched(rank, world_size, environ):
            return None
        init_method = "env://"
    parts = _split(init_method)
    query = _query(parts)
    found_rank = _agreed("RANK", "rank", rank, query, environ)
    found_size = _agreed("WORLD_SIZE", "world_size", world_size, query, environ)
    if found_size < 1:
        raise ContradictoryLaunchError(f"world size {found_size}: there is at least one rank; {_HOW_TO_RUN}")
    if not 0 <= found_rank < found_size:
        raise ContradictoryLaunchError(
            f"rank {found_rank} is outside the world of {found_size}: ranks count from 0 to {found_size - 1}"
        )
    scheme = Scheme(parts.scheme)
    has_agent_store = scheme is not Scheme.FILE and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    path, master = "", ("", 0)
    if scheme is Scheme.FILE:
        path = _path(parts, init_method)
    else:
        master = _env_master(environ) if scheme is Scheme.ENV else _tcp_master(parts, init_method)
        if has_agent_store and scheme is Scheme.TCP:
            _check_against_torchrun(master, environ)
    return RendezvousSpec(
        scheme=scheme,
        rank=found_rank,
        world_size=found_size,
        url=_torch_url(parts, found_rank, query),
        master_addr=master[0],
        master_port=master[1],
        path=path,
        local=_local_numbers(environ, found_size),
        is_by_slurm=bool(slurm) and init_method != given,
        has_agent_store=has_agent_store,
    )


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables as a step of srun means them; none in what is not one of its several tasks.

    Not where RANK is set, by torchrun in each task, or where mpirun in each task has started other ranks. On one node
    the ranks need no name of it. On several the first one of the step's list has task 0, and the port follows from the
    numbers of job and step, so that two of them on a node hardly ever take the same.
    """
    rank, num_tasks, job, step, local_rank, node_rank = (
        number if _NUMBER.fullmatch(number := environ.get(name, "")) else ""
        for name in ("SLURM_PROCID", NUM_TASKS, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID")
    )
    others = {environ.get(name) or num_tasks for name in _FOREIGN_RANKS.values() if not name.startswith("SLURM")}
    if environ.get("RANK") or not (rank and num_tasks and job and step) or int(num_tasks) < 2 or others != {num_tasks}:
        return {}
    host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    ids_here = environ.get("SLURM_GTIDS", "")
    found = {
        "RANK": rank,
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(len(ids_here.split(","))) if ids_here else "",
        "GROUP_RANK": node_rank,
        "MASTER_ADDR": "127.0.0.1" if environ.get("SLURM_STEP_NUM_NODES") == "1" else host,
        "MASTER_PORT": str(_FIRST_PORT + (int(job) + _PORTS_A_STEP * int(step)) % _NUM_PORTS),
    }
    return {name: value for name, value in found.items() if value}


def first_host(nodes: str) -> str:
    """Return the first name of a list of Slurm's: gpu08 of `gpu[08-11,17],login1`. It may have several brackets.

    `scontrol show hostnames` prints all of them, but containers rarely have it.
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0])


def _is_launched(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> bool:
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return True
    return rank not in {None, 0} or world_size not in {None, 1}


def _split(init_method: str) -> SplitResult:
    parts = urlsplit(init_method)
    if not parts.scheme and init_method.startswith("/"):
        raise ContradictoryLaunchError(f"init_method {init_method!r} is a path: write file://{init_method}")
    if parts.scheme not in set(Scheme):
        raise ContradictoryLaunchError(f"init_method {init_method!r} is not known: {_HOW_TO_MEET}")
    if parts.fragment:
        raise ContradictoryLaunchError(f"init_method {init_method!r} has a '#' in it: {_HOW_TO_MEET}")
    return parts


def _query(parts: SplitResult) -> dict[str, str]:
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    unknown = sorted(set(query) - _URL_KEYS)
    if unknown:
        raise ContradictoryLaunchError(f"init_method takes rank, world_size and use_libuv, not {', '.join(unknown)}")
    return query


def _agreed(variable: str, name: str, given: int | None, query: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """Return the one number that all sources agree on."""
    sources: list[tuple[str, int]] = []
    if given is not None:
        sources.append((f"{name}={given} was given", given))
    if name in query:
        number = _to_int(f"init_method's {name}", query[name])
        sources.append((f"init_method has {name}={number}", number))
    if environ.get(variable):
        number = _to_int(variable, environ[variable])
        sources.append((f"the environment has {variable}={number}", number))
    if not sources:
        raise NotLaunchedError(f"{variable} is not set: {_foreign_hint(environ) or _HOW_TO_RUN}")
    first_text, first = sources[0]
    for text, number in sources[1:]:
        if number != first:
            raise ContradictoryLaunchError(f"{first_text}, but {text}: give it once, or the same number")
    return first


def _foreign_hint(environ: Mapping[str, str]) -> str:
    for rank_name, size_name in _FOREIGN_RANKS.items():
        if environ.get(rank_name):
            return (
                f"another launcher has set {rank_name}={environ[rank_name]}; "
                f"give rank=int(os.environ['{rank_name}']) and world_size=int(os.environ['{size_name}'])"
            )
    return ""


def _env_master(environ: Mapping[str, str]) -> tuple[str, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise NotLaunchedError(f"{name} is not set: it is where rank 0 listens; {_HOW_TO_RUN}")
    return environ["MASTER_ADDR"], _port("MASTER_PORT", _to_int("MASTER_PORT", environ["MASTER_PORT"]))


def _tcp_master(parts: SplitResult, init_method: str) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ContradictoryLaunchError(f"init_method {init_method!r}: {error}; {_HOW_TO_MEET}") from None
    if not host or port is None or parts.path not in {"", "/"}:
        raise ContradictoryLaunchError(
            f"init_method {init_method!r} does not name where rank 0 listens: write tcp://HOST:PORT"
        )
    return host, _port("init_method's port", port)


def _port(what: str, port: int) -> int:
    if not 0 < port <= _MAX_PORT:
        raise ContradictoryLaunchError(f"{what} is {port}: ports count from 1 to {_MAX_PORT}, and all ranks name one")
    return port


def _check_against_torchrun(master: tuple[str, int], environ: Mapping[str, str]) -> None:
    """Refuse a rendezvous under torchrun that no rank would host: all ranks are clients of its store."""
    theirs = (environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))
    if (master[0], str(master[1])) != theirs:
        raise ContradictoryLaunchError(
            f"tcp://{master[0]}:{master[1]} under torchrun, which hosts the store at {theirs[0]}:{theirs[1]}: "
            "leave init_method out, or start the ranks without torchrun"
        )


def _path(parts: SplitResult, init_method: str) -> str:
    if parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
        raise ContradictoryLaunchError(
            f"init_method {init_method!r} does not name a file by its absolute path: "
            "write file:///PATH, with three slashes"
        )
    return parts.path


def _torch_url(parts: SplitResult, rank: int, query: Mapping[str, str]) -> str:
    libuv = f"&use_libuv={query['use_libuv']}" if "use_libuv" in query else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}?rank={rank}&world_size=-1{libuv}"


def _local_numbers(environ: Mapping[str, str], world_size: int) -> LocalNumbers:
    """Return the launcher's facts of the node, if there are any; LOCAL_RANK alone is enough to choose a device.

    torchrun calls a node's number GROUP_RANK, Lightning NODE_RANK.
    """
    local_rank = _optional_int(environ, "LOCAL_RANK")
    if local_rank is None:
        return LocalNumbers()
    local_size = _optional_int(environ, "LOCAL_WORLD_SIZE")
    node_rank = _optional_int(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = _optional_int(environ, "NODE_RANK")
    if local_size is not None and not 1 <= local_size <= world_size:
        raise ContradictoryLaunchError(
            f"LOCAL_WORLD_SIZE={local_size} in a world of {world_size}: a node has 1 to {world_size} of its ranks"
        )
    limit = world_size if local_size is None else local_size
    if not 0 <= local_rank < limit:
        name = "WORLD_SIZE" if local_size is None else "LOCAL_WORLD_SIZE"
        raise ContradictoryLaunchError(f"LOCAL_RANK={local_rank} does not fit {name}={limit}: it counts from 0")
    return LocalNumbers(local_rank, local_size, node_rank)


def _optional_int(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return _to_int(name, value) if value else None


def _to_int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise NotLaunchedError(f"{name}={value!r} is not a number: {_HOW_TO_RUN}") from None
