"""Looks at the ranks of hosts from outside: runs `app.inspect.on_host` there, with py-spy where it is needed.

A host without py-spy gets this machine's: one static binary, in a directory that only the user can enter, checked by
its digest there, and removed afterwards. Everything blocks, within bounds.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import inspect as sources
import shutil
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.errors import AgentUnreachableError, HostUnreachableError, SessionError
from app.inspect import on_host
from app.inspect.seen import HostSeen
from app.ssh.config import THIS_MACHINE
from app.text import LINE_LIMIT, clean
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from app.fleet.agent_link import AgentLink

BEGIN_S = 60.0
"""Seconds for a Python to start there and to find the ranks, on a busy machine."""
SLOWEST_BYTES_HZ = 50_000
MAX_SEEN_BYTES = 1 << 26
_RUN = "import sys; exec(compile(sys.argv.pop(1), 'rankdeck inspect', 'exec'))"
_FIND_SPY = "import shutil; print(shutil.which('py-spy') or '')"
TAKE_SPY = """
import hashlib, os, platform, sys, tempfile
data = sys.stdin.buffer.read()
assert hashlib.sha256(data).hexdigest() == sys.argv[1], "py-spy arrived damaged"
path = os.path.join(tempfile.mkdtemp(prefix="rankdeck-inspect-"), "py-spy")
with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
    file.write(data)
print(path)
"""
"""The directory of mkdtemp has mode 0700."""
_DROP_SPY = "import os, sys; os.remove(sys.argv[1]); os.rmdir(os.path.dirname(sys.argv[1]))"


def own_py_spy() -> str:
    """Return the path of this machine's py-spy.

    Raises:
        SessionError: There is none.
    """
    path = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if path is None:
        raise SessionError("py-spy is not installed, which reads the stacks", "pip install py-spy")
    return path


def look_at_host(link: AgentLink, spy: str, num_looks: int, period_s: float) -> HostSeen:
    """Return what a connected host shows of its ranks.

    Args:
        link: The host.
        spy: This machine's py-spy.
        num_looks: How often to look.
        period_s: Seconds between two looks.

    Raises:
        HostUnreachableError: The connection broke.
        AgentUnreachableError: The host's Python does not run, or answers something else.
    """
    with contextlib.ExitStack() as undo:
        there = spy if link.host == THIS_MACHINE else _line(link, _FIND_SPY)
        if not there:
            there = _sent(link, Path(spy).read_bytes())
            undo.callback(_drop, link, there)
        arguments = (sources.getsource(on_host), there, str(num_looks), str(period_s))
        answer = _line(link, _RUN, *arguments, timeout_s=BEGIN_S + num_looks * (period_s + BEGIN_S))
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(answer, validate=True), MAX_SEEN_BYTES)
        return msgspec.json.decode(unpacked, type=HostSeen)
    except (*DECODE_ERRORS, binascii.Error, zlib.error) as error:
        raise AgentUnreachableError(link.host, f"its Python answers something else: {clean(str(error))}") from error


def _sent(link: AgentLink, binary: bytes) -> str:
    digest = hashlib.sha256(binary).hexdigest()
    return _line(link, TAKE_SPY, digest, given=binary, timeout_s=BEGIN_S + len(binary) / SLOWEST_BYTES_HZ)


def _drop(link: AgentLink, path: str) -> None:
    with contextlib.suppress(HostUnreachableError, AgentUnreachableError):
        link.run_python(["-c", _DROP_SPY, path], BEGIN_S)


def _line(link: AgentLink, program: str, *arguments: str, given: bytes = b"", timeout_s: float = BEGIN_S) -> str:
    """Return the last line that a program prints there."""
    done = link.run_python(["-c", program, *arguments], timeout_s, given)
    if done.exit_code:
        raise AgentUnreachableError(
            link.host, f"{clean(link.python)} cannot look at its ranks: {clean(done.error_text, LINE_LIMIT)}"
        )
    return done.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
