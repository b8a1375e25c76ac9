"""Jobs of `rankdeck run` on a real GPU: what hangs, ends or is refused there is told with its rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import run_rankdeck
from tests.support.demo_runs import DemoHouse
from tests.support.gpus import needs_gpu
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]

PROGRAM = Path(__file__).parent / "programs" / "trains.py"
PATIENCE_S = 75.0
"""For torch's import, NCCL's start and a verdict, beside other tests."""
ABORT_S = 150.0
"""For NCCL's watchdog, which aborts the process once the GPU is through with its kernel."""
MIB = 2**20
NVIDIA_SMI = (
    *("name", "memory.total", "memory.used"),
    *("clocks.max.sm", "clocks.sm", "clocks.mem", "temperature.gpu"),
)


class Job:
    """A job in a house of its own, with a name that no other job on this GPU has."""

    def __init__(self, house: DemoHouse) -> None:
        self._house = house
        self.name = f"gpu-{os.getpid()}"

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return run_rankdeck(*arguments, cwd=self._house.home, environ=self._house.environment)

    def json(self, *arguments: str) -> dict[str, Any]:
        _, printed, stderr = self.run(*arguments, "--json")
        assert printed, stderr
        found: dict[str, Any] = json.loads(printed)
        return found

    def start(self, kind: str, *options: str, num_ranks: int = 1, program: Path = PROGRAM) -> None:
        how = ("--name", self.name, "--nproc-per-node", str(num_ranks), "--share-gpus", *options)
        code, _, stderr = self.run("run", "--detach", *how, "--", str(program), kind)
        assert code == 0, stderr

    def status_when(
        self, condition: Callable[[dict[str, Any]], object], what: str, within_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Return the first status that satisfies `condition`."""
        seen: list[dict[str, Any]] = []

        def look() -> bool:
            seen[:] = [self.json("status")]
            return bool(condition(seen[0]))

        try:
            until(look, within_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(seen, indent=1)}\n{self.run('logs')}") from None
        return seen[0]

    def status_with_verdict(self, **fields: object) -> dict[str, Any]:
        def fits(status: dict[str, Any]) -> bool:
            return bool(status["verdicts"]) and status["verdicts"][0].items() >= fields.items()

        return self.status_when(fits, f"a verdict with {fields}")

    def status_when_failed(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        def has_failed(status: dict[str, Any]) -> bool:
            return [job["state"] for job in status["jobs"]] == ["failed"]

        return self.status_when(has_failed, "the job's end", within_s)


@pytest.fixture
def job() -> Iterator[Job]:
    with DemoHouse() as house:
        yield Job(house)


def test_a_time_out_of_nccl_s_watchdog_is_told_with_its_rank(job: Job) -> None:
    job.start("timeout")

    (ended,) = job.status_when_failed(ABORT_S)["jobs"]

    assert ended["exit_code"] == 1
    assert "rank 0" in ended["detail"]
    assert "Watchdog caught collective operation timeout" in ended["detail"]


def test_a_kernel_that_does_not_end_is_told_as_a_hang_of_its_rank(job: Job) -> None:
    job.start("hang")

    # Its call is behind the kernel: nobody waits for another rank, and the GPU that has not come is the cause.
    status = job.status_with_verdict(culprits=[0], severity="critical")

    assert status["verdicts"][0]["waiting"] == []
    assert status["ranks"][0]["where"].startswith("trains.py:")


def test_a_healthy_rank_waits_for_nobody_though_its_calls_of_nccl_are_nearly_always_pending(job: Job) -> None:
    job.start("train")

    # A collective of one rank takes microseconds; NCCL's watchdog sees it end up to 0.1 s later.
    status = job.status_when(lambda status: status["ranks"][0]["wait_frac"] is not None, "how much it waits")

    assert status["ranks"][0]["wait_frac"] < 0.1
    assert (status["verdicts"], status["barriers"]) == ([], [])


@pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None and shutil.which("py-spy") is None,
    reason="py-spy is not installed",
)
def test_a_look_from_outside_shows_a_rank_that_waits_for_its_gpu(job: Job) -> None:
    job.start("hang")
    (rank,) = job.status_with_verdict(severity="critical")["ranks"]

    (found,) = job.json("inspect", str(rank["pid"]))["jobs"]

    assert (found["world_size"], found["missing"]) == (1, [])
    (seen,) = found["ranks"]
    assert (seen["pid"], seen["state"], seen["is_moving"]) == (rank["pid"], "waits for its GPU", False)
    lines = PROGRAM.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# WAITS FOR THE GPU"))
    assert seen["where"] == f"trains.py:{line} in main"


def test_a_rank_whose_gpu_has_no_memory_left_is_told_so(job: Job) -> None:
    job.start("oom")

    status = job.status_when_failed()

    verdict, root_cause = status["verdicts"][0], status["jobs"][0]["root_cause"]
    assert (verdict["cause"], verdict["culprits"]) == ("oom", [0])
    assert root_cause["rank"] == 0
    assert root_cause["exception"].startswith("torch.OutOfMemoryError: CUDA out of memory")


def test_of_two_ranks_on_one_gpu_the_stopped_one_is_told(job: Job) -> None:
    job.start("freeze", num_ranks=2)

    status = job.status_with_verdict(cause="frozen", culprits=[1], waiting=[0])

    assert [(rank["rank"], rank["gpu"]) for rank in status["ranks"]] == [(0, 0), (1, 0)]


def test_nccl_s_refusal_of_two_ranks_on_one_gpu_is_told(job: Job) -> None:
    job.start("train", num_ranks=2)

    root_cause = job.status_when_failed()["jobs"][0]["root_cause"]

    assert "Duplicate GPU detected" in "\n".join([root_cause["text"], *root_cause["traceback"]])


def test_the_figures_of_a_gpu_are_those_of_nvidia_smi(job: Job) -> None:
    job.start("train")
    job.status_when(lambda status: (status["jobs"][0]["step"] or 0) > 5, "some steps")

    def agree() -> str:
        """Return the first GPU's UUID once its figures agree, which other tests change all the time."""
        gpu = job.json("status")["gpus"][0]
        query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", f"--id={gpu['uuid']}"]
        done = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
        name, *figures = done.stdout.strip().split(", ")
        total, used, max_clock, clock, memory_clock, celsius = map(int, figures)
        assert (gpu["name"], gpu["sm_clock_max_hz"]) == (name, max_clock * 1_000_000)
        assert abs(gpu["memory_total_bytes"] - total * MIB) <= MIB
        is_used = abs(gpu["memory_used_bytes"] - used * MIB) <= 256 * MIB
        clocks = ((gpu["sm_clock_hz"], clock), (gpu["memory_clock_hz"], memory_clock))
        are_clocks = all(abs(shown_hz / 1e6 - mhz) <= 0.1 * mhz for shown_hz, mhz in clocks)
        is_warm = abs(gpu["temperature_celsius"] - celsius) <= 5
        has_rank = gpu["ranks"] == [0] and (gpu["torch_allocated_bytes"] or 0) > 0
        return str(gpu["uuid"]) if is_used and are_clocks and is_warm and has_rank else ""

    assert until(agree, PATIENCE_S, "figures like nvidia-smi's").startswith("GPU-")
