"""What a user's type checker sees of ddpcore: whole programs pass in strict mode, wrong calls are refused line by line.

Source: PEP 692, `**options: Unpack[...]`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import PROGRAMS

ROOT = Path(__file__).parents[2]

WRONG_CALLS = """
import torch
from torch import nn

import ddpcore
from ddpcore.checkpoint import Checkpointer
from ddpcore.samplers import ShuffledOrder

engine = ddpcore.Engine(seeds=1)  # refused
engine = ddpcore.Engine(timeout_s="60")  # refused
engine = ddpcore.Engine(devise="cpu")  # refused
engine = ddpcore.Engine(seed=0, device="cpu", join_timeout_s=5)
model = engine.wrap("model")  # refused
model = engine.wrap(torch.compile(nn.Linear(1, 1)), static_grap=True)  # refused
model = engine.wrap(torch.compile(nn.Linear(1, 1)), static_graph=True)
model = engine.wrap(nn.Linear(1, 1), static_grap=True)  # refused
model = engine.wrap(nn.Linear(1, 1), static_graph="yes")  # refused
model = engine.wrap(nn.Linear(1, 1), comm_hook="fp8")  # refused
model = engine.wrap(nn.Linear(1, 1), comm_hook="bf16", gradient_as_bucket_view=False)
data = torch.utils.data.TensorDataset(torch.ones(4, 1))
batches = engine.loader(data, global_batch_size=2, shufle=True)  # refused
batches = engine.loader(data, global_batch_size="2")  # refused
batches = engine.loader(data, global_batch_size=2, num_worker=1)  # refused
batches = engine.loader(data, global_batch_size=2, batch_sampler=None)  # refused
batches = engine.loader(data, global_batch_size=2, prefetch=1, persistent_workers=False)
engine.checkpoint("somewhere", model=model)  # refused
engine.checkpoint("somewhere", every="1 step", model=3)  # refused
engine.checkpoint("somewhere", every="1 step", model=model)
for batch in engine.steps(data, until="1 epoch"):  # refused
    pass
for batch in engine.steps(batches, until=3):  # refused
    engine.log(loss="low")  # refused
    engine.update(model)  # refused
    engine.backward(1.0)  # refused
engine.evaluate(model, data, len, batch_size=2)  # refused
engine.evaluate(model, data, lambda module, batch: {}, batch_size=2, prefetch=1)  # refused
model = ddpcore.wrap(nn.Linear(1, 1), bucket_cap="25")  # refused
model = ddpcore.wrap(nn.Linear(1, 1), bucket_cap_mb=25, static_graph=True)
Checkpointer("somewhere", keep=3)  # refused
ddpcore.load_checkpoint("somewhere", model=model).sate  # refused
ddpcore.load_checkpoint("somewhere", step="10")  # refused
ddpcore.load_checkpoint("somewhere", model="model")  # refused
ddpcore.load_tensors("somewhere")  # refused
ddpcore.ElasticBatchSampler(ShuffledOrder(3))  # refused
ddpcore.barrier(3)  # refused
ddpcore.open_process_group(timeout=3)  # refused
"""


def check_types(path: Path, cache: Path) -> str:
    """Return what mypy says of programs, as users call it: strict, and with no settings of this repository."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=path if path.is_dir() else path.parent,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_pass_in_strict_mode_and_wrong_calls_are_refused(tmp_path: Path) -> None:
    sources = {path.name: path.read_text() for path in PROGRAMS.glob("typed_*.py")} | {"wrong_calls.py": WRONG_CALLS}
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, source in sources.items():
        (folder / name).write_text(source)

    output = check_types(folder, tmp_path / "cache")

    assert len(sources) == 4
    found = {(path, int(line)) for path, line in re.findall(r"^(\w+\.py):(\d+): error: ", output, re.MULTILINE)}
    wanted = {
        ("wrong_calls.py", number)
        for number, line in enumerate(WRONG_CALLS.split("\n"), 1)
        if line.endswith("# refused")
    }
    assert found == wanted, output
    # An editor completes from the same types.
    assert 'Unexpected keyword argument "static_grap" for "wrap" of "Engine"; did you mean "static_graph"?' in output


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("typed_engine", "16 False ['error'] 0 none\n"),
        pytest.param("typed_parts", "training of parts\n4 5 ['4']\n", marks=pytest.mark.slow),
        pytest.param(
            "typed_loading", "CheckpointMismatchError\n5 step_00000005 ['optimizer'] 2 ()\n", marks=pytest.mark.slow
        ),
    ],
)
def test_the_programs_that_are_checked_also_run(program: str, output: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / f"{program}.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.stdout == output, done.stderr
