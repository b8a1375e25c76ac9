"""A checkpoint read from its files, nothing of which is believed before it is checked. Needs no torch.

The order: commit marker, manifest and its checksum, sizes of all files, then each file in one pass: header against the
manifest, data into its place, checksum over all of it.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from typing import TYPE_CHECKING

from ddpcore.checkpoint.directory import MANIFEST, step_of
from ddpcore.checkpoint.formats import (
    COMMITTED,
    LENGTH_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_MARKER_BYTES,
    Entry,
    FileRecord,
    MalformedHeaderError,
    MalformedManifestError,
    MalformedMarkerError,
    Manifest,
    Marker,
    Spec,
    decode_header,
    decode_length,
    decode_manifest,
    decode_marker,
    specs_of_file,
)
from ddpcore.errors import CheckpointInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from ddpcore.checkpoint.formats import Piece

CHUNK_BYTES = 4 << 20
"""Bytes read at a time: the checksum is taken while they are in the cache."""


def read_marker(path: Path) -> Marker:
    """Return a checkpoint's commit marker; raise CheckpointInvalidError if it is not its own."""
    try:
        marker = decode_marker(_read_small(path / COMMITTED, MAX_MARKER_BYTES))
    except MalformedMarkerError as error:
        raise CheckpointInvalidError(str(error)) from None
    if marker.name not in ("", path.name):
        raise CheckpointInvalidError(f"its {COMMITTED} is that of {marker.name}: it was renamed, or copied")
    return marker


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint that is committed and has all its files in full size, else raise."""
    marker = read_marker(path)
    raw = _read_small(path / MANIFEST, MAX_MANIFEST_BYTES)
    if (zlib.crc32(raw), len(raw)) != (marker.manifest_checksum, marker.manifest_bytes):
        if marker.name:
            raise CheckpointInvalidError(f"its {MANIFEST} is damaged, or not its own: its checksum differs")
        raise CheckpointInvalidError(f"its {MANIFEST} and its {COMMITTED} do not belong together: one is damaged")
    try:
        manifest = decode_manifest(raw)
    except MalformedManifestError as error:
        raise CheckpointInvalidError(str(error)) from None
    if (manifest.sequence, manifest.id) != (marker.sequence, marker.id):
        raise CheckpointInvalidError(f"its {COMMITTED} names another checkpoint than its {MANIFEST}")
    if manifest.step != step_of(path.name):
        raise CheckpointInvalidError(f"it is of step {manifest.step} by its {MANIFEST}: it was renamed, or copied")
    for name, record in manifest.files.items():
        size = _size(path / name)
        if size != record.bytes:
            raise CheckpointInvalidError(f"{name} has {size} bytes instead of {record.bytes}")
        if sum(spec.num_bytes for spec, _ in specs_of_file(manifest, name)) > record.bytes:
            raise CheckpointInvalidError(f"{name} cannot hold what the manifest lists")
    return manifest


def read_file(
    path: Path,
    record: FileRecord,
    manifest: Manifest,
    place: Callable[[Entry, Piece | None], memoryview | None],
) -> dict[str, str]:
    """Read and check one file of a checkpoint; return its own texts, or raise CheckpointInvalidError.

    `place` gives the memory for a tensor's bytes, or None to check only. It takes which piece of the state's tensor of
    this name it is; None for a tensor of the rank's own state.
    """
    name = path.name
    try:
        with _open(path) as file:
            expected = {spec.name: (spec, piece) for spec, piece in specs_of_file(manifest, name)}
            return _read_all(_Reader(file), record, expected, place)
    except OSError as error:
        raise CheckpointInvalidError(f"{name}: {error.strerror}") from error
    except MalformedHeaderError as error:
        raise CheckpointInvalidError(f"{name}: {error}") from None
    except CheckpointInvalidError as error:
        raise CheckpointInvalidError(f"{name}: {error}") from None


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; return its manifest, or raise CheckpointInvalidError."""
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        read_file(path / name, record, manifest, lambda _entry, _piece: None)
    return manifest


class _Reader:
    """Reads a file from its beginning to its end, and keeps its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self.checksum = 0

    def read_into(self, view: memoryview) -> None:
        while view:
            chunk = view[:CHUNK_BYTES]
            num_read = os.readv(self._file.fileno(), [chunk])
            if not num_read:
                raise CheckpointInvalidError("it ends too early")
            self.checksum = zlib.crc32(chunk[:num_read], self.checksum)
            view = view[num_read:]

    def read(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        self.read_into(memoryview(content))
        return bytes(content)

    def pass_over(self, num_bytes: int) -> None:
        """Read for the checksum alone."""
        while num_bytes:
            chunk = self._scratch[: min(num_bytes, CHUNK_BYTES)]
            self.read_into(chunk)
            num_bytes -= len(chunk)


def _read_all(
    reader: _Reader,
    record: FileRecord,
    expected: dict[str, tuple[Spec, Piece]],
    place: Callable[[Entry, Piece | None], memoryview | None],
) -> dict[str, str]:
    header_bytes = decode_length(reader.read(min(LENGTH_BYTES, record.bytes)), record.bytes)
    entries, metadata = decode_header(reader.read(header_bytes), record.bytes - LENGTH_BYTES - header_bytes)
    for entry in entries:
        wanted, piece = expected.pop(entry.spec.name, (entry.spec, None))
        if entry.spec != wanted:
            raise CheckpointInvalidError(f"its header has {entry.spec}, the manifest {wanted}")
        view = place(entry, piece)
        if view is None:
            reader.pass_over(entry.end - entry.begin)
        else:
            reader.read_into(view)
    if expected:
        raise CheckpointInvalidError(f"it lacks tensor {next(iter(expected))!r}")
    if f"{reader.checksum:08x}" != record.checksum:
        raise CheckpointInvalidError("its checksum differs: bytes have changed since it was written")
    return metadata


def _open(path: Path) -> BinaryIO:
    # Without waiting: a pipe under that name must not hang the reader.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointInvalidError("it is not a regular file")
    return file


def _read_small(path: Path, max_bytes: int) -> bytes:
    content = bytearray()
    try:
        with _open(path) as file:
            # By its size first: nothing is read of a sparse file of terabytes.
            num_bytes = os.fstat(file.fileno()).st_size
            while num_bytes <= max_bytes and (chunk := file.read(min(CHUNK_BYTES, max_bytes + 1 - len(content)))):
                content += chunk
    except OSError as error:
        raise _unread(path, error) from error
    except CheckpointInvalidError:
        raise CheckpointInvalidError(f"its {path.name} is not a regular file") from None
    if max(num_bytes, len(content)) > max_bytes:
        raise CheckpointInvalidError(f"its {path.name} is too large to be one")
    return bytes(content)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unread(path, error) from error


def _unread(path: Path, error: OSError) -> CheckpointInvalidError:
    is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    what = f"it has no {path.name}" if is_missing else f"its {path.name} cannot be read"
    return CheckpointInvalidError(f"{what}: {error.strerror}")
