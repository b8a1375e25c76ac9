"""Starts the probe in a rank that no agent has launched: any launcher's, whose environment holds the launch plug-in.

By torchrun's variables a rank is known at the end of its `import torch`. Any other one is known when it opens its
process group: so `init_process_group` is wrapped. torch has no hook there, and a thread that looks for an open group
would miss who waits in it for ranks that never come. The wrapper adds a frame to a traceback, and nothing else: it has
the signature, name and module of what it wraps, is what a pickle of it finds, and lets every exception pass.

The agent of this host is found by rule (`ddpcore.wire_launch`), since one environment may reach several hosts; it need
not serve yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcore.env import ProbeEnv, optional_int
from ddpcore.launchers import Meeting, is_named_by_torchrun, job_name, launched_rank
from ddpcore.torch_names import replace
from ddpcore.wire import ENV_PROBED_PID
from ddpcore.wire_launch import ADOPTED_DIR, ENV_AGENT_DIR, INBOX_SOCKET, agent_directories, taking_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_C10D = "torch.distributed.distributed_c10d"
_OPENING = "init_process_group"
_ARGUMENTS = ("backend", "init_method", "timeout", "world_size", "rank")
"""First parameters of `init_process_group`. Source: torch 2.4 to 2.13."""


def start_if_rank() -> None:
    """Start the probe if torchrun's variables name a rank, and when the process group is opened.

    Runs inside the user's `import torch`: the caller lets nothing escape.
    """
    if optional_int(os.environ, ENV_PROBED_PID) not in (None, os.getpid()):
        return  # a child of a rank, such as a DataLoader's worker
    if is_named_by_torchrun(os.environ):
        _start(Meeting())
    wrap_opening()


def wrap_opening() -> None:
    """Let this process's `init_process_group` start the probe, by whichever of torch's names it is called."""
    replace(_C10D, _OPENING, _starting_probe)


def _starting_probe(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            method = given.get("init_method")
            rank, world_size = _whole(given.get("rank")), _whole(given.get("world_size"))
            _start(Meeting(rank, world_size, method if isinstance(method, str) else None))
        answer = original(*args, **kwargs)
        with contextlib.suppress(Exception):
            # Whatever was given before: torch has the last word.
            c10d: Any = sys.modules[_C10D]
            _start(Meeting(c10d.get_rank(), c10d.get_world_size()))
        return answer

    return opening


def _whole(value: object) -> int:
    return value if isinstance(value, int) else -1


def _start(meeting: Meeting) -> None:
    """Have this process's probe report as the rank that it is, as far as that is known already."""
    torchrun = launched_rank(os.environ, meeting)
    if torchrun is None:
        return
    from ddpcore.probe import bootstrap, probe  # noqa: PLC0415 - most processes that import torch are no ranks

    if probe.become(torchrun):
        return
    directory = agent_directory(os.environ)
    if directory is None:
        return
    job_id = job_name(os.environ, sys.argv[0], os.getppid(), meeting.init_method)
    env = ProbeEnv(
        inbox=str(directory / INBOX_SOCKET),
        request_dir=_request_dir(directory, job_id),
        job_id=job_id,
        attempt=torchrun.restart_count,
        launcher_pid=None,
        launcher_namespace="",
        probed_pid=None,
        faults=(),
        is_adopted=True,
    )
    bootstrap.start_probe(torchrun, env)


def agent_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of this host's agent: of one that serves if there is one, else where one would be.

    None where there is no such place, or it is not this user's alone.
    """
    given = environ.get(ENV_AGENT_DIR, "")
    candidates = [Path(given)] if given else agent_directories(environ, socket.gethostname())
    found = taking_directory(candidates, _serves)
    return found if found is None or not found.exists() or _is_private(found) else None


def _serves(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.connect(str(directory / INBOX_SOCKET))  # sends nothing
        return True
    return False


def _request_dir(directory: Path, job_id: str) -> str:
    """Return the job's directory for the sockets of its probes; empty where it cannot be made."""
    try:
        for path in (directory, directory / ADOPTED_DIR, directory / ADOPTED_DIR / job_id):
            path.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(path):
                return ""
    except OSError:
        return ""
    return str(path)


def _is_private(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
