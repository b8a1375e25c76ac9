"""How a command names a relay, and the nodes behind it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from app.commands.host_options import link_by
from app.commands.inventory_file import load_inventory
from app.errors import UsageError
from app.headless import print_line
from app.inventory.inventory import LOCAL, NO_RELAY, Inventory
from app.open_files import make_room_for_nodes
from app.safe_text import clean
from app.ssh.config import THIS_MACHINE, parse_destination

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.inventory.inventory import HostEntry
    from app.ssh.relay_hub import RelayHub

relay_options = (
    click.option(
        "--relay",
        default="",
        metavar="HOST",
        help="The hosts are the nodes of the relay there, as `python -P -m agent relay` serves; --host and --exclude "
        f"choose among them; {THIS_MACHINE}: on this machine, without SSH; {NO_RELAY}: SSH goes to each host, whatever "
        "the inventory says [the inventory's]",
    ),
    click.option("--relay-dir", default="", metavar="DIR", help="Of the relay there [its usual one, the inventory's]"),
)


def relay_inventory(relay: str, relay_dir: str, *, has_no_files: bool) -> Inventory | None:
    """Return an inventory whose hosts are behind a relay, before that is asked; None where SSH goes to each.

    Raises:
        UsageError: What names the relay is no host, or there is none that a directory could be of.
    """
    inventory = Inventory() if has_no_files else load_inventory()
    relay = THIS_MACHINE if relay == LOCAL else relay
    if relay == NO_RELAY or not (relay or inventory.relay):
        if relay_dir:
            raise UsageError("--relay-dir is of a relay, and none is named", "say --relay")
        return None
    if relay:
        parse_destination(relay)
        if relay != inventory.relay:
            inventory = msgspec.structs.replace(inventory, relay_dir="")
    return msgspec.structs.replace(
        inventory, relay=relay or inventory.relay, relay_dir=relay_dir or inventory.relay_dir
    )


@contextmanager
def through_relay(inventory: Inventory, python: str, named_python: str, ssh_config: str) -> Iterator[RelayHub]:
    """Lend the connection to an inventory's relay; raises as `RelayHub.connect`."""
    from app.ssh.relay_hub import RelayHub  # noqa: PLC0415 - only who goes through one pays for paramiko

    own = next((entry for entry in inventory.hosts if entry.host == inventory.relay), None)
    way = link_by(inventory.relay, named_python, own.python if own else "", python, ssh_config)
    with RelayHub(way, inventory.relay_dir) as hub:
        hub.connect()
        make_room_for_nodes(len(hub.nodes))
        yield hub


def relayed_hosts(
    inventory: Inventory, hub: RelayHub, names: Sequence[str], exclude: Sequence[str]
) -> tuple[HostEntry, ...]:
    """Return the nodes of a relay that a person means.

    Raises:
        UsageError: It knows none, or not those.
    """
    nodes = hub.nodes
    num_here = sum(entry.is_here for node in nodes if (entry := hub.entry(node)) is not None)
    if not nodes:
        raise UsageError(
            f"no agent has come to the relay on {clean(hub.host)} yet",
            "start them: srun --ntasks-per-node=1 python -P -m agent serve --relay INVITATION",
        )
    if hub.num_expected > num_here:
        print_line(f"rankdeck: {num_here} of the {hub.num_expected} nodes that are to come are there")
    return inventory.behind_relay(nodes).chosen(names, exclude)


def refuse_relay(action: str) -> None:
    """Refuse what does not go through a relay, where the inventory has one.

    Raises:
        UsageError: It has one.
    """
    if relay := load_inventory().relay:
        raise UsageError(
            f"{action} does not go through the relay on {clean(relay)}",
            "agents behind a relay begin and end with what starts them: "
            "srun --ntasks-per-node=1 python -P -m agent serve --relay INVITATION",
        )
