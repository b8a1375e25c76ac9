"""Four ranks that train by DDP, each on a GPU that NVML shows: a step lasts as long as on a GPU in that state.

python on_gpus.py DIRECTORY

A copy takes longer over fewer lanes of PCIe, an older generation, or a link that sends packets again. Computing takes
longer at a lower clock, beside another process, with a faulty NVLink, and while memory errors are corrected. A file
`program` in DIRECTORY slows rank 1 by itself, `unbound` makes all ranks independent of GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COPY_S, COMPUTE_S = 0.04, 0.12
LANES, GENERATION, MEGAHERTZ = 16, 5, 1980
"""Of a GPU that nothing slows."""
CORRECTED_SINCE_LOADED = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC)
STEPS_A_LOOK = 4
directory = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.set_num_threads(1)
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ["LOCAL_RANK"]))


def slowness() -> tuple[float, float]:
    """Return how many times as long a copy and computing take now."""
    if (directory / "unbound").exists():
        return 1.0, 1.0
    lanes, generation = pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)
    resending = 3.0 if pynvml.nvmlDeviceGetPcieReplayCounter(gpu) else 1.0
    megahertz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    link = LANES / lanes * 2.0 ** (GENERATION - generation)
    return resending * link, (1.6 if is_faulty() else 1.0) * MEGAHERTZ / megahertz * max(1, num_processes())


def is_faulty() -> bool:
    """Return whether the GPU has errors of its memory or of its NVLinks."""
    num_corrected = pynvml.nvmlDeviceGetTotalEccErrors(gpu, *CORRECTED_SINCE_LOADED)
    _, _, is_remap_pending, _ = pynvml.nvmlDeviceGetRemappedRows(gpu)
    (num_links,) = fields((pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0))
    states = fields(*((pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(num_links)))
    num_errors = sum(fields(*((pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC, link) for link in range(num_links))))
    return bool(num_corrected or is_remap_pending or num_errors or not all(states))


def fields(*wanted: tuple[int, int]) -> list[int]:
    """Return the values of fields, each with its link."""
    return [answer.value.ullVal for answer in pynvml.nvmlDeviceGetFieldValues(gpu, wanted)]


def num_processes() -> int:
    """Return the number of processes on the GPU, or on its first instance in MIG mode."""
    is_in_parts, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    if is_in_parts:
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)))
    calls = (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetMPSComputeRunningProcesses)
    return sum(len(call(gpu)) for call in calls)


class Model(nn.Module):
    """A layer whose forward takes as long as the GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE_S * computing)
        return self.layer(batch)  # type: ignore[no-any-return]


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
copying, computing = 1.0, 1.0
driver = (Path("/dev") / "nvidia0").open("rb")  # as CUDA has: in a container the agent wants to see it
for step in range(1_000_000):
    if step % STEPS_A_LOOK == 0:
        copying, computing = slowness()
    time.sleep(COPY_S * copying)
    if dist.get_rank() == 1 and (directory / "program").exists():
        time.sleep(COMPUTE_S / 2)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
