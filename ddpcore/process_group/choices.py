"""Decides which device, backend and network interface a rank takes, by what the machine has.

Pure: what torch and the machine have, and the route to the others, are arguments (`ddpcore.process_group.machine` finds
them).

`choose_nic` picks the network interface for gloo and NCCL: the one on the route to the others. Without a setting, gloo
takes the address that the machine's own name resolves to, which on many machines is a loopback address, and connects
nobody.

Source: GLOO_SOCKET_IFNAME takes names; NCCL_SOCKET_IFNAME takes beginnings of names, and with "=" before it a name:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.errors import BackendMissingError, ContradictoryLaunchError, InterfaceError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_HOW_TO_GET = {
    "mpi": "torch's wheels come without it; build torch from source where MPI's compiler is, or use gloo or nccl",
    "nccl": "this torch is built without NCCL; install a CUDA build of torch, or use gloo",
    "ucc": "this torch is built without UCC; use gloo or nccl",
    "gloo": "this torch is built without gloo",
}


class DeviceFacts(NamedTuple):
    """Devices and backends of this process."""

    torch_version: str
    backends: frozenset[str]
    """Backends that are built in or registered, in lower case."""
    backend_of_type: Mapping[str, str]
    """Backend of each type of device, as torch knows them."""
    accelerator: str = ""
    """Type of this machine's accelerator; empty if none is seen."""
    num_devices: int = 0
    """Number of accelerators that this process sees."""
    visible_variable: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device, as torch names it."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        """Return cuda:1, or cpu."""
        return self.type if self.index is None else f"{self.type}:{self.index}"


def choose_type(asked: str | None, backend: str | None, facts: DeviceFacts) -> str:
    """Return the type of device to train on: what was asked for, else the accelerator, else the CPU.

    Raises BackendMissingError if this process does not see the type, ContradictoryLaunchError if the backend cannot
    serve the device.
    """
    backends = backend_names(backend)
    if asked is None and "nccl" in backends:
        asked = "cuda"
    kind = asked.partition(":")[0] if asked else _default_type(backends, facts)
    if kind == "cpu":
        if backend is not None and ":" not in backend and backends == {"nccl"}:
            raise ContradictoryLaunchError(
                "backend nccl is for GPUs, and device is cpu: use gloo, or train on cuda devices"
            )
        return kind
    if not facts.num_devices or facts.accelerator != kind:
        raise BackendMissingError(f"{kind} is asked for, but {_why_unseen(kind, facts)}")
    return kind


def choose_device(
    asked: str | None, kind: str, local_rank: int, local_world_size: int, facts: DeviceFacts
) -> DeviceChoice:
    """Return this rank's device: its local rank's, or the only one that it sees.

    `asked` is as the program has it, with or without an index; `kind` is of `choose_type`. Raises
    ContradictoryLaunchError if there are more ranks than devices, or no device of that index.
    """
    if kind == "cpu":
        return DeviceChoice("cpu")
    seen = f"this process sees {facts.num_devices}{_variable_text(facts)}"
    _, _, index = (asked or "").partition(":")
    if index:
        number = int(index)
        if number >= facts.num_devices:
            raise ContradictoryLaunchError(f"device {asked} is asked for, but {seen} {kind} devices, counted from 0")
        return DeviceChoice(kind, number)
    if local_rank < facts.num_devices and (local_world_size <= facts.num_devices or facts.num_devices == 1):
        return DeviceChoice(kind, local_rank)
    if facts.num_devices == 1 and facts.visible_variable:
        # A launcher that gives each rank a GPU of its own; that they differ, the join check finds.
        return DeviceChoice(kind, 0)
    raise ContradictoryLaunchError(
        f"{local_world_size} ranks on this machine, but {seen} {kind} devices: start as many ranks as devices "
        "(torchrun --nproc-per-node gpu), or give device='cpu'"
    )


def choose_backend(asked: str | None, kind: str, facts: DeviceFacts) -> str:
    """Return the backend: by default the device's own, and beside an accelerator's gloo for tensors on the CPU.

    Raises BackendMissingError with how to get it if this torch does not have it.
    """
    if asked is None:
        own = facts.backend_of_type.get(kind, "")
        if not own:
            raise BackendMissingError(f"torch {facts.torch_version} knows no backend for {kind}: give backend")
        asked = own if kind == "cpu" or "gloo" not in facts.backends else f"cpu:gloo,{kind}:{own}"
    asked = asked.lower()
    for name in sorted(backend_names(asked)):
        if name not in facts.backends:
            how = _HOW_TO_GET.get(name, f"it has {', '.join(sorted(facts.backends))}")
            raise BackendMissingError(f"backend {name!r} is not in torch {facts.torch_version}: {how}")
    return asked


def backend_names(backend: str | None) -> set[str]:
    """Return {"gloo", "nccl"} of cpu:gloo,cuda:nccl, and {"gloo"} of gloo."""
    return {part.rpartition(":")[2].strip().lower() for part in (backend or "").split(",")} - {""}


def _default_type(backends: set[str], facts: DeviceFacts) -> str:
    has_one = bool(facts.accelerator and facts.num_devices)
    serves = not backends or facts.backend_of_type.get(facts.accelerator) in backends
    return facts.accelerator if has_one and serves else "cpu"


def _why_unseen(kind: str, facts: DeviceFacts) -> str:
    if kind == "cuda" and facts.visible_variable is not None and "+cpu" not in facts.torch_version:
        return (
            f"this process sees no GPU, with CUDA_VISIBLE_DEVICES={facts.visible_variable!r}: "
            "name GPUs that nvidia-smi lists, or train with device='cpu'"
        )
    if kind == "cuda" and not facts.accelerator:
        return (
            f"this process sees no GPU (torch {facts.torch_version}): install a CUDA build of torch, see whether "
            "nvidia-smi lists a GPU, or train with device='cpu'"
        )
    return f"this process sees {facts.accelerator or 'no accelerator'}: give device='{facts.accelerator or 'cpu'}'"


def _variable_text(facts: DeviceFacts) -> str:
    return "" if facts.visible_variable is None else f" (CUDA_VISIBLE_DEVICES={facts.visible_variable!r})"


_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class Route(NamedTuple):
    """Route to another machine, or to this one itself."""

    interface: str
    address: str
    """This machine's own address on it."""
    is_loopback: bool


class NicChoice(NamedTuple):
    """Variables to set, and texts about them."""

    environment: dict[str, str]
    line: str
    """Line for the log, or ""."""
    hint: str
    """Warning, or ""."""


def check_interfaces(environ: Mapping[str, str], backends: Collection[str], interfaces: Collection[str]) -> None:
    """Raise InterfaceError for names that this machine does not have: gloo reports it nowhere, and the others wait."""
    for variable, names in _named(environ, backends):
        for name in names:
            if name not in interfaces:
                raise InterfaceError(
                    f"{variable}={environ[variable]}: this machine has no interface {name!r}, "
                    f"it has {', '.join(sorted(interfaces))}; name one of them, or unset it to have one chosen"
                )


def choose_nic(
    route: Route | None, backends: Collection[str], environ: Mapping[str, str], num_machines: int
) -> NicChoice:
    """Return the variables to set for this process; what the user has set stays. `route` leads to the others."""
    in_use = [name for name in _VARIABLES if name in backends]
    kept = {_VARIABLES[name]: environ[_VARIABLES[name]] for name in in_use if environ.get(_VARIABLES[name])}
    free = [name for name in in_use if _VARIABLES[name] not in kept]
    lines = [f"{variable}={value} by the environment" for variable, value in kept.items()]
    names = [value for value in kept.values() if value.removeprefix("=") == "lo"]
    chosen: dict[str, str] = {}
    if free and route is not None:
        chosen = {_VARIABLES[name]: f"={route.interface}" if name == "nccl" else route.interface for name in free}
        lines.append(f"{' and '.join(free)} over {route.interface} ({route.address}), the way to the other ranks")
        if route.is_loopback:
            names.append(route.interface)
    hint = ""
    if names and num_machines > 1:
        hint = (
            f"{names[0]} reaches only this machine, and the job's ranks are on {num_machines}: give rank 0's address "
            "as the others reach it, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine"
        )
    return NicChoice(chosen, "; ".join(lines), hint)


def _named(environ: Mapping[str, str], backends: Collection[str]) -> list[tuple[str, list[str]]]:
    """Return the variables that name interfaces in full; NCCL's prefixes and exclusions cannot be checked."""
    named: list[tuple[str, list[str]]] = []
    gloo, nccl = environ.get(_VARIABLES["gloo"], ""), environ.get(_VARIABLES["nccl"], "")
    if gloo and "gloo" in backends:
        named.append((_VARIABLES["gloo"], [name.strip() for name in gloo.split(",")]))
    if nccl.startswith("=") and "nccl" in backends:
        named.append((_VARIABLES["nccl"], [name.strip().partition(":")[0] for name in nccl[1:].split(",")]))
    return named
