"""Random numbers of a training: equal on all ranks while the model is made, apart afterwards, and saved with it.

Three kinds of randomness are kept apart. The model's first weights come from the seed alone, so that every rank makes
the same model. What a step draws (dropout) comes from seed, step and rank. What a sample draws (augmentation) should
come from `ddpcore.samplers.order.sample_seed`, which knows of no rank.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ddpcore.errors import CheckpointContentError


def mix(*parts: int) -> int:
    """Return a seed of 64 bits made of numbers that need not look random, none of them negative."""
    high, low = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return int(high) << 32 | int(low)


def seed_everything(*parts: int) -> None:
    """Seed Python's, numpy's and torch's generators, all devices included, from the `mix` of some numbers."""
    seed = mix(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed >> 32)
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator that `seed_everything` seeds, as a checkpoint can hold it."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator back to where `random_state` found it; raise CheckpointContentError for another state."""
    try:
        torch.set_rng_state(state["torch"].cpu())
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numbers = keys.cpu().numpy().astype(np.uint32)
        np.random.set_state((kind, numbers, position, has_gauss, gauss))
        version, numbers, gauss_next = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss_next))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointContentError(f"the checkpoint's random state is not of this program: {error!r}") from error
