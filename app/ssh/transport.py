"""The SSH protocol by paramiko, extended by Unix sockets, liveness checks, time limits and plain error texts.

`Transport` adds channels to Unix sockets.
Source: OpenSSH PROTOCOL, section 2.4 (direct-streamlocal@openssh.com) and 2.2 (keepalive@openssh.com).

`LiveStream` checks whether the other end is alive: a silent one is asked for an answer, and is dead when none comes.
TCP alone does not show it: behind a jump host or a ProxyCommand it covers the next machine only. A host's kernel also
answers for an sshd that is frozen.

`Unpacker` decompresses the packets of a connection to a bounded size.
Source: OpenSSH PROTOCOL, section 1.2: zlib@openssh.com is zlib (RFC 4253, 6.2) that begins after authentication.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import zlib
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import paramiko
from paramiko.compress import ZlibCompressor

from app.errors import HostUnreachableError
from app.ssh.remote_command import command_line
from app.ssh.worker_pool import SerialQueue, current_workers
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_UNPACKED_BYTES = 1_048_576
"""Bytes of one decompressed packet: 32 KiB are usual for a channel, and zlib makes a thousand bytes out of one."""


class Unpacker:
    """Decompresses one packet after another, each to a bounded size."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    def __call__(self, data: bytes) -> bytes:
        """Return a packet decompressed.

        Raises:
            ConnectionAbortedError: It is too large, or not compressed.
        """
        try:
            unpacked = self._stream.decompress(data, MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise _aborted(f"a packet cannot be unpacked: {error}") from error
        if self._stream.unconsumed_tail:
            raise _aborted(f"a packet of {len(data)} bytes unpacks to more than {MAX_UNPACKED_BYTES}")
        return unpacked


def _aborted(abort_text: str) -> ConnectionAbortedError:
    """Return the error with an errno: paramiko ends the connection on it, and expects it to have one."""
    return ConnectionAbortedError(errno.ECONNABORTED, abort_text)


QUIET_S = 3.0
"""Seconds without a byte until the other end is asked."""
ANSWER_WITHIN_S = 6.0
"""Seconds for its answer; with those above, below the ten seconds after which a user wants to know."""
CHUNK_BYTES = 65_536


class ByteStream(Protocol):
    """A socket, or a channel through another host, with a time limit on what it receives."""

    def recv(self, bufsize: int, /) -> bytes:
        """Return some bytes, none at the end; raise TimeoutError when none come in time."""
        ...

    def send(self, data: bytes, /) -> int:
        """Send some of the bytes; return how many."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """Set the time limit."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End it in both directions, and wake up pending readers."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class LiveStream:
    """A stream that ends when the other end is dead; for a reader that comes back after each time limit.

    It wakes its reader when there is something to do, not ten times a second as paramiko would. It reads ahead, as
    paramiko reads each packet's length and the rest of it separately.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ask: Callable[[], None] | None = None
        self._received_s = 0.0
        self._asked_s: float | None = None
        self._limit_s: float | None = None
        """Current time limit of the stream in seconds."""
        self._ahead = b""
        self._closed = False  # the name that paramiko looks at, as it does in sockets

    def watch(self, ask: Callable[[], None]) -> None:
        """Begin to check; `ask` is called from the reader's thread, and makes the other end answer."""
        self._received_s = time.monotonic()
        self._ask = ask

    def recv(self, num_bytes: int) -> bytes:
        """Return some bytes, none at the end.

        Raises:
            TimeoutError: None came for now.
            EOFError: The other end is dead.
        """
        if not self._ahead:
            self._ahead = self._receive()
        taken, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
        return taken

    def send(self, data: bytes) -> int:
        """Send some of the bytes; return how many."""
        return self._stream.send(data)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set the time limit of one call, until the stream is watched."""
        self._limit_s = timeout_s
        self._stream.settimeout(timeout_s)

    def close(self) -> None:
        """End the stream, and wake up pending readers immediately."""
        self._closed = True
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _receive(self) -> bytes:
        try:
            received = self._stream.recv(CHUNK_BYTES)
        except TimeoutError:
            self._look()
            raise
        self._received_s, self._asked_s = time.monotonic(), None
        if self._ask is not None:
            self._wait_for(QUIET_S)
        return received

    def _look(self) -> None:
        if self._ask is None:
            return
        now_s = time.monotonic()
        if self._asked_s is None and now_s - self._received_s >= QUIET_S:
            self._asked_s = now_s
            self._ask()
        elif self._asked_s is not None and now_s - self._asked_s >= ANSWER_WITHIN_S:
            raise EOFError("it has not answered")
        if self._asked_s is None:
            self._wait_for(self._received_s + QUIET_S - now_s)
        else:
            self._wait_for(self._asked_s + ANSWER_WITHIN_S - now_s)

    def _wait_for(self, limit_s: float) -> None:
        if limit_s != self._limit_s:
            self.settimeout(limit_s)


CHANNEL_TIMEOUT_S = 10.0
CHANNEL_ERRORS = (OSError, EOFError, paramiko.SSHException)
"""Exceptions of a channel's reads and writes once the connection breaks."""
_STREAMLOCAL = "direct-streamlocal@openssh.com"
_CHANNEL_OPEN = 90
_STREAMLOCAL_OPENING = bytes([_CHANNEL_OPEN]) + len(_STREAMLOCAL).to_bytes(4, "big") + _STREAMLOCAL.encode()
_GLOBAL_REQUEST = bytes([80])
_KEEPALIVE = "keepalive@openssh.com"
_COMPRESSED = "zlib@openssh.com"
_WEAK = {
    "ciphers": ["3des-cbc", "aes128-cbc", "aes192-cbc", "aes256-cbc"],
    "macs": ["hmac-md5", "hmac-md5-96", "hmac-sha1", "hmac-sha1-96"],
}

# What paramiko logs, it also raises; its log would be printed over the screen.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Disconnect(NamedTuple):
    """What a host sends before it hangs up. Source: RFC 4253, 11.1."""

    code: int
    text: str
    """Not clean."""


class Transport(paramiko.Transport):
    """A transport that can open one more kind of channel, to a Unix socket of the host, and notices a dead one.

    Attributes:
        disconnect: What the host sent before it hung up; None where it sent nothing.
    """

    disconnect: Disconnect | None = None
    _compression_info: ClassVar = {_COMPRESSED: (ZlibCompressor, Unpacker), "none": (None, None)}

    def __init__(self, stream: ByteStream) -> None:
        """Set up over a stream, which the transport owns from now on.

        Of paramiko's ciphers AES-GCM comes first: it compares the checksums of the others byte by byte in Python, for a
        third of the time that a report takes here.
        """
        self._streamlocal_lock = threading.Lock()
        self._streamlocal_path = ""
        self._live_stream = LiveStream(stream)
        self._later: SerialQueue | None = None
        super().__init__(self._live_stream, disabled_algorithms=_WEAK)  # type: ignore[arg-type]
        self.daemon = True
        options = self.get_security_options()
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)

    def prefer(self, kinds: Sequence[str]) -> None:
        """Ask for a host key of a known kind: any other would look like a change."""
        options = self.get_security_options()
        wanted = {algorithm for kind in kinds for algorithm in _signature_algorithms(kind)}
        options.key_types = sorted(options.key_types, key=lambda algorithm: algorithm not in wanted)

    def compress(self) -> None:
        """Ask for compression, if the host offers it; before the client is started."""
        self.get_security_options().compression = (_COMPRESSED, "none")

    def watch(self) -> None:
        """End when the host is dead, from now on; call it after authentication."""
        self._live_stream.watch(self._ask_for_life)

    def send_now(self, message: paramiko.Message) -> None:
        """Send a message that is no channel's, from this connection's own thread."""
        self._send_message(message)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close it, and end the timer of a failed key exchange, which would delay the program's end."""
        super().close()
        self.packetizer.complete_handshake()

    def open_streamlocal(self, path: str) -> paramiko.Channel:
        """Return a channel to a socket.

        Raises:
            ChannelException: The host refused.
        """
        with self._streamlocal_lock:
            self._streamlocal_path = path
            return self.open_channel(_STREAMLOCAL, timeout=CHANNEL_TIMEOUT_S)

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        self.disconnect = Disconnect(message.get_int(), message.get_binary().decode(errors="replace"))

    def _ask_for_life(self) -> None:
        """Send a request that the host must answer; not during a key exchange, which owes an answer already."""
        if self.clear_to_send.is_set():
            question = paramiko.Message()
            question.add_byte(_GLOBAL_REQUEST)
            question.add_string(_KEEPALIVE)
            question.add_boolean(b=True)
            if self.clear_to_send_lock.locked():
                # Another thread sends, perhaps to a stuck host: the reader must not wait for it, but count the time.
                asker = threading.Thread(target=self._send_if_alive, args=(question,), name="rankdeck-ask", daemon=True)
                asker.start()
            else:
                self._send_user_message(question)

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Send a channel's message.

        Completes the message that opens a channel to a socket: paramiko knows what to add for its own kinds only. A
        thread that must not wait leaves it to another: the host may take nothing now, or keys are being exchanged.
        """
        if data.asbytes().startswith(_STREAMLOCAL_OPENING):
            data.add_string(self._streamlocal_path)
            data.add_string("")
            data.add_int(0)
        workers = current_workers()
        if workers is None:
            super()._send_user_message(data)  # type: ignore[misc]
            return
        # paramiko sends a window's adjustment from whichever thread reads.
        if self._later is None:
            self._later = SerialQueue(workers)
        self._later.put(lambda: self._send_if_alive(data))

    def _send_if_alive(self, data: paramiko.Message) -> None:
        with contextlib.suppress(*CHANNEL_ERRORS):  # the reader receives the error, too
            super()._send_user_message(data)  # type: ignore[misc]


def _signature_algorithms(kind: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def execute(channel: paramiko.Channel, argv: Sequence[str], timeout_s: float) -> None:
    """Start a program on a channel; see `within`."""
    within(channel, timeout_s, lambda: channel.exec_command(os.fsencode(command_line(argv))))


def within(channel: paramiko.Channel, timeout_s: float, ask: Callable[[], None]) -> None:
    """Make a request on a channel within a time limit; paramiko would wait for the answer for ever.

    Raises:
        TimeoutError: No answer came.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        channel.close()  # wakes up the thread that waits for the answer

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        ask()
    except paramiko.SSHException as error:
        if is_late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
        timer.join(CHANNEL_TIMEOUT_S)
    if is_late.is_set():
        raise TimeoutError


_PLAINER = {
    "No existing session": "the connection ended during the login: the host may hang, or limit logins",
    "key cannot be used for signing": "ssh-agent does not sign: it is locked, or the use of the key was declined",
}
"""Clearer texts for errors of paramiko. Source: paramiko/transport.py and agent.py, 5.1."""


@contextlib.contextmanager
def ssh_errors_of(host: str) -> Iterator[None]:
    """Turn exceptions of paramiko and the network into an error that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise HostUnreachableError(host, "it does not answer in time", "it may hang, or the network is cut") from error
    except paramiko.AuthenticationException as error:
        raise HostUnreachableError(host, f"it does not let us in: {clean(str(error))}", f"try: ssh {host}") from error
    except paramiko.ChannelException as error:
        raise HostUnreachableError(host, f"it opens no channel: {clean(error.text)}") from error
    except paramiko.ssh_exception.IncompatiblePeer as error:
        reason = clean(str(error))
        hint = "its sshd is too old, or set up for old clients: let it offer what OpenSSH does by itself"
        raise HostUnreachableError(host, f"it offers no algorithm that is still safe: {reason}", hint) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = _PLAINER.get(str(error)) or clean(str(error)) or type(error).__name__
        raise HostUnreachableError(host, f"SSH failed: {reason}", f"try: ssh {host}") from error
