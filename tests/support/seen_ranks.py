"""Ranks as looks from outside show them, by hand: stacks, and a rank with a look a second."""

from __future__ import annotations

from typing import Any

from app.inspect.seen import Look, SeenFrame, SeenRank

TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
MAIN = SeenFrame("/home/u/train.py", 30, "main", {"step": 57})
MODULE = SeenFrame("/home/u/train.py", 40, "<module>", {})


def inside(*names: str, file: str = C10D, own: SeenFrame = MAIN, **numbers: int) -> list[SeenFrame]:
    """Return a stack: functions of a file, innermost first, under a line of the program."""
    return [*(SeenFrame(file, 9, name, dict(numbers)) for name in names), own, MODULE]


def at(line: int, step: int = 57, file: str = "/home/u/load.py") -> list[SeenFrame]:
    return [SeenFrame(file, line, "read", {"step": step}), MODULE]


WAITS = inside("all_reduce", "wrapper")
BACKWARD = inside("_engine_run_backward", "backward", file=f"{TORCH}/autograd/graph.py")


def rank(number: int, *stacks: list[SeenFrame], state: str = "S", seconds: int = 2, **fields: Any) -> SeenRank:
    """Return a rank with a look a second; the last stack stays."""
    cpu_s, switches_hz = fields.pop("cpu_s", 0.0), fields.pop("switches_hz", 0)
    looks = [
        Look(
            frames=stacks[min(second, len(stacks) - 1)],
            trouble=fields.get("trouble", ""),
            at_s=float(second),
            state=state,
            cpu_s=cpu_s * second,
            switches=switches_hz * second,
            wchan=fields.get("wchan", "hrtimer_nanosleep"),
            io_bytes=fields.get("io_hz", 0) * second,
            asleep_s=fields.get("asleep_s"),
            wanted_s=None if fields.get("wanted_frac") is None else fields["wanted_frac"] * second,
        )
        for second in range(seconds + 1)
    ]
    return SeenRank(
        fields.get("pid", 100 + number),
        fields.get("age_s", 900.0),
        0,
        "train.py",
        number,
        4,
        fields.get("how", "torchrun"),
        fields.get("key", "k"),
        looks,
        fields.get("children", []),
        uses_gpu=fields.get("uses_gpu", False),
        start=fields.get("start", 0),
        directory=fields.get("directory", ""),
        own_job=fields.get("own_job", ""),
        host=fields.get("host", "h1"),
    )
