"""Opens the job's process group: checked before anybody waits, named who does not come, closed without a hang.

    with open_process_group() as group:        # torchrun's variables, or alone
        model = ddpcore.wrap(model, device=group.device)

What it adds to torch's `init_process_group`: contradictions are refused at once; ranks that do not come, come twice, or
run something else are named on every rank; the network interface is the one on the way to the others; the device is
set; local ranks are known without torchrun; and the group is left in good order, or at once after an exception. It is
torch's own rendezvous, store and group: everything of torch.distributed works in it.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Self, TypedDict

import torch
import torch.distributed as dist

from ddpcore import placement
from ddpcore.arguments import check_flag, check_is, check_seconds, check_text, check_whole
from ddpcore.barriers import named_barriers
from ddpcore.barriers.failure_notice import ends_well, explain, leave_notice
from ddpcore.errors import BackendMissingError, ContradictoryLaunchError, GroupOpenError
from ddpcore.placement import ALONE, Placement
from ddpcore.process_group import opening as mpi_group
from ddpcore.process_group.choices import DeviceFacts, backend_names, choose_backend, choose_device, choose_type
from ddpcore.process_group.closing import GroupLinks, close_group
from ddpcore.process_group.machine import check_version, device_facts, set_device
from ddpcore.process_group.rendezvous_spec import NUM_TASKS, read_rendezvous, slurm_variables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

logger = logging.getLogger(__name__)

CLOSE_S = 300.0
"""How long a close waits for other ranks by default: one may still be evaluating."""

MAX_RANKS = 1 << 31

TIMEOUT_S = 1800.0
"""Seconds of a collective's time-out, as torch has it for gloo."""


class OpenGroup:
    """An open process group, or a process alone. A context manager: the end of the block closes it.

    Where the block ends by torch's error of a lost connection, `RankFailedError` takes its place, which names the rank
    that has raised or died, with its reason.

    Attributes:
        placement: This rank among all, and among those of its node.
        device: This rank's; set as the current one if it is an accelerator.
        backend: As torch was given it; empty when alone.
    """

    def __init__(self, where: Placement, device: torch.device, backend: str, links: GroupLinks | None) -> None:
        self.placement = where
        self.device = device
        self.backend = backend
        self._links = links
        self._pid = os.getpid()
        if links is not None:
            atexit.register(self.close, has_failed=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_clean = ends_well(error)
        cause = None
        if error is not None and not is_clean and self._links is not None and self._pid == os.getpid():
            leave_notice(error)
            cause = explain(error)
        # Not where a person ends it: those are not kept waiting.
        self._close(has_failed=not is_clean, timeout_s=CLOSE_S, stays=isinstance(error, Exception))
        if cause is not None:
            raise cause from error

    def close(self, *, has_failed: bool = False, timeout_s: float = CLOSE_S) -> None:
        """Meet the other ranks, and destroy the group. A second call, and one in a forked child, does nothing.

        Main thread. Never raises for what other ranks do or do not: it logs who did not come. A program
        that ends without it leaves the group as after an error.

        Args:
            has_failed: Wait for nobody: this rank ends by an error, and others may never come.
            timeout_s: How long to wait for the others.
        """
        check_flag(ContradictoryLaunchError, "has_failed", has_failed)
        check_seconds(ContradictoryLaunchError, "timeout_s", timeout_s)
        self._close(has_failed=has_failed, timeout_s=timeout_s)

    def _close(self, *, has_failed: bool, timeout_s: float, stays: bool = False) -> None:
        links, self._links = self._links, None
        if links is None or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        close_group(links, has_failed=has_failed, timeout_s=timeout_s, stays=stays)


class GroupOptions(TypedDict, total=False):
    """Arguments of `open_process_group`, for whoever passes them on."""

    init_method: str | None
    rank: int | None
    world_size: int | None
    backend: str | None
    device: torch.device | str | None
    timeout_s: float
    join_timeout_s: float
    allow_unequal: bool


def open_process_group(  # noqa: PLR0913 - mirrors init_process_group, all by name
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = TIMEOUT_S,
    join_timeout_s: float = 600.0,
    allow_unequal: bool = False,
) -> OpenGroup:
    """Open the default process group with all ranks of the job. Main thread; blocks until they have come.

    Without a launcher's variables and without arguments the process is alone: no group is opened, and everything of
    ddpcore works. Launchers are torchrun, and srun with several tasks, each of which is a rank.

    Args:
        init_method: env://, tcp://HOST:PORT (of rank 0) or file:///PATH (on a file system that all share). None is
            env:// under torchrun, and under srun MASTER_ADDR:MASTER_PORT or, without these, the step's first node.
        rank: By default RANK of the environment, both must agree; or SLURM_PROCID.
        world_size: By default WORLD_SIZE of the environment, both must agree; or the tasks of Slurm's step. With 1 each
            task of srun trains for itself.
        backend: By default gloo on the CPU, and cpu:gloo,cuda:nccl on GPUs, so that both kinds of tensors can be sent.
        device: By default this node's GPU of the local rank's number, if GPUs are seen, else the CPU.
        timeout_s: Time-out of every collective.
        join_timeout_s: How long to wait for the other ranks here.
        allow_unequal: Only warn of ranks that run other code or versions.

    Raises:
        NotLaunchedError: A variable is absent or no number.
        ContradictoryLaunchError: Numbers, devices or ranks that cannot all be true.
        GroupOpenError: There is a process group already.
        BackendMissingError: The backend or device does not exist here.
        TorchFaultError: This torch has a known fault.
        InterfaceError: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that does not exist.
        PortInUseError: Another process listens on rank 0's port.
        StaleRendezvousError: The rendezvous file is an earlier run's.
        UnequalRanksError: Ranks run different code or versions.
        MasterUnreachableError: The store was not reached.
        RanksMissingError: Some ranks did not come; every rank that did raises it.
    """
    _check_arguments(init_method, rank, world_size, backend, device, allow_unequal=allow_unequal)
    check_seconds(ContradictoryLaunchError, "timeout_s", timeout_s)
    check_seconds(ContradictoryLaunchError, "join_timeout_s", join_timeout_s)
    if dist.is_available() and dist.is_initialized():
        raise GroupOpenError("a process group is open already: close it first, or use it as it is")
    asked = None if device is None else str(device)
    if backend is not None and "mpi" in backend_names(backend):
        return _open_with_mpi(backend, asked, timeout_s)
    spec = read_rendezvous(init_method, rank, world_size, _environment())
    if spec is None:
        return _alone(asked)
    facts = _facts()
    # Not before it is known that this torch has stores at all.
    from ddpcore.process_group.opening import Opening  # noqa: PLC0415

    kind = choose_type(asked, backend, facts)
    opening = Opening(spec, asked, kind, choose_backend(backend, kind, facts), facts)
    where, links = opening.open(timeout_s=timeout_s, join_timeout_s=join_timeout_s, allow_unequal=allow_unequal)
    opened = OpenGroup(where, opening.device, opening.backend, links)
    named_barriers.announce()
    return opened


def _environment() -> Mapping[str, str]:
    """Return the environment, without Slurm's step for what is typed into a shell of `srun --pty`.

    That shell is one of the step's tasks, and no other task would come. What srun itself has started on a terminal is
    SLURM_TASK_PID.
    """
    environ = os.environ
    if not os.isatty(0) or environ.get("SLURM_TASK_PID") == str(os.getpid()) or not slurm_variables(environ):
        return environ
    logger.warning(
        "one rank: this shell is one of the %s tasks of a step of srun. For one rank a task, type: "
        "srun --overlap python SCRIPT",
        environ[NUM_TASKS],
    )
    return {name: value for name, value in environ.items() if name != NUM_TASKS}


def _check_arguments(
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    backend: str | None,
    device: torch.device | str | None,
    *,
    allow_unequal: bool,
) -> None:
    for name, text in (("init_method", init_method), ("backend", backend)):
        if text is not None:
            check_text(ContradictoryLaunchError, name, text)
    for name, number, least in (("rank", rank, 0), ("world_size", world_size, 1)):
        if number is not None:
            check_whole(ContradictoryLaunchError, name, number, least=least, most=MAX_RANKS)
    if device is not None:
        check_is(ContradictoryLaunchError, "device", device, torch.device | str, "a torch.device, its name, or None")
        check_text(ContradictoryLaunchError, "device", str(device))
    check_flag(ContradictoryLaunchError, "allow_unequal", allow_unequal)


def _alone(asked: str | None) -> OpenGroup:
    facts = _facts() if dist.is_available() else None
    if facts is None:
        return OpenGroup(ALONE, set_device(asked or "cpu"), "", None)
    kind = choose_type(asked, None, facts)
    return OpenGroup(ALONE, set_device(str(choose_device(asked, kind, 0, 1, facts))), "", None)


def _open_with_mpi(backend: str, asked: str | None, timeout_s: float) -> OpenGroup:
    """Open a group whose ranks MPI's runtime has started: it knows them all, and has no store."""
    facts = _facts()
    kind = choose_type(asked, backend, facts)
    chosen = choose_backend(backend, kind, facts)
    check_version(backend_names(chosen), has_cuda=kind == "cuda")
    where = mpi_group.open_group(chosen, timeout_s)
    device = set_device(str(choose_device(asked, kind, where.local_rank, where.local_world_size, facts)))
    placement.remember(where)
    links = GroupLinks(where.rank, where.world_size, device, frozenset(backend_names(chosen)), None)
    return OpenGroup(where, device, chosen, links)


def _facts() -> DeviceFacts:
    if not dist.is_available():
        raise BackendMissingError(
            f"torch {torch.__version__} is built without torch.distributed: install another build of torch"
        )
    return device_facts(os.environ)
