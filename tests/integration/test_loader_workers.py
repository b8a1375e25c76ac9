"""A DataLoader's workers outlive the SIGTERM that their rank stops by, and end with their rank where they hang too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine.stop_agreement import StopReason
from tests.support.warm_ranks import run_ranks

CONTEXTS = ("fork", "spawn")


def start_a_program(number: int) -> None:
    """Check that what a worker starts can be ended by SIGTERM."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        child.terminate()
        assert child.wait(60) == -signal.SIGTERM
    Path(f"started-{number}").touch()


def stop_by_a_signal_to_everybody(directory: str, context: str, number: int) -> tuple[int, StopReason]:
    """Stop as torchrun and Slurm do it: the signal for each process."""
    with ddpcore.Engine(stop_patience_s=60.0) as engine:
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(
            TensorDataset(torch.randn(4000, 2)),
            global_batch_size=4,
            num_workers=2,
            multiprocessing_context=context,
            # A spawned worker does not find this file.
            worker_init_fn=start_a_program if context == "fork" else None,
        )
        engine.checkpoint(directory, every="100000 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="1000 epochs"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
            if engine.step == 5 and engine.is_first:
                workers = multiprocessing.active_children()
                assert len(workers) == 2
                for pid in [*(worker.pid for worker in workers), os.getpid()]:
                    assert pid is not None
                    os.kill(pid, number)
        assert Path("started-1").exists() == (context == "fork")
        return engine.step, engine.stop_reason


@pytest.mark.parametrize(
    ("context", "number"), [*((context, signal.SIGTERM) for context in CONTEXTS), ("fork", signal.SIGUSR1)]
)
def test_a_stop_by_signals_to_all_processes_of_a_rank_saves(context: str, number: int, tmp_path: Path) -> None:
    stops = run_ranks(stop_by_a_signal_to_everybody, 2, str(tmp_path), context, number, has_group=False)

    assert stops == [(stops[0][0], StopReason.SIGNAL)] * 2
    assert [path.name for path in tmp_path.glob("step_*")] == [f"step_{stops[0][0]:08}"]


PROGRAM = """
import os, time, torch, ddpcore
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        if number == {hangs_at}:
            open("hangs", "w").write(str(os.getpid()))
            time.sleep(1000)
        return torch.ones(1)
if __name__ == "__main__":
    engine = ddpcore.Engine()
    loader = engine.loader(Samples(), global_batch_size=4, shuffle=False, num_workers=1, {options})
    for batch in engine.steps(loader, until="2 epochs"):
        if engine.step == {last}:
            while {hangs_at} < 64 and not os.path.exists("hangs"):
                time.sleep(0.05)
            break
    print("done", flush=True)
"""


@pytest.mark.parametrize("options", ["persistent_workers=True", "persistent_workers=False"])
@pytest.mark.parametrize(("hangs_at", "last"), [(1000, 10), (1000, 20), (16, 2)])
def test_workers_end_with_their_program_without_a_word(options: str, hangs_at: int, last: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(options=options, hangs_at=hangs_at, last=last))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

    argv = [sys.executable, "program.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=99, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    if hangs_at < 64:
        assert not Path("/proc", (tmp_path / "hangs").read_text()).exists()
