"""`serve --daemon`: an agent that outlives the session that started it.

The agent is a process of a session of its own, without a terminal, whose output goes to `agent.log`. Whoever started
it waits until it answers, so that success means an agent that serves, and failure comes with the agent's own text.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from agent.errors import AgentError, DaemonFailedError, FrozenAgentError, NoAgentError
from agent.service.agent_info import AgentInfo, look
from agent.state_dir import StateDir, is_served

if TYPE_CHECKING:
    from pathlib import Path

LOG_FILE = "agent.log"
MAX_LOG_BYTES = 1 << 20
"""Longest log: an agent writes a line at its start, one at its end, and a trace for each defect: months of them."""
READY_TIMEOUT_S = 30.0
"""Seconds to wait: a Python start on a busy machine, and the adoption of jobs."""
POLL_S = 0.02
MAX_OUTPUT_BYTES = 4096
_SESSION_VARIABLES = ("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Variables of the session that starts the agent: they end with it."""


def start_daemon(directory: Path, node: str, metrics: str = "", invitation: Path | None = None) -> AgentInfo:
    """Return where the agent of a directory serves, and start it unless one serves already.

    `metrics` and `invitation` are as of `agent.serve.ServeOptions`. Raises StateDirError if the directory cannot
    be used, DaemonFailedError with its message and exit code if it did not start.
    """
    StateDir(directory).prepare()
    if is_served(directory):
        return _answer(directory)
    log_path = directory / LOG_FILE
    rotate_log(log_path)
    with contextlib.ExitStack() as opened:
        log_fd = _open_log(log_path)
        opened.callback(os.close, log_fd)
        ready_fd, child_fd = os.pipe2(os.O_CLOEXEC)
        opened.callback(os.close, ready_fd)
        log_begin_bytes = os.fstat(log_fd).st_size
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "agent", "serve", "--dir", str(directory), "--node", node),
                *("--ready-fd", str(child_fd), *(("--metrics", metrics) if metrics else ())),
                *(("--relay", str(invitation.absolute())) if invitation else ()),
            ],
            env={name: value for name, value in os.environ.items() if name not in _SESSION_VARIABLES},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            pass_fds=(child_fd,),
        )
        os.close(child_fd)
        line = _read_line(ready_fd, READY_TIMEOUT_S)
    if line.endswith(b"\n"):
        # It lives on, and is nobody's to wait for: init's, once this process has ended.
        process.returncode = 0
        return msgspec.json.decode(line, type=AgentInfo)
    process.kill()
    code = process.wait()
    if is_served(directory):
        return _answer(directory)  # another was faster
    output = log_path.read_bytes()[log_begin_bytes:][-MAX_OUTPUT_BYTES:].decode(errors="replace").strip()
    message = output.splitlines()[-1].removeprefix("agent: ") if output else f"the agent ended ({code}) without a word"
    raise DaemonFailedError(f"{message} (see {log_path})", code if code > 0 else AgentError.exit_code)


def rotate_log(path: Path) -> bool:
    """Begin a new log when the old one is long; return whether it was."""
    try:
        is_long = path.stat().st_size > MAX_LOG_BYTES
    except FileNotFoundError:
        return False
    if is_long:
        path.replace(path.with_name(f"{path.name}.1"))
    return is_long


def bound_log(directory: Path) -> None:
    """Begin a new log when that of this daemon, its standard output and error, has become long."""
    if not rotate_log(directory / LOG_FILE):
        return
    fd = _open_log(directory / LOG_FILE)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _answer(directory: Path) -> AgentInfo:
    """Return the agent that holds the directory; it may be starting."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not (found := look(directory)).ready:
        if found.is_frozen:
            raise FrozenAgentError(directory, found.pid)
        if time.monotonic() > deadline_s:
            raise NoAgentError(f"an agent holds {directory} and does not answer: end it, or wait for it to end")
        time.sleep(POLL_S)
    return found


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _read_line(fd: int, within_s: float) -> bytes:
    """Return what arrives until a line's end, the end of the pipe, or of the time."""
    deadline_s = time.monotonic() + within_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
        if not readable or not (chunk := os.read(fd, 4096)):
            break
        line += chunk
    return line
