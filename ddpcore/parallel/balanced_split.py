"""How one process splits a batch over its devices when the first one has more to hold: pure.

Outputs, losses and the optimizer's state gather on device 0, whose memory therefore fills first; with fewer samples
there, all devices can be filled.
"""

from __future__ import annotations


def balanced_sizes(
    num_samples: int, num_devices: int, first_device_batch: int | None = None, accumulation_steps: int = 1
) -> list[int]:
    """Return how many samples of one forward each device takes.

    Device 0 takes `first_device_batch // accumulation_steps`, the others the rest, evenly, a remainder one by one from
    device 1 on. Device 0 never takes more than in an even split: where its share would not be smaller, the split is
    even, so that a last, smaller batch of an epoch does not land on device 0 alone. Example, at most 3 samples on
    each of three devices but only 2 on the first: 16 samples in two forwards of 8 are 2, 3, 3.

    Args:
        num_samples: Of one forward, 0 or more.
        num_devices: 1 or more; a single device takes everything.
        first_device_batch: What device 0 takes of a whole step; 0 leaves it out; None splits evenly.
        accumulation_steps: Forwards of a step.

    Raises:
        ValueError: An argument is out of its range.

    Source: Balanced-DataParallel, from Transformer-XL's `utils/data_parallel.py`.
    """
    least = {"num_samples": 0, "num_devices": 1, "first_device_batch": 0, "accumulation_steps": 1}
    given = {
        "num_samples": num_samples,
        "num_devices": num_devices,
        "first_device_batch": first_device_batch or 0,
        "accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if value < least[name]:
            raise ValueError(f"{name} is {value}: it is at least {least[name]}")
    if num_devices == 1:
        return [num_samples]
    first = num_samples // num_devices
    if first_device_batch is not None:
        first = min(first, first_device_batch // accumulation_steps)
    share, remainder = divmod(num_samples - first, num_devices - 1)
    return [first, *(share + (device < remainder) for device in range(num_devices - 1))]
