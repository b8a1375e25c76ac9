"""rankdeck put into a Python: once, again, over other content; and what is said where it cannot be."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from app.errors import AppError, HostUnreachableError, NotInstalledError
from app.fleet.host_link import Access, HostLink
from app.fleet.local_link import LocalLink
from app.install.installer import Installed, Installer, Plan
from app.install.on_host import STAGING_PREFIX
from app.install.own_wheel import named_wheel, wheels_in
from tests.support.hosts import Host, Network, require_hosts
from tests.support.waiting import until
from tests.support.wheels import write_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from app.fleet.agent_link import AgentLink


def plan_of(wheel: Path, wheelhouse: Path | None = None, venv: str = "") -> Plan:
    wheels = () if wheelhouse is None else tuple(wheels_in(wheelhouse))
    return Plan(named_wheel(wheel), "" if wheelhouse is None else str(wheelhouse), wheels, venv)


def install(link: AgentLink, plan: Plan) -> tuple[Installed, list[str]]:
    """Return how it went, and what was said meanwhile."""
    said: list[str] = []
    link.connect()
    return Installer(link, plan, said.append).install(), said


def bare_venv(directory: Path, *options: str) -> str:
    subprocess.run([sys.executable, "-m", "venv", *options, str(directory)], check=True, timeout=60)
    return str(directory / "bin/python")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with pip and nothing else."""
    return bare_venv(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture
def python(bare: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The same, as it was, and a place of its own for temporary files."""
    staging = tmp_path / "tmp"
    staging.mkdir()
    monkeypatch.setenv("TMPDIR", str(staging))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield bare
    monkeypatch.delenv("PYTHONPATH", raising=False)  # pip would take away what a test put there
    pip = [bare, "-P", "-m", "pip", "uninstall", "-q", "-y", "rankdeck", "needed"]
    subprocess.run(pip, check=True, timeout=60, capture_output=True)
    assert list(staging.iterdir()) == []


def site_packages(python: str) -> Path:
    return Path(python).parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages"


@pytest.mark.slow
def test_the_same_is_installed_once_and_other_content_of_the_same_version_over_it(python: str, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "rankdeck", "9.1", source="text = 'one'")

    done, said = install(LocalLink(python), plan_of(wheel))

    assert (done.version, done.python, done.is_new, done.before) == ("9.1", python, True, "")
    assert done.has_torch is False
    assert [line.split(" (")[0] for line in said] == [
        "sends rankdeck 9.1",
        f"pip installs rankdeck 9.1 into {Path(python).parents[1]}",
    ]
    done, said = install(LocalLink(python), plan_of(wheel))
    assert (done.is_new, done.before, said) == (False, "9.1", [])

    other = write_wheel(tmp_path / "other", "rankdeck", "9.1", source="text = 'two'")
    done, _ = install(LocalLink(python), plan_of(other))
    assert (done.is_new, done.before) == (True, "9.1")
    assert (site_packages(python) / "deck.py").read_text() == "text = 'two'"
    (site_packages(python) / "deck.py").unlink()
    assert install(LocalLink(python), plan_of(other))[0].is_new, "a file of it was gone"
    older = write_wheel(tmp_path, "rankdeck", "8.0")
    done, _ = install(LocalLink(python), plan_of(older))
    assert (done.version, done.before) == ("8.0", "9.1")


def test_what_is_required_comes_out_of_the_wheelhouse_and_again_when_it_is_gone(python: str, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "rankdeck", "9.1", ("needed>=2",))
    house = tmp_path / "house"
    for name, version in (("needed", "2.5"), ("other", "1")):
        write_wheel(house, name, version, module=name)

    _, said = install(LocalLink(python), plan_of(wheel, house))

    assert said[0].startswith("sends rankdeck 9.1 and 1 wheel that it requires (")
    assert (site_packages(python) / "needed.py").exists()
    assert not (site_packages(python) / "other.py").exists()
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "needed"], check=True, capture_output=True)
    assert install(LocalLink(python), plan_of(wheel, house))[0].is_new
    assert (site_packages(python) / "needed.py").exists()


def test_a_package_that_it_does_not_suit_is_told(python: str, tmp_path: Path) -> None:
    house = tmp_path / "house"
    write_wheel(house, "needed", "2.5", module="needed")
    tool = site_packages(python) / "tool-1.dist-info"
    tool.mkdir()
    (tool / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1\nRequires-Dist: needed<2\n")
    try:
        done, _ = install(LocalLink(python), plan_of(write_wheel(tmp_path, "rankdeck", "9.1", ("needed>=2",)), house))
    finally:
        shutil.rmtree(tool)

    assert done.clash == "tool 1 requires needed<2, but you have needed 2.5 which is incompatible."


def test_a_rankdeck_that_stands_in_the_way_is_said(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = tmp_path / "way/rankdeck-8.dist-info"
    way.mkdir(parents=True)
    (way / "METADATA").write_text("Metadata-Version: 2.1\nName: rankdeck\nVersion: 8\n")
    monkeypatch.setenv("PYTHONPATH", str(way.parent))

    with pytest.raises(NotInstalledError, match="has another rankdeck") as caught:
        install(LocalLink(python), plan_of(write_wheel(tmp_path, "rankdeck", "9.1")))

    assert "PYTHONPATH" in caught.value.hint


@pytest.mark.slow
def test_a_venv_is_made_and_used_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "new/venv"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    link = LocalLink(sys.executable)

    done, _ = install(link, plan_of(write_wheel(tmp_path, "rankdeck", "9.1"), venv=str(venv)))

    assert (done.is_venv_new, done.is_new, done.python) == (True, True, f"{venv}/bin/python")
    assert link.python == done.python
    assert not list(tmp_path.glob(f"{STAGING_PREFIX}*"))


def test_the_python_that_runs_this_is_left_alone(tmp_path: Path) -> None:
    done, said = install(LocalLink(), plan_of(write_wheel(tmp_path, "rankdeck", "9.1")))

    assert (done.is_this_one, done.is_new, done.python, said) == (True, False, sys.executable, [])


@pytest.fixture
def host() -> Iterator[Host]:
    require_hosts()
    with Network("h1") as network:
        yield network["h1"]


def configure(host: Host, *lines: str) -> None:
    config = host.directory / "sshd_config"
    config.write_text("\n".join([config.read_text(), *lines, ""]))
    host.restart_sshd()


def link_to(host: Host, python: str) -> HostLink:
    return HostLink(Access("h1", python, str(host.directory.parent / "ssh_config")))


def test_a_large_wheel_arrives_whole(host: Host, python: str, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "rankdeck", "9.1", source=f"text = {os.urandom(1_000_000).hex()!r}")
    with link_to(host, python) as link:
        link.connect()
        assert install(link, plan_of(wheel))[0].is_new
    assert not list(Path("/tmp").glob(f"{STAGING_PREFIX}*/rankdeck-9.1*"))


def test_pip_ends_its_work_when_the_connection_breaks(host: Host, python: str, tmp_path: Path) -> None:
    staging = host.directory / "tmp"
    staging.mkdir()
    configure(host, f"SetEnv TMPDIR={staging}")
    plan = plan_of(write_wheel(tmp_path, "rankdeck", "9.1"))
    with link_to(host, python) as link, ThreadPoolExecutor(1) as pool, held_up(python, tmp_path):
        going = pool.submit(install, link, plan)
        until(lambda: any("pip" in words and "install" in words for words in commands_on(host)), 30, "pip runs")
        assert [path.stat().st_mode & 0o777 for path in staging.glob(f"{STAGING_PREFIX}*")] == [0o700]
        host.drop_sessions()
        with pytest.raises(HostUnreachableError):
            going.result(30)

    until(lambda: host.processes() == [], 30, "pip has ended")
    assert (site_packages(python) / "deck.py").exists()
    assert list(staging.iterdir()) == []


@contextlib.contextmanager
def held_up(python: str, tmp_path: Path) -> Iterator[None]:
    """Keep `pip install` of a Python from getting on for as long as the block runs."""
    gate, hook = tmp_path / "gate", site_packages(python) / "held_up.pth"
    os.mkfifo(gate)
    hook.write_text(f"import sys; 'pip' in sys.orig_argv and 'install' in sys.orig_argv and open({str(gate)!r}).read()")
    holder = os.open(gate, os.O_RDWR)  # whoever reads waits until nobody may write any more
    try:
        yield
    finally:
        hook.unlink()
        gate.unlink()  # whoever comes too late finds none to wait at
        os.close(holder)


def commands_on(host: Host) -> list[list[str]]:
    """Return the command lines of what runs there."""
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.cmdline())
    return found


@pytest.fixture
def refused(host: Host, tmp_path: Path) -> Callable[..., AppError]:
    """Install on h1 in vain; return what was said."""
    staging = host.directory / "tmp"
    staging.mkdir()
    configure(host, f"SetEnv TMPDIR={staging}")
    wheel = write_wheel(tmp_path, "rankdeck", "9.1", ("needed", "more[x]>=1"))

    def install_on(python: str, wheelhouse: Path | None = None, venv: str = "") -> AppError:
        with link_to(host, python) as link, contextlib.ExitStack() as caught:
            error = caught.enter_context(pytest.raises(AppError))
            install(link, plan_of(wheel, wheelhouse, venv))
        assert list(staging.iterdir()) == []
        assert "\x1b" not in error.value.whole
        assert "\n" not in error.value.whole
        return error.value

    return install_on


def test_a_python_that_will_not_do_is_said_with_what_to_do(host: Host, refused: Callable[..., AppError]) -> None:
    home = host.home
    assert refused("/no/python").whole == "h1: /no/python does not run there (name one: --python)"
    old = script(home / "old", 'echo \'{"version": [3, 9, 2], "executable": "old"}\'')
    assert refused(old).whole == f"h1: {old} is Python 3.9.2, older than 3.11 (name a newer one: --python)"
    older = script(home / "older", "echo 'SyntaxError: future feature annotations is not defined' >&2; exit 1")
    assert refused(older).whole == f"h1: {older} is older than Python 3.11 (name a newer one: --python)"
    odd_answers = ("echo 'hello \033[2J'", "exit 3", "echo '{\"version\": [3, 12]}'", "echo '{}'", "echo 1")
    for number, text in enumerate(odd_answers):
        odd = refused(script(home / f"odd{number}", text))
        assert isinstance(odd, HostUnreachableError)
        assert "does not do as asked" in odd.whole
    managed = '{"version": [3, 12, 2], "executable": "p", "is_managed": true, "free_bytes": 1}'
    error = refused(script(home / "managed", f"echo '{managed}'"))
    assert isinstance(error, NotInstalledError)
    assert "PEP 668" in error.whole
    assert "--venv '~/rankdeck'" in error.hint

    without_pip = bare_venv(home / "without-pip", "--without-pip")
    hint = f"there: {without_pip} -m ensurepip, or apt install python3-pip"
    assert refused(without_pip).whole == f"h1: {without_pip} has no pip ({hint})"
    (home / "papers").mkdir()
    (home / "papers/thesis.tex").touch()
    error = refused(sys.executable, venv="~/papers")
    assert error.whole == f"h1: {home}/papers is not empty, and no venv (name another directory: --venv)"


def test_what_keeps_pip_from_installing_is_said_and_nothing_is_left(
    host: Host, refused: Callable[..., AppError], python: str, tmp_path: Path
) -> None:
    house = tmp_path / "house"
    write_wheel(house, "needed", "1")
    error = refused(python, house)
    assert str(error).startswith(f"h1: {house} has no wheel for Python 3.{sys.version_info.minor} on ")
    assert str(error).endswith(" of more")
    write_wheel(house, "more", "0.5")
    assert str(refused(python, house)) == f"h1: {house} has no more[x]>=1 that fits that Python"
    error = refused(python)
    assert str(error) == "h1: pip there reaches no package index"
    assert error.hint.endswith("python3 -m pip wheel -w DIR PATH_OF_CLONE; rankdeck install h1 --wheelhouse DIR")

    place = site_packages(python) / "rankdeck-9.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: rankdeck\nVersion: 9\n")
    (place / "direct_url.json").write_text('{"url": "file:///src/deck", "dir_info": {"editable": true}}')
    assert "is the checkout /src/deck (pip install -e), which is left alone" in str(refused(python))
    shutil.rmtree(place)

    host.exec("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(host.directory / "tmp"))
    large = tmp_path / "large"
    write_wheel(large, "needed", "1", source="x" * 1_000_000)
    write_wheel(large, "more", "1")
    error = refused(python, large)
    assert "are needed there, 64 KiB are free" in str(error)
    assert error.hint.startswith("make room")
