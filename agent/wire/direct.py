"""How a node is asked to send its reports straight to a console, over TCP with CURVE; keys are public halves."""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

import msgspec

from agent.wire.fields import Port, PublicKey
from ddpcore.wire import Name, Seconds

MAX_DIRECT_ADDRESSES = 8
"""Of one interface."""
_INTERFACE = r"^[0-9A-Za-z_.:@/-]{1,64}\Z"
Interface = Annotated[str, msgspec.Meta(pattern=_INTERFACE)]
"""A network interface of the node, as `eth0`, or one by an address or a network of it: `10.0.0.0/24`."""


class ListenForTelemetry(
    msgspec.Struct, frozen=True, tag="listen_for_telemetry", forbid_unknown_fields=True, omit_defaults=True
):
    """Listen over TCP for a console that has the secret half of a key; asked again it renews the lease of that key."""

    client_key: PublicKey
    interface: Interface
    """Nothing listens elsewhere."""
    first_port: Port = 0
    last_port: Port = 0
    """The range to choose from, both ends included; 0 and 0 is any that is free."""


class StopListening(msgspec.Struct, frozen=True, tag="stop_listening", forbid_unknown_fields=True):
    """Know a key no more; its connections end. Without a key the node does not listen."""

    client_key: PublicKey


class Listening(msgspec.Struct, frozen=True, tag="listening", omit_defaults=True):
    """Where the node listens."""

    server_key: PublicKey
    """Another one each time that it begins to listen."""
    addresses: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_DIRECT_ADDRESSES)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    lease_s: Seconds
    """How long the client's key is known from now on."""
    is_renewal: bool = False
    """Whether the key was known before, and let in there."""


def is_interface(text: str) -> bool:
    """Return whether a text may stand for an interface."""
    return re.match(_INTERFACE, text) is not None


def network_of(interface: str) -> IPv4Network | IPv6Network | None:
    """Return the network that stands for an interface; None where it is called by its name.

    Raises:
        ValueError: It would be every interface, or one that nobody else reaches; the message says which.
    """
    try:
        network = ip_network(interface, strict=False)
    except ValueError:
        return None
    if network.prefixlen == 0 or network.network_address.is_unspecified:
        raise ValueError(f"{interface} would be every interface")
    if network.is_loopback:
        raise ValueError(f"{interface} is loopback, which no other machine reaches")
    return network
