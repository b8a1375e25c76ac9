"""Both ends of a connection of SSH in this process, and what lies between: it can be stopped, as a network can."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Self

import paramiko

from app.ssh.transport import Transport, ssh_errors_of

if TYPE_CHECKING:
    from types import TracebackType

WAIT_S = 20.0
SMALL_WINDOW_BYTES = 32_768
"""The smallest that paramiko takes: what nobody reads there stalls soon."""
LOOK_S = 0.05


def our_threads() -> list[str]:
    """Return the names of the threads of ours that there are."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rankdeck-")]


class SshPair:
    """A client of ours, and a server that opens every channel it is asked for."""

    def __init__(self, window_bytes: int = SMALL_WINDOW_BYTES, *, is_compressed: bool = False) -> None:
        """`window_bytes` is what the server's end of a channel lets us say before anybody has read it."""
        near, self._far_of_client = socket.socketpair()
        self._near_of_server, far = socket.socketpair()
        self._is_ended = False
        self._accepted: list[paramiko.Channel] = []
        """Kept: a channel that nobody holds is closed by paramiko, perhaps before the client knows that it is open."""
        self.is_taking = threading.Event()
        """Cleared, nothing goes to the server any more; what it says still comes."""
        self.is_taking.set()
        ways = ((self._far_of_client, self._near_of_server, True), (self._near_of_server, self._far_of_client, False))
        self._carriers = [threading.Thread(target=self._carry, args=way, daemon=True) for way in ways]
        for carrier in self._carriers:
            carrier.start()
        self._server = paramiko.Transport(far, default_window_size=window_bytes)
        self._server.add_server_key(paramiko.ECDSAKey.generate())
        if is_compressed:
            self._server.use_compression()
        self._server.start_server(event=threading.Event(), server=_Doorman())
        self.client = Transport(near)
        if is_compressed:
            self.client.compress()
        self.client.start_client(timeout=WAIT_S)
        self.client.auth_none("somebody")
        self.client.watch()

    def say_packed(self, packed: bytes) -> None:
        """Have the server say what the client takes for a packed packet."""
        self._server.packetizer.set_outbound_compressor(lambda _: packed)  # type: ignore[arg-type]
        self._server.send_ignore()

    def open(self) -> paramiko.Channel:
        """Open a channel, as a tunnel does."""
        with ssh_errors_of("the server"):
            return self.client.open_streamlocal("/somewhere")

    def accept(self) -> paramiko.Channel:
        """Return the server's end of the next channel that was opened."""
        channel = self._server.accept(WAIT_S)
        assert channel is not None
        channel.settimeout(WAIT_S)
        self._accepted.append(channel)
        return channel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ended = True
        self.is_taking.set()
        for transport in (self.client, self._server):
            transport.close()
        for carrier in self._carriers:
            carrier.join(WAIT_S)
        for transport in (self.client, self._server):
            transport.join(WAIT_S)
        self._far_of_client.close()
        self._near_of_server.close()

    def _carry(self, source: socket.socket, target: socket.socket, is_stopped_at_times: bool) -> None:
        with contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not self._is_ended:
                if is_stopped_at_times and not self.is_taking.wait(LOOK_S):
                    continue
                if not selector.select(LOOK_S):
                    continue
                chunk = source.recv(4096)
                if not chunk:
                    break
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)


class _Doorman(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        del username
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        del kind, chanid
        return paramiko.common.OPEN_SUCCEEDED
