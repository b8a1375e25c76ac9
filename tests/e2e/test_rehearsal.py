"""Programs for GPUs on this machine's CPU: `rankdeck run --rehearse`, and `exec --rehearse` for those that spawn."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from app.errors import ExitCode
from ddpcore.rehearsal.rehearsal import ANNOUNCEMENT
from tests.support.demo_runs import DemoHouse
from tests.support.meeting import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKDECK = (sys.executable, "-P", "-m", "app")
END_S = 120.0
TRAINING = r"""
import os, pathlib, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def train(rank):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    assert device.type == "cuda" and torch.cuda.is_available() and torch.cuda.device_count() == 2
    torch.backends.cudnn.benchmark = True
    torch.cuda.manual_seed_all(7)
    dist.init_process_group(backend="nccl", device_id=device)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(rank)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data), pin_memory=True, num_workers=1)
    scaler = torch.amp.GradScaler("cuda")
    done, path = 0, pathlib.Path("snapshot.pt")
    if path.exists():
        kept = torch.load(path, map_location={"cuda:0": f"cuda:{rank}"})
        model.load_state_dict(kept["model"])
        done = kept["done"]
    os.write(1, f"from step {done}\n".encode())
    model = DDP(torch.compile(model), device_ids=[rank], output_device=rank)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for x, y in loader:
        with torch.cuda.stream(side):
            x, y = x.to(device, non_blocking=True), y.cuda(rank, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        mean = loss.detach().float()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if "hang" in sys.argv and rank == 1 and done == 3:
            import threading
            threading.Event().wait()  # for ever
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() == 0
    if rank == 0:
        names = {name.removeprefix("_orig_mod."): value for name, value in model.module.state_dict().items()}
        torch.save({"model": names, "done": done}, path)
    dist.barrier(device_ids=[rank])
    os.write(1, f"{done} steps\n".encode())
    dist.destroy_process_group()

def spawned(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ["MASTER_PORT"] = sys.argv[2]
    train(rank)

if __name__ == "__main__":
    if "spawn" in sys.argv:
        number = torch.cuda.device_count()
        torch.multiprocessing.spawn(spawned, args=(number,), nprocs=number)
    else:
        train(int(os.environ["LOCAL_RANK"]))
"""
EVERY_CALL = """
import io, threading
import torch

def refused(call):
    try:
        call()
    except NotImplementedError as error:
        assert "a rehearsal on the CPU" in str(error)
        return True

found = []
thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda").pin_memory().to(1).device))
thread.start(); thread.join()
assert found == [torch.device("cpu")]
assert torch.device(1) == torch.device("cuda", 1)
assert torch.zeros(2).cuda().new_ones(2, device="cuda:1").type("torch.cuda.DoubleTensor").dtype == torch.float64
assert torch.cuda.FloatTensor(3).device.type == "cpu"
model = torch.nn.Linear(2, 2).cuda(1).to("cuda").to(torch.device("cuda", 1), torch.float32).to(0)
for location in (None, "cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda s, l: s.cuda(0), 0):
    file = io.BytesIO(); torch.save(model.state_dict(), file); file.seek(0)
    assert torch.load(file, map_location=location)["weight"].device.type == "cpu"
here = torch.serialization.location_tag
torch.serialization.location_tag = lambda storage: "cuda:3"  # as a file that was saved on a GPU
on_gpu = io.BytesIO(); torch.save(model.state_dict(), on_gpu)
torch.serialization.location_tag = here
for location in (None, "cuda:0", {"cuda:3": "cuda:1"}, {}, lambda s, l: s.cuda(0), lambda s, l: None):
    on_gpu.seek(0)
    assert torch.load(on_gpu, map_location=location)["weight"].device.type == "cpu"
with torch.cuda.amp.autocast():
    assert model(torch.ones(1, 2)).dtype == torch.float16
assert list(torch.compile(model).state_dict())[0] == "_orig_mod.weight"
assert torch.compile(mode="max-autotune")(lambda x: x + 1)(1) == 2
with torch.cuda.device(1):
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
assert torch.cuda.current_device() == 0
try:
    torch.cuda.set_device(2)
except RuntimeError as error:
    print(error)
assert isinstance(torch.default_generator, torch.Generator)
generator = torch.Generator(device="cuda").manual_seed(3)
assert torch.randperm(4, generator=generator, device="cuda").device.type == "cpu"
state = torch.cuda.get_rng_state()
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
with torch.random.fork_rng():
    torch.rand(1)
torch.set_default_device("cuda")
assert torch.zeros(1).device.type == "cpu"
torch.set_default_device(None)
with torch.device("cuda"):
    assert torch.zeros(1).device.type == "cpu"
assert torch.nn.DataParallel(model)(torch.ones(4, 2)).shape == (4, 2)
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
    model(torch.ones(1, 2))
assert refused(torch.cuda.CUDAGraph) and refused(torch.cuda.cudart)
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())
"""


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        (house.home / "train.py").write_text(TRAINING)
        yield house


def run(house: DemoHouse, *argv: str) -> tuple[int, str, str]:
    process = house.start_command(*argv)
    stdout, stderr = process.communicate(timeout=END_S)
    return process.returncode, stdout, stderr


def named(house: DemoHouse, job: str) -> list[dict[str, Any]]:
    code, stdout, _ = run(house, *RANKDECK, "status", job, "--json")
    found: list[dict[str, Any]] = json.loads(stdout)["verdicts"] if code == ExitCode.VERDICT_STANDS else []
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_a_program_for_gpus_runs_to_its_end_and_resumes(house: DemoHouse) -> None:
    for name, first in (("first", 0), ("second", 4)):
        code, stdout, stderr = run(house, *RANKDECK, "run", "--rehearse", "--json", "--name", name, "train.py")
        assert code == 0, stderr
        assert [rank["state"] for rank in json.loads(stdout)["ranks"]] == ["done", "done"]
        lines = run(house, *RANKDECK, "logs", name)[1]
        assert lines.count(f"from step {first}\n") == lines.count(f"{first + 4} steps\n") == 2
        assert lines.count(ANNOUNCEMENT) >= 2
    assert run(house, *RANKDECK, "down", "--kill-jobs")[0] == 0


@pytest.mark.slow
@pytest.mark.ranks
def test_its_hang_is_found_before_any_gpu_waits(house: DemoHouse) -> None:
    code, stdout, stderr = run(house, *RANKDECK, "run", "--rehearse", "--detach", "--name", "h", "train.py", "hang")
    assert (code, stdout) == (0, "h\n"), stderr
    seen = until(lambda: named(house, "h"), END_S, "a rank is named")
    assert [verdict["culprits"] for verdict in seen] == [[1]]
    assert "train.py:" in seen[0]["text"]
    assert run(house, *RANKDECK, "down", "--kill-jobs")[0] == 0


@pytest.mark.ranks
def test_a_program_that_spawns_sees_two_gpus(house: DemoHouse) -> None:
    command = (sys.executable, "train.py", "spawn", str(free_port()))
    code, stdout, stderr = run(house, *RANKDECK, "exec", "--rehearse", "--", *command)
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == ["4 steps", "4 steps", "from step 0", "from step 0"]
    assert run(house, *RANKDECK, "down", "--kill-jobs")[0] == 0


def test_each_call_of_cuda_has_what_stands_for_it_or_one_error(house: DemoHouse) -> None:
    (house.home / "calls.py").write_text(EVERY_CALL)
    script = f'eval "$({sys.executable} -P -m app env --rehearse)"; exec {sys.executable} -W ignore calls.py'
    code, stdout, stderr = run(house, "sh", "-c", script)
    assert code == 0, stderr
    assert stdout == "CUDA error: invalid device ordinal: 2, and this rehearsal has 2 GPUs\ncuda 2\n"
    assert stderr.count(ANNOUNCEMENT) == 1


def test_without_a_probe_there_is_no_rehearsal(house: DemoHouse) -> None:
    code, stdout, stderr = run(house, *RANKDECK, "run", "--rehearse", "--no-probe", "train.py")
    assert (code, stdout) == (ExitCode.USAGE, "")
    assert stderr == "rankdeck: --rehearse and --no-probe contradict each other (leave --no-probe out)\n"
