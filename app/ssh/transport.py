"""The protocol of SSH, by paramiko, with what that lacks: Unix sockets, a sign of life, limits of time, plain words.

Source: OpenSSH PROTOCOL, section 2.4 (direct-streamlocal@openssh.com) and 2.2 (keepalive@openssh.com).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, ClassVar

import paramiko
from paramiko.compress import ZlibCompressor

from app.errors import HostUnreachableError
from app.safe_text import clean
from app.ssh.compression import Unpacker
from app.ssh.errands import Lane, errands_here
from app.ssh.liveness import ByteStream, LiveStream
from app.ssh.remote_command import command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHANNEL_TIMEOUT_S = 10.0
CHANNEL_ERRORS = (OSError, EOFError, paramiko.SSHException)
"""What a channel may raise once the connection breaks, for those who read and write one."""
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

# What paramiko logs, it also raises; said twice, and on a screen that somebody else draws, it is in the way.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Transport(paramiko.Transport):
    """A transport that can open one more kind of channel, to a Unix socket of the host, and notices a dead one."""

    _compression_info: ClassVar = {_COMPRESSED: (ZlibCompressor, Unpacker), "none": (None, None)}

    def __init__(self, stream: ByteStream) -> None:
        """Over a stream, which belongs to the transport from now on.

        AES-GCM comes first, of what paramiko offers: the sums of other ciphers are compared byte by byte in Python, for
        a third of the time that a report takes here.
        """
        self._streamlocal_lock = threading.Lock()
        self._streamlocal_path = ""
        self._live_stream = LiveStream(stream)
        self._later: Lane | None = None
        super().__init__(self._live_stream, disabled_algorithms=_WEAK)  # type: ignore[arg-type]
        self.daemon = True
        options = self.get_security_options()
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)

    def prefer(self, kinds: Sequence[str]) -> None:
        """Ask for a host key of a kind that is known of the host: any other would look like a change."""
        options = self.get_security_options()
        wanted = {algorithm for kind in kinds for algorithm in _signature_algorithms(kind)}
        options.key_types = sorted(options.key_types, key=lambda algorithm: algorithm not in wanted)

    def compress(self) -> None:
        """Ask for compression, if the host offers it; before the client is started."""
        self.get_security_options().compression = (_COMPRESSED, "none")

    def watch(self) -> None:
        """From now on, end when the host is dead; once it has let us in."""
        self._live_stream.watch(self._ask_for_life)

    def send_now(self, message: paramiko.Message) -> None:
        """Send a message that is no channel's, from this connection's own thread."""
        self._send_message(message)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End it, and with it the timer of a key exchange that has failed: the program would not end before that."""
        super().close()
        self.packetizer.complete_handshake()

    def open_streamlocal(self, path: str) -> paramiko.Channel:
        """Return a channel to a socket.

        Raises:
            ChannelException: The host would not.
        """
        with self._streamlocal_lock:
            self._streamlocal_path = path
            return self.open_channel(_STREAMLOCAL, timeout=CHANNEL_TIMEOUT_S)

    def _ask_for_life(self) -> None:
        """Send what the host must answer, unless keys are being exchanged, in which it owes an answer already."""
        if self.clear_to_send.is_set():
            question = paramiko.Message()
            question.add_byte(_GLOBAL_REQUEST)
            question.add_string(_KEEPALIVE)
            question.add_boolean(b=True)
            if self.clear_to_send_lock.locked():
                # Somebody sends, perhaps to a host that takes nothing: whoever reads must not wait, but count the time.
                asker = threading.Thread(target=self._send_if_alive, args=(question,), name="rankdeck-ask", daemon=True)
                asker.start()
            else:
                self._send_user_message(question)

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Send what a channel has to say.

        The message that opens a channel to a socket is completed: paramiko knows what to add for its own kinds only.
        A thread that must not wait leaves it to another: the host may take nothing now, or keys are being exchanged.
        """
        if data.asbytes().startswith(_STREAMLOCAL_OPENING):
            data.add_string(self._streamlocal_path)
            data.add_string("")
            data.add_int(0)
        errands = errands_here()
        if errands is None:
            super()._send_user_message(data)  # type: ignore[misc]
            return
        if self._later is None:
            self._later = Lane(errands)
        self._later.put(lambda: self._send_if_alive(data))

    def _send_if_alive(self, data: paramiko.Message) -> None:
        with contextlib.suppress(*CHANNEL_ERRORS):  # whoever reads hears of the end
            super()._send_user_message(data)  # type: ignore[misc]


def _signature_algorithms(kind: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def execute(channel: paramiko.Channel, argv: Sequence[str], timeout_s: float) -> None:
    """Ask for a program; see `within`."""
    within(channel, timeout_s, lambda: channel.exec_command(os.fsencode(command_line(argv))))


def within(channel: paramiko.Channel, timeout_s: float, ask: Callable[[], None]) -> None:
    """Ask a channel for something; paramiko would wait for the answer for ever.

    Raises:
        TimeoutError: No answer came.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        channel.close()  # wakes whoever waits for the answer

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


@contextlib.contextmanager
def words_of(host: str) -> Iterator[None]:
    """Turn what paramiko and the network raise into an error that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise HostUnreachableError(host, "it does not answer in time", "it may hang, or the network is cut") from error
    except paramiko.AuthenticationException as error:
        raise HostUnreachableError(host, f"it does not let us in: {clean(str(error))}", f"try: ssh {host}") from error
    except paramiko.ChannelException as error:
        raise HostUnreachableError(host, f"it opens no channel: {clean(error.text)}") from error
    except paramiko.ssh_exception.IncompatiblePeer as error:
        said = clean(str(error))
        hint = "its sshd is too old, or set up for old clients: let it offer what OpenSSH does by itself"
        raise HostUnreachableError(host, f"it offers no algorithm that is still safe: {said}", hint) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        said = clean(str(error)) or type(error).__name__
        raise HostUnreachableError(host, f"SSH failed: {said}", f"try: ssh {host}") from error
