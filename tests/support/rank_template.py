"""Imports torch once and forks ranks on request: python -m tests.support.rank_template FD (see warm_ranks.py).

It opens no process group and computes nothing itself: a fork must not inherit threads or an autograd engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - of each name that a store's client looks up
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np  # noqa: F401 - imported here so that ranks need not
import torch
import torch._dynamo  # the first DDP would import it for a second
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import ddpcore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

for _name in ddpcore.__all__:
    getattr(ddpcore, _name)  # its names are imported at their first use: each rank would import a hundred modules anew

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one test session, until its socket closes."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    lines = requests.makefile("rb")
    while line := lines.readline():
        request = json.loads(line)
        if "done" in request:
            continue
        _import_for_ranks(request["file"])
        store_pid, port = _fork_store_host(request["world_size"])
        pids = [_fork_rank(request, rank, port, requests) for rank in range(request["world_size"])]
        _say(requests, {"pids": pids})
        _reap(requests, set(pids))
        os.kill(store_pid, signal.SIGKILL)
        os.waitpid(store_pid, 0)


def _say(requests: socket.socket, answer: Mapping[str, object]) -> None:
    requests.sendall(json.dumps(answer).encode() + b"\n")


def _reap(requests: socket.socket, pids: set[int]) -> None:
    """Tell how each rank ends; end them all if the tests have gone."""
    pidfds = {os.pidfd_open(pid): pid for pid in pids}
    poll = select.poll()
    poll.register(requests, select.POLLRDHUP)
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    while pidfds:
        for fd, _ in poll.poll():
            if fd == requests.fileno():
                raise SystemExit(0)
            _, status = os.waitpid(pidfds[fd], 0)
            _say(requests, {"pid": pidfds.pop(fd), "status": os.waitstatus_to_exitcode(status)})
            poll.unregister(fd)
            os.close(fd)


def _fork_store_host(world_size: int) -> tuple[int, int]:
    """Fork a host for the ranks' store, as torchrun is one: it outlives every rank."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        os.write(write_end, str(store.port).encode())
        os.close(write_end)
        while True:
            signal.pause()
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        return pid, int(pipe.read(16))


def _fork_rank(request: Mapping[str, Any], rank: int, port: int, requests: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    # A child never returns into the template's loop, whatever happens.
    status = 1
    try:
        _die_with_parent()
        requests.close()
        status = _run_rank(request, rank, port)
    finally:
        os._exit(status)


def _run_rank(request: Mapping[str, Any], rank: int, port: int) -> int:
    directory = Path(request["directory"])
    os.chdir(directory)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR2)
    local_world_size = request["world_size"] // request["num_nodes"]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(request["world_size"]),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **request["env"],
    }
    result: dict[str, object] = {}
    try:
        function = getattr(_load(request["file"]), request["name"])
        args = pickle.loads((directory / "args.pickle").read_bytes())
        if request["group_timeout_s"]:
            dist.init_process_group("gloo", timeout=timedelta(seconds=request["group_timeout_s"]))
        result["value"] = function(*args)
    except BaseException as error:  # noqa: BLE001 - the test decides what it means
        kind = type(error)
        result["error"] = f"{kind.__name__}: {error}"
        result["error_type"] = f"{kind.__module__}.{kind.__qualname__}"
        result["trace"] = traceback.format_exc()
    part = directory / f"result-{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(directory / f"result-{rank}.pickle")
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _import_for_ranks(file: str) -> None:
    """Import a test's file here, once for the ranks of all its tests; what is wrong with it, each rank says itself."""
    with contextlib.suppress(Exception):
        _load(file)


def _load(file: str) -> ModuleType:
    """Import a test's file as pytest does, by path."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules.get(spec.name)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    module = importlib.util.module_from_spec(spec)
    # Where pickle and dataclasses look for it.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
