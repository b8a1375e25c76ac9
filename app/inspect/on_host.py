"""The part of `rankdeck inspect` that runs on a host: finds the ranks there and looks at them several times.

This text is sent to the host and run by its Python, of 3.9 or newer. It uses the standard library alone, only reads,
and prints one JSON object, compressed. /proc shows which processes are ranks, py-spy shows their stacks: it reads
beside a rank and never pauses it.

`find_ranks` numbers the ranks by what each launcher leaves in environments and process trees.

Source: measured with torchrun, accelerate, Lightning, torch.multiprocessing.spawn, Open MPI 5 and Slurm 22.05.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK_VARIABLES = {"OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}
"""Variables of a rank and of the world size that MPI launchers set."""
KEPT_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"),
    *RANK_VARIABLES,
    *RANK_VARIABLES.values(),
)
"""The only variables that are read out of an environment."""
STEP_NAMES = ("global_step", "step", "batch_idx", "iteration", "it", "i", "epoch")
"""Local variables that show how far a loop is; of others, no value leaves the host."""
PEER_NAMES = ("src", "dst")
MAX_FRAMES = 64
MAX_TEXT = 300
MAX_RANKS = 1024
MAX_CHILDREN = 16
SPY_TIMEOUT_S = 20.0
SPIES = 4
"""Dumps at a time: each takes 10 ms of a core."""
WAITS_FOR_A_CHILD = {"poll", "select", "wait", "waitpid", "_try_wait", "_wait", "communicate", "join", "_try_get_data"}
"""Functions in which a rank may wait for a child process."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
TICKS_HZ = os.sysconf("SC_CLK_TCK")

Process = dict[str, Any]


def read(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty when it is not there, or may not be read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def base(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition("/")[2][:MAX_TEXT]


def integer(text: str | None) -> int | None:
    """Return a number of at most nine digits; None for anything else."""
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else None


def process_of(pid: int) -> Process | None:
    """Return the facts of a Python process; None for any other."""
    argv = [part.decode(errors="replace") for part in read(pid, "cmdline").split(b"\0")]
    name = base(argv[0])
    fields = read(pid, "stat").rpartition(b")")[2].split()
    if not fields or not re.match(r"python|pt_|ray::|torchrun|accelerate", name):
        return None
    environ = read(pid, "environ")
    pairs = (pair.partition("=") for pair in environ.decode(errors="replace").split("\0"))
    variables = {key: value[:MAX_TEXT] for key, _, value in pairs if key in KEPT_VARIABLES}
    return {
        "pid": pid,
        "parent": int(fields[1]),
        "start": int(fields[19]),
        "uid": uid_of(pid),
        "program": program_of(argv),
        "variables": variables,
        "is_readable": bool(environ),
        "is_spawned": any("spawn_main(" in word for word in argv),
    }


def uid_of(pid: int) -> int:
    """Return the user of a process; -1 when it has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def program_of(argv: list[str]) -> str:
    """Return the script or module that a Python runs: no argument, since that may be a secret."""
    rest = iter(argv[1:])
    for word in rest:
        if word == "-m":
            return "-m " + next(rest, "")[:MAX_TEXT]
        if word == "-c":
            return "-c"
        if word in ("-W", "-X"):
            next(rest, None)
        elif not word.startswith("-"):
            return word[:MAX_TEXT]
    return base(argv[0])


def has_torch(process: Process) -> bool:
    """Return whether a process has loaded libtorch."""
    return b"libtorch_cpu" in read(process["pid"], "maps")


def find_ranks(processes: dict[int, Process], has_torch: Any, name_of: Any) -> list[Process]:
    """Return the ranks among Python processes, each with its number, world size and job.

    Args:
        processes: The processes by pid, as of `process_of`.
        has_torch: Returns whether a process has loaded libtorch.
        name_of: Returns the name of any process by its pid.

    Of each branch of the process tree the topmost process is the rank: workers of a DataLoader inherit its environment.
    """
    numbered = {}
    for pid, process in processes.items():
        found = _by_environment(process, processes.get(process["parent"]), has_torch, name_of)
        if found is not None:
            numbered[pid] = found
    _add_lightning(processes, numbered)
    _add_spawned(processes, numbered, has_torch)
    # RANK alone is the number of a node where a launcher runs under it, as Kubernetes operators set it.
    above = {processes[pid]["parent"] for pid in numbered}
    return [
        dict(processes[pid], **found) for pid, found in numbered.items() if found["how"] != "RANK" or pid not in above
    ]


def _by_environment(process: Process, parent: Process | None, has_torch: Any, name_of: Any) -> Process | None:
    variables, inherited = process["variables"], parent["variables"] if parent else {}
    rank, size = integer(variables.get("RANK")), integer(variables.get("WORLD_SIZE"))
    if rank is not None and not _same(variables, inherited, ("RANK", "LOCAL_RANK", "MASTER_PORT")):
        how = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "RANK"
        if how == "torchrun" or has_torch(process):
            return {"rank": rank, "size": size, "how": how, "key": _store_key(variables)}
    for name, size_name in RANK_VARIABLES.items():
        rank = integer(variables.get(name))
        if rank is not None and not _same(variables, inherited, (name,)) and has_torch(process):
            key = variables.get("PMIX_NAMESPACE") or _store_key(variables)
            return {"rank": rank, "size": integer(variables.get(size_name)), "how": "mpirun", "key": key}
    rank = integer(variables.get("SLURM_PROCID"))
    # Every process of a batch script has SLURM_PROCID=0: a rank of srun is a child of slurmstepd.
    is_alone = "RANK" not in variables and "LOCAL_RANK" not in variables
    if rank is None or not is_alone or name_of(process["parent"]) != "slurmstepd" or not has_torch(process):
        return None
    key = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    return {"rank": rank, "size": integer(variables.get("SLURM_NTASKS")), "how": "srun", "key": key}


def _same(variables: dict[str, str], others: dict[str, str], names: Any) -> bool:
    return all(variables.get(name) == others.get(name) for name in names)


def _store_key(variables: dict[str, str]) -> str:
    run = variables.get("TORCHELASTIC_RUN_ID", "")
    store = f"{variables.get('MASTER_ADDR', '')}:{variables.get('MASTER_PORT', '')}"
    return store if run in ("", "none") else f"{run} {store}"


def _add_lightning(processes: dict[int, Process], numbered: dict[int, Process]) -> None:
    """Add the ranks of Lightning: the user's script is local rank 0, and starts the others with LOCAL_RANK alone."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        variables = process["variables"]
        parent = processes.get(process["parent"])
        is_one = "LOCAL_RANK" in variables and "RANK" not in variables and "MASTER_PORT" in variables
        if is_one and parent is not None and "LOCAL_RANK" not in parent["variables"]:
            children.setdefault(parent["pid"], []).append(process)
    for pid, others in children.items():
        variables = others[0]["variables"]
        first = (integer(variables.get("NODE_RANK")) or 0) * (len(others) + 1)
        found = {"size": integer(variables.get("WORLD_SIZE")), "how": "Lightning", "key": _store_key(variables)}
        numbered[pid] = dict(found, rank=first)
        for one in others:
            numbered[one["pid"]] = dict(found, rank=first + (integer(one["variables"]["LOCAL_RANK"]) or 0))


def _add_spawned(processes: dict[int, Process], numbered: dict[int, Process], has_torch: Any) -> None:
    """Add the ranks of torch.multiprocessing.spawn, which are numbered in the order in which they were started."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        parent = processes.get(process["parent"])
        is_worker = parent is not None and (parent["is_spawned"] or parent["pid"] in numbered)
        if process["is_spawned"] and not is_worker and process["pid"] not in numbered and has_torch(process):
            children.setdefault(process["parent"], []).append(process)
    for pid, ranks in children.items():
        for number, one in enumerate(sorted(ranks, key=lambda one: (one["start"], one["pid"]))):
            numbered[one["pid"]] = {"rank": number, "size": len(ranks), "how": "spawn", "key": f"pid {pid}"}


def main_frames(threads: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    """Return the frames of the main thread; in a container its number is that within."""
    main = [thread for thread in threads if thread.get("os_thread_id") in (pid, 1)]
    main = main or [thread for thread in threads if thread.get("thread_name") == "MainThread"] or threads
    return main[0]["frames"] if main else []


def kept_frame(frame: dict[str, Any]) -> list[Any]:
    """Return file, line, function and the small integers of a frame that show where a loop is, and a call's peer."""
    numbers = {}
    for variable in frame.get("locals") or []:
        value = integer(variable.get("repr"))
        if value is not None and variable.get("name") in STEP_NAMES + PEER_NAMES:
            numbers[variable["name"]] = value
    return [str(frame.get("filename"))[:MAX_TEXT], int(frame.get("line") or 0), str(frame["name"])[:MAX_TEXT], numbers]


def stack_of(pid: int, spy: str) -> dict[str, Any]:
    """Return the main thread's frames, innermost first, or why they cannot be seen."""
    if not spy:
        return {"frames": [], "trouble": "py-spy is not there"}
    argv = [spy, "dump", "--json", "--nonblocking", "--locals", "--pid", str(pid)]
    trouble = ""
    for _ in range(3):  # a process may move under its reader
        try:
            done = subprocess.run(
                argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=SPY_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"frames": [], "trouble": f"py-spy: {error}"[:MAX_TEXT]}
        if done.returncode == 0:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                frames = main_frames(json.loads(done.stdout), pid)
                return {"frames": [kept_frame(frame) for frame in frames[:MAX_FRAMES]], "trouble": ""}
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines()]
        trouble = " ".join(line for line in lines if line and "backtrace" not in line)[:MAX_TEXT] or "py-spy failed"
    return {"frames": [], "trouble": trouble}


def look_at(pid: int, spy: str) -> dict[str, Any]:
    """Return a process's stack, and what its main thread does by the kernel."""
    stack = stack_of(pid, spy)
    fields = read(pid, "stat").rpartition(b")")[2].split()
    switches = re.search(rb"^voluntary_ctxt_switches:\s+(\d+)", read(pid, f"task/{pid}/status"), re.MULTILINE)
    wchan = read(pid, "wchan").decode(errors="replace")
    has_memory = not stack["trouble"] or bool(read(pid, "cmdline"))  # none: it is ending
    return dict(
        stack,
        at_s=time.monotonic(),
        state=fields[0].decode() if fields and has_memory else "",
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_HZ if fields else 0.0,
        switches=int(switches[1]) if switches else None,
        wchan="" if wchan == "0" else wchan[:MAX_TEXT],
    )


def children_of(pid: int, spy: str) -> list[dict[str, Any]]:
    """Return the children of a rank that may wait for one, each with its stack where it is a Python."""
    children = []
    for child in map(int, read(pid, f"task/{pid}/children").split()[:MAX_CHILDREN]):
        argv = [part.decode(errors="replace") for part in read(child, "cmdline").split(b"\0")]
        if "resource_tracker" in " ".join(argv):
            continue
        is_python = process_of(child) is not None
        look = look_at(child, spy if is_python else "")
        children.append(dict(look, pid=child, name=base(argv[0])))
    return children


def python_processes() -> Iterator[Process]:
    """Yield every Python process but this one."""
    for path in Path("/proc").iterdir():
        process = process_of(int(path.name)) if path.name.isdigit() and path.name != str(os.getpid()) else None
        if process is not None:
            yield process


def name_of(pid: int) -> str:
    """Return the kernel's name of a process."""
    return read(pid, "comm").decode(errors="replace").strip()


def user_of(uid: int) -> str:
    """Return the name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def inspect(spy: str, num_looks: int, period_s: float) -> dict[str, Any]:
    """Return the ranks of this host and what each look at them has shown."""
    processes = {process["pid"]: process for process in python_processes()}
    ranks = find_ranks(processes, has_torch, name_of)[:MAX_RANKS]
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    for rank in ranks:
        rank["looks"] = []
        rank["age_s"] = up_s - rank["start"] / TICKS_HZ
    with ThreadPoolExecutor(SPIES) as pool:
        for number in range(num_looks if ranks else 0):
            began_s = time.monotonic()
            for place, look in enumerate(pool.map(lambda rank: look_at(rank["pid"], spy), ranks)):
                ranks[place]["looks"].append(look)
            if number + 1 < num_looks:
                time.sleep(max(0.0, began_s + period_s - time.monotonic()))
        waiting = [rank for rank in ranks if _may_wait_for_a_child(rank)]
        for place, children in enumerate(pool.map(lambda rank: children_of(rank["pid"], spy), waiting)):
            waiting[place]["children"] = children
    unseen: dict[str, int] = {}
    for process in processes.values():
        if not process["is_readable"] and process["uid"] not in (-1, os.getuid()):
            user = user_of(process["uid"])
            unseen[user] = unseen.get(user, 0) + 1
    return {
        "ranks": ranks,
        "unseen": unseen,
        "user": user_of(os.getuid()),
        "is_root": os.getuid() == 0,
        "yama": integer(YAMA.read_text().strip()) if YAMA.exists() else None,
    }


def _may_wait_for_a_child(rank: Process) -> bool:
    names = [frame[2].rpartition(".")[2] for look in rank["looks"][-1:] for frame in look["frames"][:6]]
    return any(name in WAITS_FOR_A_CHILD for name in names)


def main(argv: list[str]) -> None:
    """Print what `inspect` has seen; the arguments are py-spy's path, the number of looks and the seconds between."""
    spy, num_looks, period_s = argv
    seen = json.dumps(inspect(spy, int(num_looks), float(period_s))).encode()
    sys.stdout.write(base64.b64encode(zlib.compress(seen)).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
