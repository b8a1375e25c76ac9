"""Stacks of a rank's main thread, by what it does or is held by, and what the probe finds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.probe.samples import MainLook
from ddpcore.wire import MONITORED_BARRIER, NEW_GROUP, ChildWait, ExitWait, PeerCall, PeerWait, Phase, Place
from tests.corpus.generator.program import GATE
from tests.support.sim_program import PROGRAM_FILE
from tests.support.sim_rank import TORCH

if TYPE_CHECKING:
    from ddpcore.probe.stack import StackLine

LIBRARY = "/usr/lib/python3.11/"
C10D = TORCH + "distributed/distributed_c10d.py"

CALL_FRAMES: dict[Phase, list[StackLine]] = {
    Phase.FORWARD: [
        (TORCH + "nn/parallel/distributed.py", 2210, "_sync_module_buffers"),
        (TORCH + "nn/modules/module.py", 1773, "_call_impl"),
    ],
    Phase.BACKWARD: [
        (TORCH + "autograd/graph.py", 869, "_engine_run_backward"),
        (TORCH + "_tensor.py", 647, "backward"),
    ],
    Phase.OTHER: [],
}
WORK_FRAMES: dict[Phase, list[StackLine]] = {
    Phase.DATA: [(TORCH + "utils/data/dataloader.py", 741, "__next__")],
    Phase.FORWARD: [(TORCH + "nn/modules/module.py", 1773, "_call_impl")],
    Phase.BACKWARD: CALL_FRAMES[Phase.BACKWARD],
    Phase.OPTIMIZER: [(TORCH + "optim/sgd.py", 128, "step")],
    Phase.CHECKPOINT: [(TORCH + "serialization.py", 944, "save")],
}
STUCK_FRAMES: dict[str, list[StackLine]] = {
    "sleep": [],
    "file": [],
    "lock": [(LIBRARY + "threading.py", 320, "wait")],
    "child": [(LIBRARY + "subprocess.py", 2011, "_try_wait"), (LIBRARY + "subprocess.py", 1264, "wait")],
    "loader": [
        (LIBRARY + "multiprocessing/connection.py", 948, "wait"),
        (TORCH + "utils/data/dataloader.py", 1296, "_try_get_data"),
        (TORCH + "utils/data/dataloader.py", 741, "__next__"),
    ],
    "new_group": [(C10D, 5441, "_new_group_with_tag"), (C10D, 5336, "new_group")],
    "recv": [(C10D, 2660, "recv")],
}
MEETING_FRAMES: dict[str, list[StackLine]] = {
    GATE: [
        ("/venv/ddpcore/barriers/store_barrier.py", 96, "pass_barrier"),
        ("/venv/ddpcore/barriers/named_barriers.py", 45, "barrier"),
    ],
    MONITORED_BARRIER: [(C10D, 5051, "monitored_barrier")],
    NEW_GROUP: STUCK_FRAMES["new_group"],
}
END_FRAMES: dict[str, StackLine] = {
    "thread": (LIBRARY + "threading.py", 1590, "_shutdown"),
    "process": (LIBRARY + "multiprocessing/util.py", 360, "_exit_function"),
    "atexit": (PROGRAM_FILE, 195, "flush"),
}
"""At the root of the stack of a main thread whose program is done."""
EXIT_WAITS = {
    "thread": ExitWait("thread", "uploader", Place(PROGRAM_FILE, 77, "run")),
    "process": ExitWait("process", pid=78),
    "atexit": ExitWait("atexit", "flush", Place(PROGRAM_FILE, 195, "flush")),
}
STUCK_LINE = 190
CHILDREN = {"child": "subprocess", "loader": "loader worker"}
CHILD_PID = 77
OWN_TAG = 7
"""Of a receive from any rank: no send of the program has it."""


def look_at(kind: str, *, is_still: bool) -> MainLook:
    """Return what `ddpcore.probe.main_thread` finds where a fault holds the main thread."""
    wait = PeerWait([PeerCall("recv", None, tag=OWN_TAG, number=1)]) if kind == "recv" else None
    if not is_still:
        return MainLook(peer_wait=wait)
    child = CHILDREN.get(kind)
    return MainLook(-STUCK_LINE, wait, ChildWait(CHILD_PID, child) if child else None, EXIT_WAITS.get(kind))
