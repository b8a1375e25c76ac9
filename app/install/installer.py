"""Installs rankdeck into the Python of one host: survey, send, install by pip, survey again.

Everything here blocks, within bounds; call it from a thread for each host. `on_host` holds the steps that run there.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from app.errors import AgentUnreachableError, HostUnreachableError, IncompatibleAgentError, NotInstalledError
from app.fleet.agent_link import EXIT_CANNOT_EXECUTE, EXIT_NO_COMMAND
from app.install import on_host
from app.install.wheels import FarPython, Wheel, clash, externally_managed, failure, needed
from app.ssh.config import THIS_MACHINE
from app.ssh.remote_command import python_command
from app.text import LINE_LIMIT, bytes_text, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.fleet.agent_link import AgentLink
    from app.install.own_wheel import OwnWheel

LOOK_TIMEOUT_S = 60.0
"""Seconds for a survey, or to make a directory, on a busy machine with a slow disk."""
VENV_TIMEOUT_S = 180.0
PIP_TIMEOUT_S = 900.0
"""Seconds for pip to fetch what rankdeck requires, about 50 MB, over a slow line."""
SLOWEST_BYTES_HZ = 50_000
"""A connection on which a wheel takes longer than at this rate has failed."""


class Plan(msgspec.Struct, frozen=True):
    """What to install on every host."""

    own: OwnWheel
    wheelhouse: str = ""
    """Directory of `wheels` as the user wrote it; empty lets pip use its index."""
    wheels: tuple[Wheel, ...] = ()
    venv: str = ""
    """Directory of a virtual environment to make first."""
    restarts_agent: bool = False


class Installed(msgspec.Struct, frozen=True):
    """Result on one host."""

    version: str
    python: str
    """Full path of the host's Python."""
    is_new: bool = True
    """False where the same was there already."""
    is_this_one: bool = False
    """Whether it is the rankdeck that runs this."""
    before: str = ""
    """Version that was there; empty for none."""
    is_venv_new: bool = False
    has_torch: bool = True
    clash: str = ""
    """Other packages of that Python that it conflicts with."""
    is_agent_older: bool = False
    """Whether the agent that serves there started before the installation."""
    is_agent_restarted: bool = False
    num_jobs_left: int = 0
    """Jobs that the restarted agent has taken up."""


class _Made(msgspec.Struct, frozen=True):
    """A virtual environment."""

    python: str
    is_new: bool


class _Staged(msgspec.Struct, frozen=True):
    """A directory for the files to send."""

    directory: str
    free_bytes: int


class _PipEnded(msgspec.Struct, frozen=True):
    """How pip ended; a `code` of None means that it did not."""

    code: int | None
    lines: tuple[str, ...]
    is_new: bool


class _Age(msgspec.Struct, frozen=True):
    """Age of an agent."""

    is_older: bool


class _Done(msgspec.Struct, frozen=True):
    """An answer without content."""


class _Refusal(msgspec.Struct, frozen=True):
    """Why a verb refuses."""

    refused: str = ""
    hint: str = ""


_Answer = TypeVar("_Answer")


class Installer:
    """Installs on one host."""

    def __init__(self, link: AgentLink, plan: Plan, notify: Callable[[str], None]) -> None:
        """Set up; `link` is connected, `notify` takes progress messages."""
        self._link = link
        self._plan = plan
        self._notify = notify
        self._source = inspect.getsource(on_host)

    def install(self) -> Installed:
        """Install, unless the same is there.

        Raises:
            NotInstalledError: The host's Python takes none; the message contains what to do.
            HostUnreachableError: The connection broke.
            AgentRefusedError: The agent that serves there refuses a restart.
        """
        is_venv_new = False
        if self._plan.venv:
            arguments = (self._plan.venv, str(VENV_TIMEOUT_S))
            made = self._there(_Made, "make_venv", *arguments, timeout_s=VENV_TIMEOUT_S + LOOK_TIMEOUT_S)
            is_venv_new, self._link.python = made.is_new, made.python
        before = self._look()
        own = self._plan.own
        if self._link.host == THIS_MACHINE and before.prefix == sys.prefix:
            executable = clean(before.executable, LINE_LIMIT)
            return Installed(before.rankdeck, executable, is_new=False, is_this_one=True, has_torch=before.has_torch)
        is_new, error_text = False, ""
        after = before
        if before.digest != own.digest or before.missing:
            is_new, error_text = self._put(before)
            after = self._look()
            if after.digest != own.digest:
                detail = f"pip reports success, but {clean(after.executable)} has another rankdeck"
                raise NotInstalledError(self._link.host, detail, "is one in the way, by PYTHONPATH or in ~/.local?")
        done = Installed(
            version=own.wheel.version,
            python=clean(after.executable, LINE_LIMIT),
            is_new=is_new,
            before=clean(before.rankdeck),
            is_venv_new=is_venv_new,
            has_torch=after.has_torch,
            clash=error_text,
        )
        return self._with_agent(done)

    def _look(self) -> FarPython:
        """Return the survey of the Python there."""
        found = self._there(FarPython, "survey", timeout_s=LOOK_TIMEOUT_S)
        if found.version[:2] < on_host.OLDEST:
            raise self._too_old(".".join(map(str, found.version)))
        return found

    def _put(self, there: FarPython) -> tuple[bool, str]:
        """Send the wheels and let pip install them; return whether it had to, and what the result conflicts with."""
        self._refuse(there)
        own = self._plan.own.wheel
        choice = needed(own.requires, self._plan.wheels, there)
        if self._plan.wheelhouse and choice.unavailable:
            names = ", ".join(choice.unavailable)
            kind = f"Python {there.text} on {clean(there.machine)}"
            detail = f"{clean(self._plan.wheelhouse)} has no wheel for {kind} of {names}"
            raise NotInstalledError(self._link.host, detail, "add them; pip download does it for other Pythons, too")
        wheels = (own, *choice.wheels)
        self._check_room(there.free_bytes, sum(wheel.installed_bytes for wheel in wheels))
        staged = self._there(_Staged, "stage", timeout_s=LOOK_TIMEOUT_S)
        with contextlib.ExitStack() as undo:
            undo.callback(self._unstage, staged.directory)
            self._check_room(staged.free_bytes, sum(wheel.num_bytes for wheel in wheels))
            self._send(wheels, staged.directory)
            undo.pop_all()  # from here on pip's caller there removes the directory, even without a connection
        self._notify(f"pip installs rankdeck {own.version} into {clean(there.prefix, LINE_LIMIT)}")
        is_offline = "1" if self._plan.wheelhouse else "0"
        arguments = (staged.directory, own.file_name, self._plan.own.digest, str(PIP_TIMEOUT_S), is_offline)
        pip = self._there(_PipEnded, "install", *arguments, timeout_s=PIP_TIMEOUT_S + LOOK_TIMEOUT_S)
        if pip.code is None:
            raise NotInstalledError(self._link.host, f"pip has not ended within {PIP_TIMEOUT_S:g} s there")
        if pip.code != 0:
            raise NotInstalledError(self._link.host, *failure(pip.lines, self._link.host, self._plan.wheelhouse))
        return pip.is_new, clash(pip.lines)

    def _unstage(self, directory: str) -> None:
        """Remove the staging directory; after a broken connection the next installation does."""
        with contextlib.suppress(NotInstalledError, HostUnreachableError):
            self._there(_Done, "unstage", directory, timeout_s=LOOK_TIMEOUT_S)

    def _refuse(self, there: FarPython) -> None:
        """Raise if pip must not be called there."""
        host, python = self._link.host, clean(self._link.python)
        if there.checkout:
            detail = f"rankdeck there is the checkout {clean(there.checkout)} (pip install -e), which is left alone"
            raise NotInstalledError(host, detail, "take it out by pip uninstall rankdeck, or name another Python")
        if there.is_managed:
            raise NotInstalledError(host, *externally_managed())
        if not there.has_pip:
            hint = f"there: {python} -m ensurepip, or apt install python3-pip"
            raise NotInstalledError(host, f"{python} has no pip", hint)

    def _check_room(self, free_bytes: int, wanted_bytes: int) -> None:
        if free_bytes < wanted_bytes:
            detail = f"{bytes_text(wanted_bytes)} are needed there, {bytes_text(free_bytes)} are free"
            raise NotInstalledError(self._link.host, detail, "make room, or name a Python on another disk: --python")

    def _send(self, wheels: Sequence[Wheel], directory: str) -> None:
        num_more = len(wheels) - 1
        more = f" and {num_more} {'wheel' if num_more == 1 else 'wheels'} that it requires" if num_more else ""
        size = bytes_text(sum(wheel.num_bytes for wheel in wheels))
        self._notify(f"sends rankdeck {wheels[0].version}{more} ({size})")
        for wheel in wheels:
            far = f"{directory}/{wheel.file_name}"
            timeout_s = LOOK_TIMEOUT_S + wheel.num_bytes / SLOWEST_BYTES_HZ
            self._there(_Done, "receive", far, timeout_s=timeout_s, given=Path(wheel.path).read_bytes())

    def _with_agent(self, done: Installed) -> Installed:
        """Check which agent serves there, and restart it if that is wanted."""
        place = None
        with contextlib.suppress(AgentUnreachableError, IncompatibleAgentError):  # `up` reports the reason
            place = self._link.serving()
        if place is None:
            return done
        if not self._there(_Age, "agent_age", str(place.pid), timeout_s=LOOK_TIMEOUT_S).is_older:
            return done
        if not self._plan.restarts_agent:
            return msgspec.structs.replace(done, is_agent_older=True)
        self._notify("restarts the agent")
        num_left = self._link.shut_down(kill_jobs=False).num_jobs_left or 0
        self._link.bring_up()
        return msgspec.structs.replace(done, is_agent_restarted=True, num_jobs_left=num_left)

    def _there(self, kind: type[_Answer], verb: str, *arguments: str, timeout_s: float, given: bytes = b"") -> _Answer:
        """Return the answer of a verb of `on_host`.

        Raises:
            NotInstalledError: It cannot be run there, or refuses.
            HostUnreachableError: The connection broke.
        """
        command, source = python_command(self._source, verb, *arguments)
        done = self._link.run_python(command, timeout_s, source + given)
        host, python = self._link.host, clean(self._link.python)
        if done.exit_code in (EXIT_NO_COMMAND, EXIT_CANNOT_EXECUTE):
            raise NotInstalledError(host, f"{python} does not run there", "name one: --python")
        if "SyntaxError" in done.error_text:
            raise self._too_old("")
        if done.exit_code != 0:
            raise self._odd(done.error_text or f"exit code {done.exit_code}")
        line = done.stdout.strip().rpartition(b"\n")[2]  # a login may print a greeting first
        try:
            refusal = msgspec.json.decode(line, type=_Refusal)
            if not refusal.refused:
                return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._odd(str(error)) from error
        raise NotInstalledError(host, clean(refusal.refused, LINE_LIMIT), clean(refusal.hint))

    def _too_old(self, version: str) -> NotInstalledError:
        what = f"is Python {clean(version)}, older than 3.11" if version else "is older than Python 3.11"
        return NotInstalledError(self._link.host, f"{clean(self._link.python)} {what}", "name a newer one: --python")

    def _odd(self, error_text: str) -> HostUnreachableError:
        return HostUnreachableError(
            self._link.host, f"{clean(self._link.python)} does not do as asked: {clean(error_text)}"
        )
