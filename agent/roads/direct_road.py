"""The TCP socket on which reports go straight to consoles: there only while one has asked for it over SSH.

It stands on the addresses of one interface, behind a gate that knows the key of each console for the time of a lease.
A key that is known no more does not end the connections that were made with it, so the socket is closed then: whoever
is still known comes back to the same port by itself.

libzmq takes every connection, and each costs a descriptor until its handshake has failed: where strangers come in
crowds the socket is closed before the agent has none left for its jobs.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from agent.roads.curve import CurveGate, KnownKeys
from agent.roads.publisher import Outlet
from agent.wire.direct import MAX_DIRECT_ADDRESSES, Listening
from agent.wire.replies import RefusalReason, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.wire.direct import ListenForTelemetry

LEASE_S = 300.0
"""How long a console's key is known unless it asks again."""
MAX_INCOMING_BYTES = 4096
"""Of what a peer sends: a handshake, or a subscription."""
HANDSHAKE_MS = 3000
"""A stranger who connects and says nothing holds a descriptor for so long."""
NUM_TRIES = 8
"""Of any port that is free, where it must be the same on several addresses."""
REBIND_S = 0.2
"""For libzmq to let go of a port that it closes in another thread: a millisecond as a rule."""
REBIND_PAUSE_S = 0.002
MAX_OPEN_FRAC = 0.6
"""Of the descriptors that this process may have: nothing listens where so many are open."""
REST_S = 60.0
"""After which it may listen again."""
CROWDED = (
    "too many files are open in the agent to listen: shut strangers out of its port by a firewall, or raise ulimit -n"
)


class DirectRoad:
    """The socket, from the first console's key to the last one's; all calls come from one thread.

    Attributes:
        outlet: Where reports go out; None while nobody is let in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen nowhere yet."""
        self.outlet: Outlet | None = None
        self._clock = clock
        self._known = KnownKeys(clock)
        self._wanted: dict[str, tuple[str, ...]] = {}
        """The addresses that each console has asked for, by its key."""
        self._bound: tuple[str, ...] = ()
        self._port = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: CurveGate | None = None
        self._rests_until_s = 0.0

    def open(self, command: ListenForTelemetry, addresses: Sequence[str]) -> Listening | Refused:
        """Let a console in, at the addresses of the interface that it has named.

        Returns:
            Where it may come in; or why it may not, and then nothing has changed.
        """
        self.beat()
        if not addresses:
            words = f"no address on {command.interface}: name one of this node by telemetry_interface (ip addr)"
            return Refused(RefusalReason.NO_INTERFACE, words)
        if self._clock() < self._rests_until_s or _are_descriptors_short():
            return Refused(RefusalReason.NOT_PERMITTED, CROWDED)
        first, last = command.first_port, command.last_port or command.first_port
        wanted = tuple(addresses[:MAX_DIRECT_ADDRESSES])
        is_renewal = self._wanted.get(command.client_key) == wanted
        if self._port and first and not first <= self._port <= last:
            words = f"other consoles are let in at port {self._port}: let telemetry_port be that"
            return Refused(RefusalReason.PORT_TAKEN, words)
        if not self._listen_at(wanted, range(first, last + 1)):
            words = f"no free port from {first} to {last} on {command.interface}: name others by telemetry_port"
            return Refused(RefusalReason.PORT_TAKEN, words)
        assert self._gate is not None
        self._known.let_in(command.client_key, LEASE_S)
        self._wanted[command.client_key] = wanted
        return Listening(self._gate.key.public, list(wanted), self._port, LEASE_S, is_renewal)

    def forget(self, client_key: str) -> None:
        """Know a console's key no more, and end its connections."""
        self._known.forget(client_key)
        self.beat()

    def beat(self) -> None:
        """End the connections of those whose lease is over, and all where strangers come in crowds."""
        if self.outlet is not None and _are_descriptors_short():
            self._rests_until_s = self._clock() + REST_S
            self.close()
        elif self._wanted and self._known.names() != self._wanted.keys():
            self._cut()

    def close(self) -> None:
        """Let nobody in any more, and end what is open."""
        self._wanted.clear()
        self._known = KnownKeys(self._clock)
        self._close_socket()
        if self._gate is not None:
            self._gate.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._gate = self._context = None

    def _cut(self) -> None:
        """End all connections; let those come back whose keys are known."""
        known, port = self._known.names(), self._port
        self._wanted = {key: wanted for key, wanted in self._wanted.items() if key in known}
        self._close_socket()
        addresses = tuple(dict.fromkeys(address for wanted in self._wanted.values() for address in wanted))
        if not addresses or not self._bind_again(addresses, port):
            self.close()  # who is left asks again when it hears nothing

    def _listen_at(self, addresses: tuple[str, ...], ports: Iterable[int]) -> bool:
        """Listen at some addresses too; False where no port is free, and then as before."""
        if self.outlet is not None:
            return set(addresses) <= set(self._bound) or self._listen_elsewhere_too(addresses)
        bound = any(self._bind(addresses, port) for port in ports)
        if not bound:
            self.close()
        return bound

    def _listen_elsewhere_too(self, addresses: tuple[str, ...]) -> bool:
        assert self.outlet is not None
        new = tuple(address for address in addresses if address not in self._bound)
        for number, address in enumerate(new):
            try:
                _listen_at(self.outlet.socket, address, self._port)
            except zmq.ZMQError:
                for bound in new[:number]:
                    self.outlet.socket.unbind(_endpoint(bound, self._port))
                return False
        self._bound += new
        return True

    def _bind(self, addresses: tuple[str, ...], port: int) -> bool:
        """Listen on one port of all addresses; of 0 on one that is free on all."""
        return any(self._bind_once(addresses, port) for _ in range(1 if port else NUM_TRIES))

    def _bind_again(self, addresses: tuple[str, ...], port: int) -> bool:
        until_s = time.monotonic() + REBIND_S
        while not self._bind_once(addresses, port):
            if time.monotonic() > until_s:
                return False
            time.sleep(REBIND_PAUSE_S)
        return True

    def _bind_once(self, addresses: tuple[str, ...], port: int) -> bool:
        try:
            outlet = self._new_outlet()
        except zmq.ZMQError:
            return False  # for want of a descriptor
        try:
            for address in addresses:
                _listen_at(outlet.socket, address, port)
                port = port or int(outlet.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except zmq.ZMQError:
            outlet.close()
            return False
        self.outlet, self._bound, self._port = outlet, addresses, port
        return True

    def _new_outlet(self) -> Outlet:
        if self._context is None or self._gate is None:
            self._context = zmq.Context()
            self._gate = CurveGate(self._context, self._known)
        outlet = Outlet(self._context)
        outlet.socket.setsockopt(zmq.MAXMSGSIZE, MAX_INCOMING_BYTES)
        outlet.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._gate.guard(outlet.socket)
        return outlet

    def _close_socket(self) -> None:
        if self.outlet is not None:
            self.outlet.close()
        self.outlet, self._bound, self._port = None, (), 0


def _are_descriptors_short() -> bool:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return True  # there is none left to look by
    return soft != resource.RLIM_INFINITY and num_open > soft * MAX_OPEN_FRAC


def _listen_at(socket: zmq.Socket[bytes], address: str, port: int) -> None:
    socket.setsockopt(zmq.IPV6, int(":" in address))
    socket.bind(_endpoint(address, port))


def _endpoint(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port or '*'}" if ":" in address else f"tcp://{address}:{port or '*'}"
