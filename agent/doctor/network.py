"""Checks how this node is on the network: its addresses, its own name, and whether nodes reach each other.

`network_rows` lists its addresses, the one that others should use, and what its own name leads to.

`attend` listens on a free port of this node's address for some seconds, and `reach` connects to others that do. The
listening node sends each that connects a token, so that another machine, or a proxy, at the same address is not taken
for it. It takes nothing from them, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from agent.jobs.preflight import local_address, reserve_port
from agent.machine.host import address_of_ssh, interface_of, is_outward, outward_addresses
from agent.wire.commands import Refused
from agent.wire.examination import MAX_INTERFACES, Clock, Health, Interface, Listening, Reached, ReachReport, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that nobody has, behind the default route. Source: RFC 5737, RFC 3849."""


def outward_interfaces() -> list[Interface]:
    return [Interface(one.interface[:64], one.address, one.mtu) for one in outward_addresses()[:MAX_INTERFACES]]


def own_address(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> str:
    """Return the address at which other nodes should reach this one; empty if there is none.

    It is the one that SSH came in by (sshd sets SSH_CONNECTION), since that is known to be reached; else the one on the
    way out.
    """
    known = [interface.address for interface in interfaces]
    if (reached := address_of_ssh(environ)) in known:
        return reached
    for far_address in _FAR_AWAY:
        try:
            address = local_address(far_address)
        except OSError:
            continue
        if address in known:
            return address
    return known[0] if known else ""


def network_rows(interfaces: Sequence[Interface], address: str) -> Iterator[Row]:
    """Yield the rows about the network."""
    yield _loopback_row()
    if interfaces:
        detail = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces[:8])
        yield Row("interfaces", Health.OK, detail)
    else:
        yield Row(
            "interfaces",
            Health.WARN,
            "no interface has an address that others can reach",
            "jobs over several nodes need one",
        )
    yield _hostname_row(socket.gethostname(), address)


def _loopback_row() -> Row:
    """Bind a port on loopback, as the store of a job on one node does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server_socket:
            server_socket.bind(("127.0.0.1", 0))
            server_socket.listen(1)
            port = server_socket.getsockname()[1]
    except OSError as error:
        todo = "bring up lo: ip link set lo up"
        return Row("ports", Health.BAD, f"cannot listen on 127.0.0.1: {error.strerror}", todo)
    return Row("ports", Health.OK, f"can listen on loopback (tried port {port})")


def _hostname_row(hostname: str, address: str) -> Row:
    """Return where the node's own name leads: gloo without an interface's name takes that address.

    Debian writes 127.0.1.1 for it into /etc/hosts, and then gloo connects nobody.
    """
    try:
        resolved = [str(found[4][0]) for found in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        todo = f"add a line to /etc/hosts: {address or '<its address>'} {hostname}"
        return Row("hostname", Health.WARN, f"{hostname} has no address", todo)
    if address and not any(map(is_outward, resolved)):
        note = f"rankdeck's jobs do without; torchrun lines of your own need {address} for it in /etc/hosts"
        return Row("hostname", Health.OK, f"{hostname} is {resolved[0]}: {note}")
    return Row("hostname", Health.OK, f"{hostname} is {resolved[0]}")


LISTEN_S = 120.0
"""Longest time in seconds, whatever becomes of the console."""
CONNECT_S = 4.0
"""Seconds to wait: a lost first packet is sent again after one second and after three."""
_TOKEN_CHARS = 16
_IPV6 = 6


def hold_port(address: str, port: int) -> tuple[socket.socket | None, Listening]:
    """Listen at an address of this node, and return where, or why not. Port 0 is a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = reserve_port((family, address), port)
    if isinstance(held, Refused):
        return None, Listening(1, address, port, error=held.message[:1024])
    return held, Listening(1, address, held.getsockname()[1])


def attend(
    server_socket: socket.socket | None, where: Listening, stdin: int, stdout: int, listen_s: float = LISTEN_S
) -> None:
    """Print where this node listens, until standard input ends; answer each line there with the time of day.

    Without a `server_socket`, which is closed at the end, it only prints the reason.
    """
    if server_socket is None:
        _write_line(stdout, where)
        return
    with server_socket:
        server_socket.settimeout(0)
        token = secrets.token_hex(_TOKEN_CHARS // 2)
        _write_line(stdout, msgspec.structs.replace(where, token=token))
        deadline_s = time.monotonic() + listen_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([server_socket.fileno(), stdin], [], [], left_s)
            if server_socket.fileno() in ready:
                _greet(server_socket, token)
            if stdin in ready:
                lines = os.read(stdin, 4096)
                if not lines:
                    return
                for _ in range(lines.count(b"\n")):
                    _write_line(stdout, Clock(time.time()))  # noqa: TID251 - the clocks of machines are what is compared


def _greet(server_socket: socket.socket, token: str) -> None:
    with contextlib.suppress(OSError):  # whoever came is gone
        connection, _ = server_socket.accept()
        with connection:
            connection.settimeout(0)
            connection.send(token.encode())


def _write_line(descriptor: int, answer: msgspec.Struct) -> None:
    os.write(descriptor, msgspec.json.encode(answer) + b"\n")


def reach(targets: tuple[str, ...], connect_s: float = CONNECT_S) -> ReachReport:
    """Connect to all targets in parallel, and return the results; raise ValueError if one is no `ADDRESS:PORT`."""
    wanted = [(target, parse_target(target)) for target in targets]
    with ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        return ReachReport(1, [*pool.map(lambda one: _reached(one[0], one[1], connect_s), wanted)])


def parse_target(target: str) -> tuple[str, int]:
    """Return address and port; raise ValueError if the address is not literal: names may mean something else here."""
    address, _, port = target.rpartition(":")
    is_bracketed = address.startswith("[") and address.endswith("]")
    try:
        parsed = ipaddress.ip_address(address[1:-1] if is_bracketed else address)
    except ValueError:
        parsed = None
    # A bare IPv6 address has colons of its own: what is its port would be anybody's guess.
    if (
        parsed is None
        or is_bracketed != (parsed.version == _IPV6)
        or not port.isdecimal()
        or not 0 < int(port) < 1 << 16
    ):
        raise ValueError(f"{target!r} is not ADDRESS:PORT")
    return str(parsed), int(port)


def _reached(target: str, address: tuple[str, int], connect_s: float) -> Reached:
    started_s = time.monotonic()
    try:
        with socket.create_connection(address, connect_s) as connection:
            took_s = time.monotonic() - started_s
            interface = interface_of(connection.getsockname()[0].partition("%")[0])[:64]
            connection.settimeout(connect_s)
            return Reached(target, _token(connection), took_s, interface)
    except TimeoutError:
        return Reached(target, error=f"no answer within {connect_s:.0f} s")
    except OSError as error:
        return Reached(target, error=(error.strerror or str(error))[:1024])


def _token(connection: socket.socket) -> str:
    """Return all that the listener sends; one of ours sends sixteen characters."""
    token = b""
    while len(token) < _TOKEN_CHARS and (piece := connection.recv(_TOKEN_CHARS - len(token))):
        token += piece
    return token.decode("ascii", "replace")
