"""Which network interface gloo and NCCL are told to use: the one on the way to the others.

Pure: the route is an argument (`ddpcore.process_group.network` finds it). Without being told, gloo takes the address
that the machine's own name resolves to, which on many machines is a loopback address, and connects nobody.

Source: GLOO_SOCKET_IFNAME takes names; NCCL_SOCKET_IFNAME takes beginnings of names, and with "=" before it a name:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddpcore.errors import InterfaceError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class Route(NamedTuple):
    """The way to another machine, or to this one itself."""

    interface: str
    address: str
    """This machine's own on it."""
    is_loopback: bool


class NicChoice(NamedTuple):
    """What to set, and what to say of it."""

    environment: dict[str, str]
    line: str
    """For the log; empty if there is nothing to say."""
    hint: str
    """A warning, or empty."""


def check_interfaces(environ: Mapping[str, str], backends: Collection[str], interfaces: Collection[str]) -> None:
    """Refuse names that this machine does not have: gloo says so only to itself, and the others wait.

    Args:
        environ: The process's environment.
        backends: In use.
        interfaces: Of this machine.

    Raises:
        InterfaceError: There is no such interface.
    """
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
    """Return the variables to set for this process.

    Args:
        route: To the others; None if no way was found.
        backends: In use.
        environ: The process's environment: what the user has set stays.
        num_machines: On which the job's ranks run.
    """
    in_use = [name for name in _VARIABLES if name in backends]
    kept = {_VARIABLES[name]: environ[_VARIABLES[name]] for name in in_use if environ.get(_VARIABLES[name])}
    free = [name for name in in_use if _VARIABLES[name] not in kept]
    says = [f"{variable}={value} as the environment says" for variable, value in kept.items()]
    names = [value for value in kept.values() if value.removeprefix("=") == "lo"]
    chosen: dict[str, str] = {}
    if free and route is not None:
        chosen = {_VARIABLES[name]: f"={route.interface}" if name == "nccl" else route.interface for name in free}
        says.append(f"{' and '.join(free)} over {route.interface} ({route.address}), the way to the other ranks")
        if route.is_loopback:
            names.append(route.interface)
    hint = ""
    if names and num_machines > 1:
        hint = (
            f"{names[0]} reaches only this machine, and the job's ranks are on {num_machines}: give rank 0's address "
            "as the others reach it, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine"
        )
    return NicChoice(chosen, "; ".join(says), hint)


def _named(environ: Mapping[str, str], backends: Collection[str]) -> list[tuple[str, list[str]]]:
    """Return the variables that name interfaces in full; of NCCL's beginnings and exclusions nothing can be said."""
    named: list[tuple[str, list[str]]] = []
    gloo, nccl = environ.get(_VARIABLES["gloo"], ""), environ.get(_VARIABLES["nccl"], "")
    if gloo and "gloo" in backends:
        named.append((_VARIABLES["gloo"], [name.strip() for name in gloo.split(",")]))
    if nccl.startswith("=") and "nccl" in backends:
        named.append((_VARIABLES["nccl"], [name.strip().partition(":")[0] for name in nccl[1:].split(",")]))
    return named
