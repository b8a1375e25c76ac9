"""Stacks as nodes answer them: a training whose ranks wait in backward, and others that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.stacks import KernelFacts, RankStacks, Stacks, StackSource
from app.stacks.groups import NodeStacks
from ddpcore.wire_stacks import Frame, PendingCall, ThreadStack

if TYPE_CHECKING:
    from collections.abc import Sequence

TRAIN = "/home/me/project/train.py"
LIBRARIES = "/home/me/venv/lib/python3.11/site-packages/"
ALL_REDUCE_57 = PendingCall("0", 57, "all_reduce")
STOPPED = "its process is stopped, and its probe with it"

BACKWARD = (
    Frame(f"{LIBRARIES}torch/autograd/graph.py", 865, "_engine_run_backward"),
    Frame(f"{LIBRARIES}torch/autograd/__init__.py", 354, "backward"),
    Frame(f"{LIBRARIES}torch/_tensor.py", 630, "Tensor.backward"),
)
"""Where a rank waits for the gradients of others."""


def in_step(line: int, *inner: Frame) -> list[Frame]:
    """Return a stack that goes from the script's start to a line of its `Trainer.step`, and on into libraries."""
    return [
        *inner,
        Frame(TRAIN, line, "Trainer.step", is_own=True),
        Frame(TRAIN, 88, "main", is_own=True),
        Frame(TRAIN, 120, "<module>", is_own=True),
        Frame("<frozen runpy>", 88, "_run_code"),
        Frame("<frozen runpy>", 198, "_run_module_as_main"),
    ]


def standing(
    rank: int,
    frames: Sequence[Frame],
    *pending: PendingCall,
    state: str = "S",
    source: StackSource = StackSource.PROBE,
    note: str = "",
) -> RankStacks:
    """Return a rank whose main thread stands there, beside a thread of ours."""
    heartbeat_thread = ThreadStack(
        "rankdeck-heart", 77, [Frame("/usr/lib/python3.11/threading.py", 331, "Condition.wait")]
    )
    return RankStacks(
        rank=rank,
        source=source,
        pid=4000 + rank,
        threads=[ThreadStack("MainThread", 4000 + rank, list(frames)), heartbeat_thread],
        pending=list(pending),
        kernel=KernelFacts(state, wchan="futex_wait_queue"),
        note=note,
    )


def waiting(rank: int) -> RankStacks:
    """Return a rank that waits in the all-reduce of its backward."""
    return standing(rank, in_step(41, *BACKWARD), ALL_REDUCE_57)


def frozen(rank: int) -> RankStacks:
    """Return a rank that was stopped in its forward."""
    frames = in_step(38, Frame(f"{LIBRARIES}torch/nn/functional.py", 2460, "linear"))
    return standing(rank, frames, state="T", source=StackSource.PY_SPY, note=STOPPED)


def answer(node: str, *ranks: RankStacks, took_s: float = 0.04) -> NodeStacks:
    """Return what a node with these ranks answers."""
    return NodeStacks(node, Stacks("train", 0, took_s, list(ranks)))


def one_frozen() -> list[NodeStacks]:
    """Return two nodes with two ranks each, of which rank 2 is frozen."""
    return [answer("demo-0", waiting(0), waiting(1)), answer("demo-1", frozen(2), waiting(3))]
