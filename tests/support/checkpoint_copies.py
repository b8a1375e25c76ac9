"""Checkpoints written as ranks write them, but by one process: share after share, with the writer's real code."""

from __future__ import annotations

import os
import socket
import zlib
from typing import TYPE_CHECKING, Any

from ddpcore.checkpoint import writer
from ddpcore.checkpoint.directory import MANIFEST, checkpoint_name
from ddpcore.checkpoint.formats import COMMITTED, MARKER_FORMAT, decode_marker, file_name, marker_tail
from ddpcore.checkpoint.meeting import Site
from ddpcore.checkpoint.save_plan import SavePlan
from ddpcore.checkpoint.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_checkpoint(
    root: Path,
    state: Any,
    num_ranks: int,
    *,
    step: int = 0,
    sequence: int | None = None,
    per_rank: Any = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write one checkpoint and return its directory.

    Args:
        root: Where to.
        state: What every rank has.
        num_ranks: Ranks that share the work.
        step: Of the checkpoint.
        sequence: Its place among those of `root`; the highest so far without one.
        per_rank: Every rank's own.
        metrics: What was measured of it.
    """
    existing = [path.name for path in root.iterdir()]
    sequence = len(existing) + 1 if sequence is None else sequence
    name = checkpoint_name(step, existing)
    temporary = root / f".tmp-{name}-test"
    temporary.mkdir()
    for rank in reversed(range(num_ranks)):
        plan = SavePlan(state, per_rank, Site(tuple(range(num_ranks)), rank, (0,)))
        content, body = plan.content(), plan.manifest_body(step, sequence, f"test.{sequence}", num_ranks, metrics or {})
        order = {
            "root": str(root),
            "name": name,
            "files": plan.file_names(),
            "body_bytes": len(body),
            "marker": marker_tail(sequence, f"test.{sequence}", name),
            "delete": [],
        }
        snapshot = Snapshot()
        snapshot.reserve(content.num_bytes + len(body))
        snapshot.write(0, content.header)
        snapshot.copy(content.items)
        snapshot.write(content.num_bytes, body)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            job = {
                "number": 1,
                "directory": str(temporary),
                "file": file_name(rank),
                "bytes": content.num_bytes,
                "publish": order if rank == 0 else None,
            }
            writer.serve(job, snapshot.fd, writer.Channel(theirs, os.getppid()))
            assert ours.recv(65_536) == b'{"number": 1, "problem": ""}\n'
        snapshot.close()
    return root / name


def commit(path: Path, *, is_old: bool = False) -> None:
    """Give a checkpoint a commit marker that fits its manifest's bytes, whoever has written these.

    Args:
        path: Its directory, with a marker of the present version.
        is_old: Write it as earlier versions did.
    """
    manifest = (path / MANIFEST).read_bytes()
    found = decode_marker((path / COMMITTED).read_bytes())
    marker = f"{zlib.crc32(manifest):08x} {len(manifest)} "
    if is_old:
        text = f"{marker}{found.sequence} {found.id}\n"
    else:
        text = f"{MARKER_FORMAT} {marker}{marker_tail(found.sequence, found.id, found.name)}"
        text += f" {zlib.crc32(text.encode()):08x}\n"
    (path / COMMITTED).write_text(text)
