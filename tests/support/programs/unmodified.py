"""An ordinary training program that knows nothing of rankdeck: what it does is its first argument."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 60

ENOUGH = "enough"
"""A file that the test makes when it has seen what it wants: until then programs go on."""


class Point:
    """Lives in `__main__`, and travels to other processes."""

    def __init__(self, x: int) -> None:
        self.x = x


def train(*, has_group: bool) -> None:
    """Train with two optimizers and accumulated gradients."""
    import torch  # noqa: PLC0415 - some of these programs do without
    from torch import distributed, nn  # noqa: PLC0415

    net: nn.Module = nn.Linear(4, 1)
    if has_group:
        distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    weight, bias = net.parameters()
    optimizers = [torch.optim.AdamW([weight], lr=0.05), torch.optim.SGD([bias], lr=0.05)]
    loss = torch.zeros(1)
    for step in range(STEPS):
        for _ in range(2):
            loss = net(torch.ones(8, 4)).square().mean()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step} loss={loss.item():.3e}", flush=True)
        time.sleep(0.02)
        while step == STEPS // 2 and not Path(ENOUGH).exists():
            time.sleep(0.02)
    if has_group:
        distributed.destroy_process_group()


def load() -> None:
    """Read with workers of every kind, as whoever `__main__` is."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    distributed.init_process_group("gloo")
    for context in ("fork", "spawn"):
        numbers = TensorDataset(torch.arange(8))
        batches = DataLoader(numbers, batch_size=4, num_workers=1, multiprocessing_context=context)
        for (batch,) in batches:
            distributed.all_reduce(batch)
        print(context, len(batches), torch.initial_seed() != 0)
    distributed.destroy_process_group()


def end_badly(how: Callable[[], object]) -> None:
    """Let rank 1 end in some way once both ranks are here, while rank 0 waits to be told to end."""
    rank = int(os.environ["RANK"])
    Path(f"here-{rank}").touch()
    while not Path(f"here-{1 - rank}").exists():
        time.sleep(0.02)
    if rank == 1:
        how()
    time.sleep(600)


def tell() -> None:
    """Say who and where this is."""
    point = pickle.loads(pickle.dumps(Point(3)))
    print(__name__, Path(__file__).name, Path(sys.path[0]).name, sys.argv[1:], point.x, __spec__)
    print("search path:", os.environ.get("PYTHONPATH", ""))


def meet() -> None:
    """Call collectives for as long as it takes."""
    from torch import distributed  # noqa: PLC0415

    distributed.init_process_group("gloo")
    reduce_until_it_is_enough()
    distributed.destroy_process_group()


def reduce_until_it_is_enough() -> None:
    """Call collectives until the first rank knows that the test has seen enough."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    is_enough = torch.zeros(1)
    while not is_enough:
        is_enough = torch.tensor([float(Path(ENOUGH).exists())])
        distributed.all_reduce(is_enough)
        time.sleep(0.05)


def meet_twice() -> None:
    """Open the process group again; in the second one rank 1 comes late."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn in range(2):
        distributed.init_process_group(
            "gloo", init_method=f"file://{Path.cwd()}/meeting-{turn}", rank=rank, world_size=world_size
        )
        if turn == 1 and rank == 1:
            while not Path("come").exists():
                time.sleep(0.05)  # LINGERS
        for _ in range(30):
            distributed.all_reduce(torch.ones(3))
            time.sleep(0.02)
        distributed.destroy_process_group()


def _of_my_own(index: int, path: str) -> None:
    from torch import distributed  # noqa: PLC0415

    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=index, world_size=2)
    reduce_until_it_is_enough()
    distributed.destroy_process_group()


def spawn() -> None:
    """Start ranks by torch.multiprocessing."""
    from torch.multiprocessing.spawn import start_processes  # noqa: PLC0415

    path = f"{Path.cwd()}/own-{os.environ['RANK']}"
    start_processes(_of_my_own, (path,), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]


def launch() -> None:
    """Start ranks by a torchrun within this rank."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "meet"]
    raise SystemExit(subprocess.run(argv, check=False).returncode)


def idle() -> None:
    """Print without torch."""
    for number in range(1000):
        print("loss", 1 / (1 + number), flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    tell()
    ways: dict[str, Callable[[], object]] = {
        "ddp": lambda: train(has_group=True),
        "alone": lambda: train(has_group=False),
        "load": load,
        "meet": meet,
        "meet-twice": meet_twice,
        "spawn": spawn,
        "launch": launch,
        "idle": idle,
        "fail": lambda: end_badly(lambda: 1 / 0),
        "exit": lambda: end_badly(lambda: sys.exit(7)),
    }
    ways[sys.argv[1]]()
