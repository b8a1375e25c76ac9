"""The life of an agent process: its directory, its event loop, its end."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from agent.daemon import Daemon
from agent.errors import OperatorError
from agent.lifeline import watch_console, watch_signals
from agent.state_dir import StateDir

if TYPE_CHECKING:
    from pathlib import Path


def serve_until_told(directory: Path, node: str, *, is_private: bool) -> None:
    """Serve; returns when the agent has ended and nothing of its jobs runs.

    Raises:
        OperatorError: The directory or one of its sockets cannot be used.
    """
    state_dir = StateDir(directory)
    state_dir.open()
    try:
        asyncio.run(_serve(state_dir, node, is_private=is_private))
    except OSError as error:
        raise OperatorError(f"cannot serve in {state_dir.path}: {error}") from error
    finally:
        state_dir.close(remove_all=is_private)


async def _serve(state_dir: StateDir, node: str, *, is_private: bool) -> None:
    daemon = Daemon(state_dir, node, is_private=is_private)
    watch_signals(daemon.end_soon)
    if is_private:
        watch_console(daemon.end_soon)

    def say_ready() -> None:
        ready = {"ready": True, "node": node, "epoch": daemon.epoch, "dir": str(state_dir.path)}
        sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
        sys.stdout.flush()

    await daemon.run(say_ready)
