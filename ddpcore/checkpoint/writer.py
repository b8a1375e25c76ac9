"""Writes one rank's share of a checkpoint, in a process of its own.

    python -I -S writer.py MEMORY_FD PARENT_PID

It has the standard library alone, 10 MB of memory and a low priority, and shares with the trainer only a memfd that
holds the finished file. So it starts in milliseconds, takes nothing from training, does not keep the process group's
sockets open, and finishes its file when the trainer is killed.

Jobs come and results go as JSON lines over the socket that is its standard input. What makes a checkpoint of the
shares:

1. Each writer: `rank-N.safetensors.part`, fsync, rename; then `rank-N.json` with size and checksum.
2. The first rank's writer, once all shares are there: `manifest.json`, `COMMITTED`, both fsynced; fsync of the
   directory; rename to the checkpoint's name; fsync of the parent. Then it deletes those that are not kept.
3. A writer that fails writes `rank-N.failed`, so that the first one need not wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import zlib
from typing import Any

CHUNK_BYTES = 16 << 20
"""Written at a time: with 4 MiB the disk waits for the next one."""

BLOCK_BYTES = 4096
"""What is written past the page cache comes in multiples of this, in memory and in the file."""

POLL_S = 0.02
PARENT_POLL_S = 2.0
"""How often an idle writer looks whether its trainer lives: forked children of the trainer may hold its socket open."""

NICENESS = 19
"""The most modest: while two writers worked beside two ranks on two cores, steps of 18 ms took 20; with 10 they took
24, with 0 they took 40. A save that waits for its writers leaves them the cores."""

PIECE_BYTES = 1 << 20
"""Summed up between two looks at the clock: 0.5 ms of a processor."""

LEAST_FRAC = 0.06
"""Fraction of a busy core: with less a checkpoint is not written for minutes on a crowded machine."""

AMPLE_FRAC = 0.1
"""Fraction of a core that is ample: the writer may become more modest."""

LEVEL_S = 0.2
"""How long a niceness is kept at least; the kernel takes ten changes of sessions' own a second."""

NAME = "rankdeck-writer"
"""What the kernel calls this process: whoever ends a job's processes knows by it who may finish first. Source: proc(5),
at most 15 characters."""

LONELY_S = 1.0
"""Seconds for which shares may be missing after the trainer's death, with no other writer at work on them."""

SILENT_S = 60.0
"""The same where the file system has no locks to show it: how long nothing may change."""

Job = dict[str, Any]
"""A job's JSON: {"number", "directory", "file", "bytes", "publish": None or see `_publish`}."""


class Modesty:
    """How far this process stands back behind others: wholly, until it gets less than LEAST_FRAC of a core.

    Where the kernel shares the cores between sessions first, niceness counts only within one, and a session's own may
    go up and down again. Elsewhere only a privileged process gets its niceness back. Source: sched(7), setpriority(2).
    """

    def __init__(self) -> None:
        self._level = self._last_level = NICENESS
        self._seen_s = self._ran_s = 0.0
        self._set(NICENESS)

    def begin(self) -> None:
        """Take the place that the last job needed. In the thread that does nothing but compute."""
        self._set(self._last_level)
        self._seen_s, self._ran_s = time.monotonic(), time.thread_time()

    def rest(self) -> None:
        """Stand back wholly: what is left to do is the disk's."""
        self._last_level = self._level
        self._set(NICENESS)

    def look(self) -> None:
        """Come forward, or stand back again, by the share of a core that the calling thread has had."""
        seen_s, ran_s = time.monotonic(), time.thread_time()
        if seen_s - self._seen_s < LEVEL_S:
            return
        cpu_frac = (ran_s - self._ran_s) / (seen_s - self._seen_s)
        self._seen_s, self._ran_s = seen_s, ran_s
        if cpu_frac < LEAST_FRAC and self._level > 0:
            self._set(self._level // 2)
        elif cpu_frac > AMPLE_FRAC and self._level < NICENESS:
            self._set(min(NICENESS, 2 * self._level + 1))

    def _set(self, level: int) -> None:
        with contextlib.suppress(OSError):
            # Niceness is each thread's own.
            for thread in {0, os.getpid()}:
                os.setpriority(os.PRIO_PROCESS, thread, level)
        try:
            with open("/proc/self/autogroup", "w", encoding="ascii") as autogroup:
                autogroup.write(str(level))
        except BlockingIOError:
            # Somebody's session was changed less than 0.1 s ago: the next look tries again.
            return
        except OSError:
            pass
        self._level = level


class FailedError(Exception):
    """This job cannot be done; the message gives the reason."""


class FollowingError(FailedError):
    """This job cannot be done since something has failed elsewhere."""


class Channel:
    """The trainer's end of the socket, as seen from here."""

    def __init__(self, connection: socket.socket, parent_pid: int) -> None:
        self._connection = connection
        self._parent_pid = parent_pid
        self._buffer = b""
        self._has_ended = False

    @property
    def is_orphaned(self) -> bool:
        """True once the trainer has ended or closed its end."""
        return self._has_ended or os.getppid() != self._parent_pid

    def next_message(self, timeout_s: float) -> Job | None:
        """Return the next message, or None if none comes in time."""
        if b"\n" not in self._buffer:
            if self._has_ended:
                time.sleep(timeout_s)
                return None
            if not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            try:
                chunk = self._connection.recv(65_536)
            except OSError:
                chunk = b""
            self._has_ended = not chunk
            self._buffer += chunk
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Job = json.loads(line)
        return message

    def send(self, message: Job) -> None:
        """Send a result, if the trainer is still there."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Serve one trainer until it has gone."""
    memory, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Whoever stops a whole service or session says so to its writers too: these end with their trainers, which save
        # once more before they do.
        signal.signal(number, signal.SIG_IGN)
    modesty = Modesty()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(NAME)
    channel = Channel(socket.socket(fileno=0), parent_pid)
    while True:
        # Looked at before the last look into the socket: the trainer may send a job and die.
        was_orphaned = channel.is_orphaned
        job = channel.next_message(0.0 if was_orphaned else PARENT_POLL_S)
        if job is not None and "abandon" not in job:
            serve(job, memory, channel, modesty)
        elif job is None and was_orphaned:
            return


def serve(job: Job, memory: int, channel: Channel, modesty: Modesty | None = None) -> None:
    """Do one job and report its result. Without `modesty` this process keeps the niceness that it has."""
    directory = job["directory"]
    lock = -1
    try:
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        write_content(job, memory, modesty)
        if job["publish"]:
            publish(job, memory, channel, lock)
    except (OSError, FailedError) as error:
        problem = describe(error, job)
        leave_word(f"{directory}/{job['file']}.failed", problem)
        if job["publish"]:
            delete(directory)
        # Who fails may take the directory away from the others.
        follows = isinstance(error, FollowingError | FileNotFoundError)
        channel.send({"number": job["number"], "problem": problem, "follows": follows})
        return
    finally:
        if lock >= 0:
            os.close(lock)
    channel.send({"number": job["number"], "problem": ""})
    if job["publish"]:
        left = [problem for name in job["publish"]["delete"] if (problem := delete(f"{job['publish']['root']}/{name}"))]
        if left:
            channel.send({"number": job["number"], "undeleted": left})


def leave_word(path: str, problem: str) -> None:
    """Report a failure to the first rank's writer, in one piece, or as much of it as the disk takes."""
    with contextlib.suppress(OSError), open(f"{path}.part", "w", errors="replace") as failed:
        failed.write(problem)
    with contextlib.suppress(OSError):
        os.rename(f"{path}.part", path)


def write_content(job: Job, memory: int, modesty: Modesty | None) -> None:
    """Write this rank's file from the memfd, and its report."""
    path = f"{job['directory']}/{job['file']}"
    if os.fstat(memory).st_size < job["bytes"]:
        raise FailedError("the snapshot is shorter than its file")
    fd = open_direct(f"{path}.part")
    is_whole = False
    try:
        with mmap.mmap(memory, job["bytes"], prot=mmap.PROT_READ) as mapped, memoryview(mapped) as content:
            checksum = copy(content, fd, modesty)
        os.fsync(fd)
        is_whole = True
    finally:
        os.close(fd)
        if not is_whole:
            with contextlib.suppress(OSError):
                os.unlink(f"{path}.part")
    os.rename(f"{path}.part", path)
    report = json.dumps({"bytes": job["bytes"], "checksum": f"{checksum:08x}"})
    write_file(f"{path}.json.part", report.encode(), is_durable=False)
    os.rename(f"{path}.json.part", f"{path}.json")


def open_direct(path: str) -> int:
    """Create a file that is written past the page cache, where its file system can do that.

    The cache would take memory that training's own files may want, five times the processor's time and, in a virtual
    machine, three times as long: 1 GB by two writers each took 6.6 to 7.5 s through it and 1.8 to 2.3 s past it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags | os.O_EXCL, 0o644)
    with contextlib.suppress(OSError):
        set_direct(fd, is_direct=True)
    return fd


def set_direct(fd: int, *, is_direct: bool) -> None:
    """Have a file written past the page cache, or not."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)


def copy(content: memoryview, fd: int, modesty: Modesty | None = None) -> int:
    """Write all of a page-aligned memory to the beginning of a file; return its checksum, taken at the same time."""
    checksum = Checksum(content, modesty)
    try:
        num_direct = len(content) - len(content) % BLOCK_BYTES
        for begin in range(0, num_direct, CHUNK_BYTES):
            with content[begin : min(begin + CHUNK_BYTES, num_direct)] as chunk:
                write_chunk(fd, chunk, begin)
        set_direct(fd, is_direct=False)
        with content[num_direct:] as tail:
            write_all(fd, tail)
        return checksum.result()
    finally:
        checksum.give_up()
        if modesty is not None:
            modesty.rest()


def write_chunk(fd: int, chunk: memoryview, begin: int) -> None:
    """Write a part of a file past the page cache, or through it where its file system wants that."""
    try:
        write_all(fd, chunk)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Other rules of alignment than the usual ones: then through the cache, from where it stands.
        set_direct(fd, is_direct=False)
        with chunk[os.lseek(fd, 0, os.SEEK_CUR) - begin :] as rest:
            write_all(fd, rest)


class Checksum:
    """A checksum that is taken in a thread of its own, beside the disk's work.

    `content` must stay until `result` or `give_up` has returned.
    """

    def __init__(self, content: memoryview, modesty: Modesty | None) -> None:
        self._content = content
        self._modesty = modesty
        self._checksum = 0
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def result(self) -> int:
        """Return the checksum; blocks until it is there."""
        self._thread.join()
        return self._checksum

    def give_up(self) -> None:
        """Stop, if there is anything left to do; blocks for a moment."""
        self._is_given_up = True
        self._thread.join()

    def _run(self) -> None:
        if self._modesty is not None:
            self._modesty.begin()
        for begin in range(0, len(self._content), PIECE_BYTES):
            if self._is_given_up:
                return
            with self._content[begin : begin + PIECE_BYTES] as piece:
                self._checksum = zlib.crc32(piece, self._checksum)
            if self._modesty is not None:
                self._modesty.look()


def publish(job: Job, memory: int, channel: Channel, lock: int) -> None:
    """Gather all shares and make them a checkpoint.

    The job's "publish" is {"root", "name", "files": names of all shares, "body_bytes": size of the manifest without its
    files, which follows the share in the memfd, "marker": what stands in the commit marker between the
    manifest's size and its own checksum, "delete": names}.
    """
    directory, order = job["directory"], job["publish"]
    records = gather(job, channel, lock)
    body = os.pread(memory, order["body_bytes"], job["bytes"])
    if len(body) != order["body_bytes"]:
        raise FailedError("the snapshot is shorter than its manifest")
    manifest = b'{"files":' + json.dumps(records, separators=(",", ":")).encode() + b"," + body[1:]
    write_file(f"{directory}/manifest.json", manifest)
    for file in order["files"]:
        os.unlink(f"{directory}/{file}.json")
    marker = f"rankdeck-commit/2 {zlib.crc32(manifest):08x} {len(manifest)} {order['marker']}".encode()
    write_file(f"{directory}/COMMITTED", marker + f" {zlib.crc32(marker):08x}\n".encode())
    fsync_directory(directory)
    published = f"{order['root']}/{order['name']}"
    os.rename(directory, published)
    # Until it has its name, the lock keeps a new run from clearing it away; afterwards it harms nobody.
    with contextlib.suppress(OSError):
        os.unlink(f"{published}/lock")
    fsync_directory(order["root"])


def gather(job: Job, channel: Channel, lock: int) -> Job:
    """Wait for all shares; return their files' sizes and checksums."""
    directory, files = job["directory"], job["publish"]["files"]
    seen: object = None
    changed_s = time.monotonic()
    while True:
        present = sizes(directory)
        if all(f"{file}.json" in present for file in files):
            return {file: json.loads(read_file(f"{directory}/{file}.json")) for file in files}
        for name in present:
            if name.endswith(".failed"):
                reason = read_file(f"{directory}/{name}").decode(errors="replace")
                raise FollowingError(reason or f"{name.removesuffix('.failed')} could not be written")
        if present != seen:
            seen, changed_s = present, time.monotonic()
        message = channel.next_message(POLL_S)
        if message is not None and message.get("abandon") == job["number"]:
            raise FollowingError("given up, since another rank has failed")
        if channel.is_orphaned:
            patience_s = LONELY_S if is_alone(lock) else SILENT_S
            if time.monotonic() - changed_s > patience_s:
                raise FollowingError("the other ranks have ended without writing their shares")


def sizes(directory: str) -> dict[str, int]:
    """Return the files of a directory and their sizes."""
    found = {}
    for name in os.listdir(directory):
        # Others rename theirs at the same time.
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.stat(f"{directory}/{name}").st_size
    return found


def is_alone(lock: int) -> bool:
    """Return whether no other writer is at work in the directory of this lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except OSError:
        alone = False
    # A failed conversion has lost the lock that was held.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return alone


def delete(path: str) -> str:
    """Delete a directory of files; return what is wrong, or "". It loses its name first: no half of it is ever read."""
    root, _, name = path.rpartition("/")
    doomed = f"{root}/.del-{name.removeprefix('.tmp-')}-{os.urandom(4).hex()}"
    try:
        os.rename(path, doomed)
        if os.path.islink(doomed):
            # What it leads to is somebody else's.
            os.unlink(doomed)
            return ""
        for entry in os.scandir(doomed):
            os.unlink(entry.path)
        os.rmdir(doomed)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{name} cannot be deleted: {error.strerror}"
    return ""


def describe(error: Exception, job: Job) -> str:
    """Return what went wrong, for people."""
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.ENOENT:
        return f"{job['directory']} has vanished while it was being written"
    text = f"{error.strerror}: {job['directory']}/{job['file']}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            # Not of the directory itself: who leads may have given it up by now.
            free = os.statvfs(os.path.dirname(job["directory"]))
            text += f" ({job['bytes']} bytes to write, {free.f_bavail * free.f_frsize} free)"
    return text


def write_file(path: str, content: bytes, *, is_durable: bool = True) -> None:
    """Write a small file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(content))
        if is_durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, content: memoryview) -> None:
    """Write all of it: the system may take less at a time."""
    done = 0
    while done < len(content):
        with content[done:] as rest:
            done += os.write(fd, rest)


def read_file(path: str) -> bytes:
    """Return a small file's content."""
    with open(path, "rb") as file:
        return file.read()


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
