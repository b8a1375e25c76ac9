"""What a job would run on this node: git's commit and what differs from it, and a digest of each source file.

Bounded in files, bytes and time: a directory may be anybody's home. Only names that are source code or configuration
count, since one node alone writes checkpoints and logs.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agent.doctor.interpreter import ask_program, utf8_text
from agent.files import open_regular
from agent.wire.examination import MAX_FILES, Code, FileDigest, Health, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

GIT_S = 10.0
LOOK_S = 10.0
MAX_SOURCE_FILES = 20_000
MAX_SOURCE_BYTES = 256 << 20
MAX_FILE_BYTES = 4 << 20
"""Size above which a file's content is not read."""
MAX_DIRECTORIES = 20_000
MAX_PATH_CHARS = 200_000
"""Characters of all paths together: an examination is one line of a megabyte at most."""
MAX_NAME_CHARS = 4096
SUFFIXES = frozenset(
    {
        *(".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh"),
        *(".toml", ".yaml", ".yml", ".cfg", ".ini", ".jinja", ".proto"),
    }
)
_DIGEST_CHARS = 16
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "wandb", "mlruns", "outputs"})


class _TooMuchError(Exception):
    """The directory holds more than is read."""


def look_at_code(workdir: str, look_s: float = LOOK_S) -> Code | None:
    """Return the code in a directory; None if it is none."""
    root = Path(os.path.abspath(os.path.expanduser(workdir)))  # noqa: PTH100, PTH111 - a link's `..` is the person's
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        return None
    commit, num_changed = _git(root)
    try:
        files = [*_digests(root, time.monotonic() + look_s)]
    except _TooMuchError:
        return Code(str(root), commit, num_changed)
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.path}\0{file.digest}\0".encode(errors="surrogateescape"))
    is_short = len(files) <= MAX_FILES and sum(len(file.path) for file in files) <= MAX_PATH_CHARS
    digests = [FileDigest(utf8_text(file.path, MAX_NAME_CHARS), file.digest) for file in files] if is_short else []
    return Code(str(root), commit, num_changed, whole.hexdigest()[:_DIGEST_CHARS], digests)


def code_rows(workdir: str, code: Code | None) -> Iterator[Row]:
    """Yield the rows about a job's directory; none where none was named."""
    if not workdir:
        return
    if code is None:
        todo = "copy the program there, mount the disk that has it, or name another: --workdir"
        yield Row("code", Health.BAD, f"{workdir} is not a directory that can be entered", todo)
        return
    changed = f", {code.num_changed} file{'s' * (code.num_changed != 1)} changed since" if code.num_changed else ""
    git = f"commit {code.commit[:12]}{changed}" if code.commit else "no git"
    files = f"source files {code.digest[:8]}" if code.digest else "too many files to compare"
    yield Row("code", Health.OK, f"{code.workdir}: {git}, {files}")


def _git(root: Path) -> tuple[str, int]:
    """Return the commit, and how many files differ from it; empty where git is not in use, or answers nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    # No locks and no fsmonitor: looking changes nothing, and starts nothing that a repository names.
    git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    try:
        head = ask_program([*git, "rev-parse", "--verify", "HEAD"], GIT_S, cwd=str(root), environ=environ)
        commit = head.stdout.decode("ascii", "replace").strip()
        if head.exit_code != 0 or not commit.isalnum():
            return "", 0
        status = ask_program(
            [*git, "status", "--porcelain=v1", "-z", "--untracked-files=no", "--no-renames"],
            GIT_S,
            cwd=str(root),
            environ=environ,
        )
    except OSError:
        return "", 0
    return commit[:64], status.stdout.count(b"\0") if status.exit_code == 0 else 0


def _digests(root: Path, deadline_s: float) -> Iterator[FileDigest]:
    """Yield the source files below a directory, in an order that is the same everywhere.

    Raises _TooMuchError if they are too many, too large, or take too long.
    """
    num_files = num_bytes = num_directories = 0
    todo = [""]
    while todo:
        num_directories += 1
        below = todo.pop()
        names, directories = _entries(root / below)
        todo += sorted((os.path.join(below, name) for name in directories), reverse=True)  # noqa: PTH118 - text
        for name in sorted(names):
            path = os.path.join(below, name)  # noqa: PTH118 - as above
            digest, size_bytes = _digest(root / path)
            num_files, num_bytes = num_files + 1, num_bytes + size_bytes
            yield FileDigest(path, digest)
            if num_files > MAX_SOURCE_FILES or num_bytes > MAX_SOURCE_BYTES or time.monotonic() > deadline_s:
                raise _TooMuchError
        if num_directories > MAX_DIRECTORIES or time.monotonic() > deadline_s:
            raise _TooMuchError


def _entries(directory: Path) -> tuple[list[str], list[str]]:
    """Return the names of source files and of directories to read."""
    names, directories = [], []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name == "pyvenv.cfg":
                    return [], []  # a virtual environment: its versions are compared by themselves
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith(".") and entry.name not in _SKIPPED:
                        directories.append(entry.name)
                elif os.path.splitext(entry.name)[1] in SUFFIXES:  # noqa: PTH122 - a path for each name is waste
                    names.append(entry.name)
    except OSError:
        return [], []
    return names, directories


def _digest(path: Path) -> tuple[str, int]:
    try:
        # A link counts as what it leads to, which is what Python would import.
        with os.fdopen(open_regular(path.resolve()), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            size_bytes = os.fstat(file.fileno()).st_size
    except (OSError, RuntimeError):
        return "unreadable", 0
    if len(content) > MAX_FILE_BYTES:
        return f"{size_bytes} bytes", len(content)
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS], len(content)
