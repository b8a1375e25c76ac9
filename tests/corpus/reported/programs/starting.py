"""Jobs that do not come to their training: `torchrun starting.py MODE`."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.corpus.reported.programs.training import fault_begins, make_model, train

rank = int(os.environ["RANK"])


def late_to_init() -> None:
    """Rank 1 does not come to init_process_group."""
    if rank == 1:
        fault_begins()
        time.sleep(3600)  # culprit: late_to_init
    dist.init_process_group("gloo")  # victims: late_to_init


def timeout_15() -> None:
    """Rank 1 does not come to init_process_group until the others have timed out there."""
    if rank == 1:
        fault_begins()
        time.sleep(3600)  # culprit: timeout_15
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))  # victims: timeout_15


def stranger_on_the_port() -> None:
    """MASTER_PORT is set by the program, and another server listens there."""
    port = 20_000 + os.getppid() % 20_000
    if rank == 0:
        server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=keep_mute, args=(server,), daemon=True).start()
        fault_begins()
    time.sleep(1.0)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo")  # culprit: stranger_on_the_port


def same_rank() -> None:
    """The program passes its local rank, which it takes from a variable of another launcher."""
    fault_begins()
    url = f"tcp://127.0.0.1:{20_000 + os.getppid() % 20_000}"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=2)  # culprit: same_rank


def larger_world() -> None:
    """The program was written for three ranks."""
    fault_begins()
    url = f"tcp://127.0.0.1:{20_000 + os.getppid() % 20_000}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3)  # culprit: larger_world


def own_ports() -> None:
    """Each rank looks for a free port itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    fault_begins()
    dist.init_process_group("gloo")  # culprit: own_ports


def second_group() -> None:
    """The group is made anew at a port of the program's own, at which torchrun's ranks start no server."""
    dist.init_process_group("gloo")
    train(make_model(), 40)
    dist.barrier()
    dist.destroy_process_group()
    url = f"tcp://127.0.0.1:{20_000 + os.getppid() % 20_000}"
    fault_begins()
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3)  # culprit: second_group


def port_in_use() -> None:
    """The program opens its own store at a port that another server has."""
    port = 20_000 + os.getppid() % 20_000
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if rank == 0:
        server = socket.create_server(("", port))
        fault_begins()
    else:
        time.sleep(0.5)
        server = None
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    assert server is None


def keep_mute(server: socket.socket) -> None:
    connections = []
    while True:
        connections.append(server.accept())


def spawned() -> None:
    """The program starts its ranks itself; the second one of them stops."""
    spawn(spawned_rank, nprocs=2)  # type: ignore[no-untyped-call]


def spawned_rank(index: int) -> None:
    init_spawned(index)
    model = make_model()
    train(model, 40)
    if index == 1:
        fault_begins()
        time.sleep(3600)
    train(model, 40)


def init_spawned(index: int) -> None:
    meeting = Path(tempfile.gettempdir(), f"group-{os.getppid()}")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=2)


def spawned_and_well() -> None:
    """The program starts its ranks itself, and all is well."""
    spawn(healthy_spawned_rank, nprocs=2)  # type: ignore[no-untyped-call]


def healthy_spawned_rank(index: int) -> None:
    init_spawned(index)
    train(make_model(), 300)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
