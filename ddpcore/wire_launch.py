"""What whoever starts ranks agrees on with them: where their agent lives, and what in the environment loads the probe.

Pure: environment and host name are arguments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.wire import (
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LAUNCHER_NAMESPACE,
    ENV_LAUNCHER_PID,
    ENV_LOG_DIR,
    ENV_PROBED_PID,
    ENV_REQUEST_DIR,
    ENV_ROUND,
    ENV_STORE_FD,
    ENV_UNPROBED,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LAUNCH_PLUGIN_DIR = Path(__file__).parent / "launch_plugin"
"""Goes first on a job's PYTHONPATH: entry points that load the probe and name the log files."""
ENV_AGENT_DIR = "RANKDECK_AGENT_DIR"
"""Directory of the agent for ranks that it has not launched, where that is another one than by the rule."""
ENV_EXEC_PID = "RANKDECK_EXEC_PID"
"""Pid of the command that `rankdeck exec` has become: the launcher of the ranks below it."""
ENV_REHEARSAL = "RANKDECK_REHEARSAL"
"""GPUs that a program sees whose GPUs are the CPU; unset outside of a rehearsal."""
INBOX_SOCKET = "inbox.sock"
ADOPTED_DIR = "adopted"
"""Directory in the agent's own with one for each job that it has not launched: the sockets of the ranks' probes."""
EXEC_SUFFIX = ".exec"
"""Ends the name `PID-STARTED_TICKS.exec` of an empty file there: a process that `rankdeck exec` has become."""
SLURM_INFIX = "-slurm-"
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
"""Variables that srun sets for its tasks. Source: srun(1), OUTPUT ENVIRONMENT VARIABLES. Measured with 22.05: a batch
script has SLURM_PROCID, and no SLURM_STEP_ID."""
_NUMBER = re.compile(r"[0-9]{1,10}")


def slurm_step_numbers(environ: Mapping[str, str]) -> list[str] | None:
    """Return the values of `_SLURM_STEP` in a step of a Slurm job, digits alone; None elsewhere."""
    texts = [environ.get(name, "") for name in _SLURM_STEP]
    return texts if all(_NUMBER.fullmatch(text) for text in texts) else None


def agent_directories(environ: Mapping[str, str], hostname: str) -> list[Path]:
    """Return the directories that an agent with this environment has on a host, the one that it takes first.

    A home that hosts share has a directory for each. An agent in a step of a Slurm job has one for that job, so that
    two jobs may share a host; there may be another one on that host outside of the step. Empty where neither
    XDG_STATE_HOME nor HOME is an absolute path. Source: XDG Base Directory Specification 0.8 (others are ignored).
    """
    state_home, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if state_home.startswith("/"):
        parent = Path(state_home, "rankdeck")
    elif home.startswith("/"):
        parent = Path(home, ".local", "state", "rankdeck")
    else:
        return []
    step = slurm_step_numbers(environ)
    names = [f"{hostname}{SLURM_INFIX}{step[0]}", hostname] if step else [hostname]
    return [parent / name for name in names]


def taking_directory(directories: Sequence[Path], serves: Callable[[Path], bool]) -> Path | None:
    """Return which of a host's directories is that of the agent that takes ranks in; None where there is none at all.

    The first whose agent serves: a step that has ended leaves its own. Else the first that is there, else the first.

    Args:
        directories: As `agent_directories` returns them.
        serves: Whether an agent receives what is sent to `INBOX_SOCKET` in a directory.
    """
    served = next(filter(serves, directories), None)
    there = served or next((path for path in directories if path.exists()), None)
    return there or next(iter(directories), None)


RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Rank of a process by its launcher: torchrun, Open MPI, MPICH and Intel MPI, srun. The first that is set counts."""
JOB_VARIABLES = frozenset(
    {
        *(ENV_INBOX, ENV_JOB_ID, ENV_ATTEMPT, ENV_REQUEST_DIR, ENV_LOG_DIR, ENV_FAULTS, ENV_STORE_FD, ENV_ROUND),
        *(ENV_LAUNCHER_PID, ENV_LAUNCHER_NAMESPACE, ENV_PROBED_PID, ENV_UNPROBED),
    }
)
"""Variables that an agent, a launcher or a probe sets for the processes of one job."""
_LAUNCHERS_PREFIXES = ("PET_", "TORCHELASTIC_", "RANKDECK_")
_LAUNCHERS_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    }
)
RECORDER_ENTRIES = 64
"""Entries of torch's flight recorder: a full dump of 64 takes 0.5 ms."""
_RECORDER_ALIAS = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The user's own setting of the recorder, which TORCH_FR_BUFFER_SIZE would override."""


def is_of_launcher(name: str) -> bool:
    """Return whether a variable is of an outer torchrun or an outer job, so that no other one inherits it."""
    return name in _LAUNCHERS_NAMES or name.startswith(_LAUNCHERS_PREFIXES)


def put_plugin(env: dict[str, str]) -> None:
    """Put the launch plug-in first on the search path of an environment."""
    search_path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{LAUNCH_PLUGIN_DIR}:{search_path}" if search_path else str(LAUNCH_PLUGIN_DIR)


def put_recorder(env: dict[str, str]) -> None:
    """Switch on what the probe reads of torch, where the user has not set it otherwise."""
    if not env.get(_RECORDER_ALIAS):
        env.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDER_ENTRIES))
    # When a GPU comes to a collective, and how long it waits there: who is late, and whose kernel does not end.
    env.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def rehearsal_variables(num_gpus: int) -> dict[str, str]:
    """Return what lets a program for GPUs run on the CPU, and see so many; GPUs that are there stay unused."""
    return {ENV_REHEARSAL: str(num_gpus), "CUDA_VISIBLE_DEVICES": ""}


def prepared_env(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Return an environment whose ranks load the probe and are taken in by their host's agent.

    Args:
        environ: The environment before.
        name: Name of the job; empty leaves it to what the launcher calls it.
    """
    env = {key: value for key, value in environ.items() if key not in JOB_VARIABLES}
    put_plugin(env)
    put_recorder(env)
    if name:
        env[ENV_JOB_ID] = name
    return env
