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


def serve_until_told(directory: Path, node: str, *, is_private: bool, metrics: str = "") -> None:
    """Serve; returns when the agent has ended, a private one with all its jobs.

    Args:
        directory: The agent's own.
        node: What consoles call this node.
        is_private: End with the pipe on standard input, and leave nothing.
        metrics: Address and port for Prometheus; empty serves none.

    Raises:
        OperatorError: The directory, one of its sockets, or the address cannot be used.
    """
    state_dir = StateDir(directory)
    state_dir.open()
    try:
        asyncio.run(_serve(state_dir, node, is_private=is_private, metrics=metrics))
    except OSError as error:
        raise OperatorError(f"cannot serve in {state_dir.path}: {error}") from error
    finally:
        state_dir.close(remove_all=is_private)


async def _serve(state_dir: StateDir, node: str, *, is_private: bool, metrics: str) -> None:
    daemon = Daemon(state_dir, node, is_private=is_private)
    watch_signals(daemon.end_soon)
    if is_private:
        watch_console(daemon.end_soon)
    ready: dict[str, str | int | bool] = {
        "ready": True,
        "node": node,
        "epoch": daemon.epoch,
        "dir": str(state_dir.path),
    }

    def say_ready() -> None:
        sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
        sys.stdout.flush()

    if not metrics:
        await daemon.run(say_ready)
        return
    from agent.metrics import MetricsServer  # noqa: PLC0415 - whoever serves none does not pay for it

    server = MetricsServer(metrics, lambda: daemon.newest_report)
    ready["metrics_port"] = server.open()
    try:
        await daemon.run(say_ready)
    finally:
        server.close()
