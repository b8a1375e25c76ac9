"""Decides which wheels of a directory a host needs, and explains why pip has failed.

Pure.

`needed` goes by the wheels' names and requirements. A wheel that may be needed is sent: one too many costs time, and
pip chooses there among those that came.
Source: the binary distribution format (PEP 427, PEP 425), dependency specifiers (PEP 508), normalised names (PEP 503).

`failure` explains pip's last lines, and gives a hint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from app.install.on_host import normalised
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_REQUIREMENT = re.compile(
    r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[(?P<extras>[^]]*)\])?\s*\(?(?P<bounds>[^;)]*)\)?\s*(?:;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""\bextra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_BOUND = re.compile(r"(?P<sign>>=|<)\s*(?P<version>\d+(?:\.\d+)*)")
_PLAIN_VERSION = re.compile(r"\d+(?:\.\d+)*")
_STABLE_ABI = "abi3"


class Package(msgspec.Struct, frozen=True):
    """A package installed on a host."""

    version: str
    requires: tuple[str, ...] = ()
    """Its requirements without extras."""


class FarPython(msgspec.Struct, frozen=True):
    """The Python of a host; the schema is what `app.install.on_host.survey` prints."""

    version: tuple[int, int, int]
    executable: str
    prefix: str = ""
    has_pip: bool = False
    is_managed: bool = False
    """Whether its packages are the operating system's (PEP 668)."""
    has_torch: bool = False
    machine: str = ""
    is_musl: bool = False
    free_bytes: int = 0
    installed: dict[str, Package] = {}
    """Packages by normalised name."""
    rankdeck: str = ""
    digest: str = ""
    """Digest of rankdeck's files there; empty where one is gone."""
    checkout: str = ""
    """Source of an editable installation."""
    missing: tuple[str, ...] = ()
    """Requirements of that rankdeck that are not there."""

    @property
    def text(self) -> str:
        """Its version as a user writes it."""
        return ".".join(map(str, self.version[:2]))


class Wheel(msgspec.Struct, frozen=True):
    """A wheel of this machine."""

    path: str
    name: str
    """Normalised name."""
    version: str
    pythons: frozenset[str]
    abis: frozenset[str]
    platforms: frozenset[str]
    requires: tuple[str, ...] = ()
    num_bytes: int = 0
    installed_bytes: int = 0
    """Size on a disk, with its bytecode."""

    @property
    def file_name(self) -> str:
        """File name, by which pip knows it."""
        return self.path.rpartition("/")[2]


class Choice(msgspec.Struct, frozen=True):
    """Wheels to send with rankdeck."""

    wheels: tuple[Wheel, ...]
    unavailable: tuple[str, ...]
    """Names that are needed and not installed, without a wheel that fits."""


def wheel_of(path: str, **more: Any) -> Wheel | None:
    """Return the wheel that a file name describes; None if it is not a wheel's name."""
    parts = path.rpartition("/")[2].removesuffix(".whl").split("-")
    if not path.endswith(".whl") or len(parts) not in (5, 6):
        return None
    pythons, abis, platforms = (frozenset(part.lower().split(".")) for part in parts[-3:])
    return Wheel(path, normalised(parts[0]), parts[1], pythons, abis, platforms, **more)


def fits(wheel: Wheel, there: FarPython) -> bool:
    """Return whether a wheel may fit a Python."""
    minor = there.version[1]
    own = f"cp3{minor}"
    is_any = "none" in wheel.abis and wheel.pythons & {"py3", *(f"py3{older}" for older in range(minor + 1)), own}
    is_stable = _STABLE_ABI in wheel.abis and wheel.pythons & {f"cp3{older}" for older in range(2, minor + 1)}
    is_own = own in wheel.pythons and any(abi.startswith(own) for abi in wheel.abis)
    return bool(is_any or is_stable or is_own) and any(_is_platform(text, there) for text in wheel.platforms)


def _is_platform(text: str, there: FarPython) -> bool:
    if text == "any":
        return True
    libc = "musllinux" if there.is_musl else "manylinux"
    return text.startswith((libc, "linux_")) and text.endswith(f"_{there.machine.lower()}")


def needed(requires: Sequence[str], wheelhouse: Iterable[Wheel], there: FarPython) -> Choice:
    """Return the wheels that fit a host and are required, directly or by other requirements.

    Args:
        requires: Requirements of rankdeck.
        wheelhouse: All available wheels.
        there: Python of the host.
    """
    by_name: dict[str, list[Wheel]] = {}
    for wheel in wheelhouse:
        if fits(wheel, there):
            by_name.setdefault(wheel.name, []).append(wheel)
    todo = [(text, frozenset[str]()) for text in requires]
    done: set[tuple[str, frozenset[str]]] = set()
    chosen: dict[str, Wheel] = {}
    unavailable: dict[str, None] = {}
    while todo:
        asked = todo.pop(0)
        match = _REQUIREMENT.fullmatch(asked[0])
        if asked in done or match is None or not _is_wanted(match["marker"] or "", asked[1]):
            continue
        done.add(asked)
        name = normalised(match["name"])
        extras = frozenset(extra.strip().lower() for extra in (match["extras"] or "").split(",") if extra.strip())
        package = there.installed.get(name)
        if package is not None and not extras and _holds(match["bounds"], package.version):
            todo += [(text, frozenset()) for text in package.requires]
            continue
        for wheel in by_name.get(name, ()):
            chosen[wheel.path] = wheel
            todo += [(text, extras) for text in wheel.requires]
        if name not in by_name and package is None and not match["marker"]:
            unavailable.setdefault(name)
    return Choice(tuple(chosen.values()), tuple(sorted(unavailable)))


def _is_wanted(marker: str, extras: frozenset[str]) -> bool:
    """Return whether a requirement may apply: a condition other than an extra's may hold on some machine."""
    match = _EXTRA.search(marker)
    return match is None or match["extra"].lower() in extras


def _holds(bounds: str, version: str) -> bool:
    """Return whether a version is certainly within bounds."""
    if not _PLAIN_VERSION.fullmatch(version):
        return False
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        match = _BOUND.fullmatch(bound)
        if match is None or (_release(version) >= _release(match["version"])) != (match["sign"] == ">="):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


TEXT_LIMIT = 240
_NOT_FOUND = re.compile(r"No matching distribution found for (?P<what>[^\s(]+)")
_NO_INDEX = re.compile(
    r"Failed to establish a new connection|NewConnectionError|NameResolutionError|Temporary failure in name resolution"
    r"|Network is unreachable|No route to host|ConnectTimeoutError|ReadTimeoutError|ProxyError|Connection refused"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded|Errno (?:28|122)\b")
_INCOMPATIBLE = re.compile(r"which is incompatible|which is not installed")


def failure(lines: Sequence[str], host: str, wheelhouse: str) -> tuple[str, str]:
    """Return what went wrong and what to do.

    Args:
        lines: The last ones that pip printed.
        host: Name of the host.
        wheelhouse: Directory used instead of an index; empty without.
    """
    text = "\n".join(lines)
    if _FULL.search(text):
        return "no space is left there", "make room, or name a Python on another disk: --python"
    if "externally-managed-environment" in text:
        return externally_managed()
    if "Could not find an activated virtualenv" in text:
        return "pip there wants a virtual environment (PIP_REQUIRE_VIRTUALENV)", "name its Python: --python"
    missing = _NOT_FOUND.search(text)
    if missing and wheelhouse:
        what = f"{clean(wheelhouse)} has no {clean(missing['what'])} that fits that Python"
        return what, "add it, and run this again"
    if _NO_INDEX.search(text) or missing:
        what = f"finds no {clean(missing['what'])}" if missing else "gets no answer"
        why = "reaches no package index" if _NO_INDEX.search(text) else f"{what} in its package index"
        make = "python3 -m pip wheel -w DIR PATH_OF_CLONE"
        return f"pip there {why}", f"bring the wheels along: {make}; rankdeck install {host} --wheelhouse DIR"
    if "ResolutionImpossible" in text:
        return f"what is installed there does not go with rankdeck: {error_line_of(lines)}", "name a venv: --venv DIR"
    if "Permission denied" in text or "Errno 13" in text:
        return (
            f"that Python's packages may not be written: {error_line_of(lines)}",
            "name a venv of your own: --venv DIR",
        )
    return f"pip fails there: {error_line_of(lines)}", ""


def externally_managed() -> tuple[str, str]:
    """Return the texts for a Python that only the operating system's package manager may change (PEP 668)."""
    return (
        "that Python belongs to the operating system, pip may not change it: PEP 668",
        "name the Python of a venv, as python in rankdeck.toml or by --python; or make one: --venv '~/rankdeck'",
    )


def error_line_of(lines: Sequence[str]) -> str:
    """Return the last error that pip printed, else the last line."""
    # Before a traceback of its own pip prints `ERROR: Exception:`; the error itself is in the last line.
    errors = [line for line in lines if line.startswith("ERROR:") and not line.endswith("Exception:")]
    shown = (errors or [line for line in lines if line.strip()] or ["it prints nothing"])[-1]
    return clean(shown.removeprefix("ERROR:").strip(), TEXT_LIMIT)


def clash(lines: Sequence[str]) -> str:
    """Return the conflicts of a successful installation with other packages; empty for none."""
    return "; ".join(clean(line.removeprefix("ERROR:").strip()) for line in lines if _INCOMPATIBLE.search(line))
