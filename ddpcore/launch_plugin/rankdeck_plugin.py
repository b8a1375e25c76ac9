"""What rankdeck adds to a job's Python processes, found as entry points through PYTHONPATH; nothing is installed.

Loaded at the end of `import torch` in every such process: it imports neither torch nor ddpcore before they are needed,
and nothing of the probe escapes from `autoload`, since it would break the user's `import torch`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def autoload() -> None:
    """Start the probe in a rank, or have it start when the process becomes one (entry point `torch.backends`).

    Raises:
        ImportError: A rehearsal was asked for, and this Python has no rankdeck.
    """
    if num_gpus := os.environ.get("RANKDECK_REHEARSAL"):
        importlib.import_module("ddpcore.rehearsal.rehearsal").begin(int(num_gpus))
    # A rank without a probe trains on; one whose `import torch` fails does not.
    with contextlib.suppress(BaseException):
        if "RANKDECK_UNPROBED" in os.environ:
            return
        if "RANKDECK_INBOX" not in os.environ and "torch.distributed.distributed_c10d" in sys.modules:
            importlib.import_module("ddpcore.adoption").start_if_rank()
        elif "RANKDECK_INBOX" in os.environ and "RANK" in os.environ:
            importlib.import_module("ddpcore.probe.bootstrap").start_in_rank()


def elastic_rendezvous() -> Callable[[Any], object]:
    """Return what makes the rendezvous of an elastic job (entry point `torchrun.handlers`).

    torch asks for it in every process that imports its rendezvous, and calls it in the launcher of such a job alone.
    """
    return lambda params: importlib.import_module("rankdeck_elastic").create_counted_handler(params)


def __getattr__(name: str) -> object:
    """Load the entry point of torchrun, which alone needs torch here."""
    if name != "RankLogsSpecs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("rankdeck_logs_specs").RankLogsSpecs
