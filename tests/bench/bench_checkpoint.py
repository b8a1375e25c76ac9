"""How long a checkpoint blocks training, how long it takes in all, and what steps cost meanwhile; beside torch's ways.

    python -m tests.bench.bench_checkpoint [--ranks 2] [--gigabytes 2.0] [--repeats 3] [--directory /tmp]
        [--same-priority] [--only NAME]

Every rank holds the whole state, as DDP has it: a GPT's parameters with Adam's two moments. All ways take turns within
one run, and all of them fsync. Blocked is the time from the call until training may go on, the longest of all ranks;
the first call is told apart, since memory is fresh then. A step is a matrix product and an all-reduce. The total is
from the call until the checkpoint is whole on the disk: once while the ranks wait, once while they train on and keep
all cores busy, to which our writers yield.

On a machine that others use too, our writers yield to them as well. `--same-priority` (needs root) gives writers that
of the ranks: what the totals would be on cores that nobody else uses. `--only` measures the ways of such a name.

Needs memory for about 2.5 times the state on each rank, and disk for four states.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ddpcore.checkpoint import Checkpointer
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 1024
VOCABULARY = 50_257
IDLE_STEPS = 30
WAIT_S = 0.01
MATRIX = 900


class Timing(NamedTuple):
    """One save on one rank."""

    blocked_s: float
    total_s: float
    waiting_total_s: float
    step_s: list[float]
    idle_s: list[float]


def gpt_state(num_bytes: float) -> dict[str, Any]:
    """Return parameters and moments of about this size."""
    shapes: list[tuple[int, ...]] = [(VOCABULARY, WIDTH)]
    layer: list[tuple[int, ...]] = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    layer += [(WIDTH,)] * 6
    num_layers = max(1, round((num_bytes / 12 - VOCABULARY * WIDTH) / (12 * WIDTH * WIDTH)))
    shapes += layer * num_layers
    model = {f"p{number}": torch.full(shape, float(number)) for number, shape in enumerate(shapes)}
    moments = {
        number: {"step": torch.tensor(3.0), "exp_avg": weight * 2, "exp_avg_sq": weight * 3}
        for number, weight in enumerate(model.values())
    }
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}}


class Steps:
    """Training steps, and the word whether all ranks are done with something."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
        self._gradients = torch.zeros(500_000)

    def step(self, *, is_done: bool) -> tuple[float, bool]:
        """Return how long one step took, and whether all ranks are done."""
        began_s = time.perf_counter()
        torch.mm(self._left, self._right)
        self._gradients[0] = float(is_done)
        dist.all_reduce(self._gradients)
        return time.perf_counter() - began_s, self._gradients[0].item() == dist.get_world_size()


def equalize(pid: int | None) -> None:
    """Give a writer the priority of its trainer."""
    if pid is None:
        return
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("0", encoding="ascii")


def ways(root: Path, group: Any, *, is_equal: bool) -> dict[str, Any]:
    """Return each way to save: a function that returns when training may go on, with one that says when all is done."""
    stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))
    ours = Checkpointer(root / "ours", keep_last=1)
    prepared = Checkpointer(root / "prepared", keep_last=1)

    def torch_save(step: int, state: dict[str, Any]) -> Callable[[], bool]:
        if dist.get_rank() == 0:
            with (root / f"torch-{step}.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return lambda: True

    def dcp_save(step: int, state: dict[str, Any]) -> Callable[[], bool]:
        dcp.save(state, checkpoint_id=root / f"dcp-{step}", process_group=group)
        return lambda: True

    def dcp_async(step: int, state: dict[str, Any]) -> Callable[[], bool]:
        saved: Any = dcp.async_save(
            state, checkpoint_id=root / f"async-{step}", process_group=group, async_stager=stager
        )
        # The stager copies in a thread: the next optimizer's step has to wait for it.
        saved.staging_completion.result()
        done: Callable[[], bool] = saved.upload_completion.done
        return done

    def save_with(checkpointer: Checkpointer) -> Callable[[int, dict[str, Any]], Callable[[], bool]]:
        def save(step: int, state: dict[str, Any]) -> Callable[[], bool]:
            checkpointer.save(step, state)
            if is_equal:
                equalize(checkpointer._saver._writer.pid)
            return lambda: checkpointer._saver._writer.poll() is not None

        return save

    return {
        "torch.save on rank 0": torch_save,
        "DCP save": dcp_save,
        "DCP async_save": dcp_async,
        "ours": save_with(ours),
        "ours, prepared": save_with(prepared),
        "close": (ours, prepared),
    }


def time_one(save: Any, step: int, state: dict[str, Any], steps: Steps) -> Timing:
    """Save once and wait until it is done, then save again and train on until it is done."""
    dist.barrier()
    began_s = time.perf_counter()
    is_done = save(2 * step, state)
    while not is_done():
        time.sleep(WAIT_S)
    waiting_total_s = time.perf_counter() - began_s
    dist.barrier()
    idle_s = [steps.step(is_done=False)[0] for _ in range(IDLE_STEPS)]
    dist.barrier()
    began_s = time.perf_counter()
    is_done = save(2 * step + 1, state)
    blocked_s = time.perf_counter() - began_s
    step_s, all_done = [], False
    while not all_done:
        took_s, all_done = steps.step(is_done=is_done())
        step_s.append(took_s)
    return Timing(blocked_s, time.perf_counter() - began_s, waiting_total_s, step_s[:-1], idle_s)


def measure(
    directory: str, num_bytes: float, repeats: int, is_equal: bool, only: str
) -> dict[str, list[tuple[Any, ...]]]:
    """Return this rank's saves by each way."""
    warnings.simplefilter("ignore")
    root, steps, state = Path(directory), Steps(), gpt_state(num_bytes)
    all_ways = ways(root, dist.new_group(backend="gloo"), is_equal=is_equal)
    checkpointers = all_ways.pop("close")
    checkpointers[1].prepare(state)
    all_ways = {name: save for name, save in all_ways.items() if only in name}
    timings: dict[str, list[Timing]] = {name: [] for name in all_ways}
    for step in range(repeats):
        for name, save in all_ways.items():
            timings[name].append(time_one(save, step, state, steps))
            dist.barrier()
            if dist.get_rank() == 0:
                for left in [*root.glob("*-*.pt"), *root.glob("dcp-*"), *root.glob("async-*")]:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                # What one way has left for the disk to do is not the next one's to wait for.
                os.sync()
            dist.barrier()
    for checkpointer in checkpointers:
        checkpointer.close()
    # Plain tuples: the benchmark's own process knows this file by another name.
    return {name: [tuple(one) for one in some] for name, some in timings.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--same-priority", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    root = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.directory)
    try:
        answers = run_ranks(
            measure,
            args.ranks,
            root,
            args.gigabytes * 1e9,
            args.repeats,
            args.same_priority,
            args.only,
            timeout_s=1500,
            group_timeout_s=600,
        )
    finally:
        shutil.rmtree(root)
    load = " ".join(f"{one:.0f}" for one in os.getloadavg())
    print(
        f"{args.gigabytes:g} GB on each of {args.ranks} ranks, {os.cpu_count()} cores, load average at the end {load}"
    )
    title = (
        f"{'':<22}{'blocked first':>14}{'later':>9}{'total, waiting':>16}{'training':>10}{'step before, meanwhile':>24}"
    )
    print(f"{title}  later of torch.save, DCP async; total of DCP async, waiting, training")
    later: dict[str, float] = {}
    totals: dict[str, tuple[float, float]] = {}
    for name in answers[0]:
        calls = [[Timing(*timings[name][number]) for timings in answers] for number in range(args.repeats)]
        blocked = [max(one.blocked_s for one in call) for call in calls]
        waiting = statistics.median(max(one.waiting_total_s for one in call) for call in calls[1:])
        total = statistics.median(max(one.total_s for one in call) for call in calls[1:])
        totals[name] = waiting, total
        idle_ms = 1000 * statistics.median(step for call in calls[1:] for step in call[0].idle_s)
        meanwhile = [step for call in calls[1:] for step in call[0].step_s]
        step = f"{idle_ms:.1f}, {1000 * statistics.median(meanwhile):.1f} ms" if meanwhile else "-"
        later[name] = statistics.median(blocked[1:])
        ratios = [later[name] / later[other] for other in ("torch.save on rank 0", "DCP async_save") if other in later]
        shown = " / ".join(f"{ratio:.3f}" for ratio in ratios)
        if "DCP async_save" in totals:
            of_totals = zip(totals[name], totals["DCP async_save"], strict=True)
            shown += "; " + " / ".join(f"{own / other:.2f}" for own, other in of_totals)
        figures = f"{blocked[0]:>12.2f} s{later[name]:>7.2f} s{waiting:>14.2f} s{total:>8.2f} s"
        print(f"{name:<22}{figures}{step:>24}  {shown}")


if __name__ == "__main__":
    main()
