"""Steps of `rankdeck install` on a host: this text is sent there, and run by a Python that has no rankdeck yet.

It uses the standard library alone. `survey` also runs in a Python too old for rankdeck, so that it can report that. One
JSON object on the last line answers each verb.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

OLDEST = (3, 11)
DISTRIBUTION = "rankdeck"
STAGING_PREFIX = "rankdeck-install-"
OLD_STAGING_S = 86_400
"""Age in seconds at which leftovers of a broken connection are removed: then no installation is still under way."""
LOCK_FILE = ".rankdeck-install.lock"
LOCK_POLL_S = 0.2
NUM_LINES = 40
"""Number of pip's last lines that are kept."""
PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2")
"""Nobody can answer questions; an index that three tries do not reach is not reached by a sixth."""


def content_digest(names: Iterable[str], read: Callable[[str], bytes]) -> str:
    """Return a digest of a distribution's content, the same for a wheel and for what pip makes of it.

    pip treats two wheels of one version as the same, so a version is not enough.

    Args:
        names: Names of all its files.
        read: Returns the bytes of one.
    """
    whole = hashlib.sha256()
    for name in sorted(name for name in names if _is_content(name)):
        content = read(name)
        if name.endswith("/METADATA"):
            content = content.replace(b"\r\n", b"\n").split(b"\n\n", 1)[0]  # the rest is the README
        whole.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return whole.hexdigest()


def _is_content(name: str) -> bool:
    if name.startswith(("..", "/")) or "__pycache__" in name:
        return False
    return ".dist-info/" not in name or name.endswith(("/METADATA", "/entry_points.txt"))


def normalised(name: str) -> str:
    """Return the normalised name of a distribution.

    Source: PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def survey() -> dict[str, Any]:
    """Return what the Python here is, and what it has; of an old one its version only."""
    found = {"version": list(sys.version_info[:3]), "executable": sys.executable}
    if sys.version_info[:2] < OLDEST:
        return found
    has_own_packages = sys.prefix == sys.base_prefix
    purelib = Path(sysconfig.get_path("purelib"))
    return {
        **found,
        "prefix": sys.prefix,
        "has_pip": importlib.util.find_spec("pip") is not None,
        "is_managed": has_own_packages and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists(),
        "has_torch": importlib.util.find_spec("torch") is not None,
        "machine": platform.machine(),
        "is_musl": str(sysconfig.get_config_var("SOABI")).endswith("musl"),
        "free_bytes": shutil.disk_usage(purelib if purelib.is_dir() else sys.prefix).free,
        **_packages(),
    }


def _packages() -> dict[str, Any]:
    """Return the installed packages, and rankdeck's version, digest, checkout and missing requirements."""
    from importlib import metadata  # noqa: PLC0415 - from Python 3.8 on

    installed: dict[str, dict[str, Any]] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            requires = [text for text in distribution.requires or () if "extra" not in text.partition(";")[2]]
            installed.setdefault(normalised(name), {"version": distribution.version, "requires": requires})
    found: dict[str, Any] = {"installed": installed, "rankdeck": "", "digest": "", "checkout": "", "missing": []}
    try:
        own = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return found
    with contextlib.suppress(ValueError, AttributeError):
        origin = json.loads(own.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            found["checkout"] = str(origin.get("url", "")).removeprefix("file://")
    with contextlib.suppress(OSError):  # a file is gone: the digest stays empty, and differs from ours
        files = {file.as_posix(): file for file in own.files or ()}
        found["digest"] = content_digest(files, lambda name: Path(str(files[name].locate())).read_bytes())
    needed = {normalised(name) for text in own.requires or () if (name := _always_needed(text))}
    return {**found, "rankdeck": own.version, "missing": sorted(needed - set(installed))}


def _always_needed(requirement: str) -> str:
    """Return the name of a requirement; empty if only an extra or another machine needs it."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)[^;]*", requirement)
    return match.group(1) if match else ""


def make_venv(directory: str, timeout_s: str) -> dict[str, Any]:
    """Make a virtual environment unless there is one; it sees this Python's torch, unless this is a venv itself."""
    path = Path(os.path.abspath(os.path.expanduser(directory)))  # noqa: PTH100, PTH111 - the user decides on `..` of a link
    python = path / "bin" / "python"
    was_there = path.exists()
    if was_there and not path.is_dir():
        return _refusal(f"{path} is no directory", "name another one: --venv")
    deadline_s = time.monotonic() + float(timeout_s)
    path.mkdir(parents=True, exist_ok=True)
    with _alone_in(path, deadline_s):
        if python.exists():
            return {"python": str(python), "is_new": False}
        if any(entry.name != LOCK_FILE for entry in path.iterdir()):
            return _refusal(f"{path} is not empty, and no venv", "name another directory: --venv")
        why = _why_no_venv(path, deadline_s)
        if why is None:
            return {"python": str(python), "is_new": True}
    shutil.rmtree(path, ignore_errors=True)
    if was_there:
        path.mkdir(exist_ok=True)
    return why


def _why_no_venv(path: Path, deadline_s: float) -> dict[str, Any] | None:
    """Make the environment; return the refusal if that fails."""
    if _is_without_ensurepip():
        package = "python{}.{}-venv".format(*sys.version_info)
        return _refusal(f"{sys.executable} makes no venv: ensurepip is missing", f"apt install {package} there")
    has_torch = sys.prefix == sys.base_prefix and importlib.util.find_spec("torch") is not None
    options = ("--system-site-packages",) if has_torch else ()
    code, lines = _run_bounded(["-m", "venv", *options, str(path)], path, deadline_s)
    if code == 0:
        return None
    last_lines = lines[-1] if lines else f"exit code {code}"
    return _refusal(f"{sys.executable} -m venv: " + ("it does not end" if code is None else last_lines))


def _is_without_ensurepip() -> bool:
    """Return whether ensurepip, which venv needs, is a separate package that is not installed, as on Debian."""
    return importlib.util.find_spec("ensurepip") is None


def stage() -> dict[str, Any]:
    """Make a directory that nobody else may enter; remove what earlier installations have left."""
    directory = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))  # 0700, under an unpredictable name
    now_s = directory.stat().st_mtime
    for other in directory.parent.glob(STAGING_PREFIX + "*"):
        with contextlib.suppress(OSError):
            found = other.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and now_s - found.st_mtime > OLD_STAGING_S:
                shutil.rmtree(other, ignore_errors=True)
    return {"directory": str(directory), "free_bytes": shutil.disk_usage(directory).free}


def receive(path: str) -> dict[str, Any]:
    """Write standard input into a new file."""
    with Path(path).open("xb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return {}


def unstage(directory: str) -> dict[str, Any]:
    """Remove the staging directory."""
    shutil.rmtree(directory, ignore_errors=True)
    return {}


def install(directory: str, wheel: str, digest: str, timeout_s: str, is_offline: str) -> dict[str, Any]:
    """Install a wheel of the staging directory with pip, and remove the directory in any case.

    Args:
        directory: Where the wheels are.
        wheel: File name of rankdeck's wheel.
        digest: Digest of its content.
        timeout_s: Limit in seconds for all of it.
        is_offline: "1" to look for requirements in the directory only.
    """
    deadline_s = time.monotonic() + float(timeout_s)
    try:
        with _alone_in(Path(sys.prefix), deadline_s):
            return _install(Path(directory), wheel, digest, deadline_s, is_offline=is_offline == "1")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _install(directory: Path, wheel: str, digest: str, deadline_s: float, *, is_offline: bool) -> dict[str, Any]:
    before = _packages()
    if before["digest"] == digest and not before["missing"]:
        return {"code": 0, "lines": [], "is_new": False}  # a host that shares this Python was faster
    sources = ["--no-index", "--find-links", str(directory)] if is_offline else []
    calls = [[*sources, str(directory / wheel)]]
    if before["rankdeck"] == wheel.split("-")[1]:
        # pip skips a wheel of the installed version; its requirements come by the first call.
        calls.append(["--no-deps", "--force-reinstall", *sources, str(directory / wheel)])
    last_lines: list[str] = []
    code: int | None = 0
    for arguments in calls:
        pip = ["-P", "-m", "pip", "install", *PIP_OPTIONS, *arguments]
        code, lines = _run_bounded(pip, directory, deadline_s)
        last_lines += lines
        if code != 0:
            break
    return {"code": code, "lines": last_lines[-NUM_LINES:], "is_new": True}


def agent_age(pid: str) -> dict[str, Any]:
    """Return whether an agent's process started before the rankdeck here was installed."""
    from importlib import metadata  # noqa: PLC0415

    import psutil  # noqa: PLC0415 - it has come with rankdeck

    files = metadata.distribution(DISTRIBUTION).files or ()
    written = [Path(str(file.locate())).stat().st_mtime for file in files if file.name == "RECORD"]
    try:
        began = psutil.Process(int(pid)).create_time()
    except psutil.Error:
        return {"is_older": False}
    return {"is_older": any(began < moment for moment in written)}


def _refusal(what: str, hint: str = "") -> dict[str, Any]:
    return {"refused": what, "hint": hint}


@contextlib.contextmanager
def _alone_in(directory: Path, deadline_s: float) -> Iterator[None]:
    """Lock out other hosts that share this directory, if it can be written and its file system has locks."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            while not _is_locked(fd) and time.monotonic() < deadline_s:
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run_bounded(arguments: Sequence[str], cwd: Path, deadline_s: float) -> tuple[int | None, list[str]]:
    """Run this Python; return its exit code, None when it did not end in time, and the last lines it printed."""
    # A file instead of a pipe, and a session of its own: children of pip could hold a pipe open, and outlive it.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return code, [line for line in lines if line.strip()][-NUM_LINES:]


VERBS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (survey, make_venv, stage, receive, unstage, install, agent_age)
}


def main(argv: Sequence[str]) -> None:
    """Run one verb, and print its answer."""
    try:
        answer = VERBS[argv[0]](*argv[1:])
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = _refusal(where + (error.strerror or str(error)))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
