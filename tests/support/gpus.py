"""Whether this machine has GPUs to test on."""

from __future__ import annotations

import pytest
import torch

NUM_GPUS: int = torch.cuda.device_count() if torch.version.cuda else 0
"""Asked of NVML: `is_available()` would initialise CUDA, and ranks forked from the process could not use it.

Source: torch/cuda/__init__.py, `device_count` and `is_available`, torch 2.8 to 2.13.
"""
needs_gpu = pytest.mark.skipif(not NUM_GPUS, reason="this machine has no NVIDIA GPU, or this torch no CUDA")
