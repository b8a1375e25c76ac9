"""A line behind `rankdeck run`, typed as behind torchrun: whose the options are, and on which hosts it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from app.cli import run as run_command
from app.cli.main import rankdeck
from app.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from app.cli.chosen_hosts import HostsWanted
    from app.session.remote_job import RunRequest

Started = tuple[list[str], tuple[str, ...], int | None]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RANKDECK_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What is started, instead of being so: hosts, command, ranks of each."""
    found: list[Started] = []

    def start(wanted: HostsWanted, request: RunRequest, **_: Any) -> None:
        found.append((wanted.names, request.command, request.num_ranks))

    monkeypatch.setattr(run_command, "_start_and_watch", start)
    return found


def run(*arguments: str) -> str:
    """Return what is said on stderr."""
    return CliRunner().invoke(rankdeck, ["run", *arguments], catch_exceptions=False, standalone_mode=False).stderr


@pytest.mark.parametrize(
    ("arguments", "hosts", "command", "num_ranks"),
    [
        (["train.py", "--epochs", "3"], ["localhost"], ("train.py", "--epochs", "3"), None),
        (["--", "train.py", "--host", "x"], ["localhost"], ("train.py", "--host", "x"), None),
        (["-m", "pkg.train", "--lr", "1"], ["localhost"], ("-m", "pkg.train", "--lr", "1"), None),
        (["--nproc-per-node", "2", "-mpkg.train", "-m"], ["localhost"], ("-m", "pkg.train", "-m"), 2),
        (["--standalone", "--nproc_per_node=2", "t.py", "-m", "3"], ["localhost"], ("t.py", "-m", "3"), 2),
        (["--host", "a", "--host", "b", "t.py", "--", "c"], ["a", "b"], ("t.py", "--", "c"), None),
    ],
)
def test_what_follows_the_program_is_the_program_s(
    started: list[Started], arguments: list[str], hosts: list[str], command: tuple[str, ...], num_ranks: int | None
) -> None:
    run(*arguments)

    assert started == [(hosts, command, num_ranks)]


def test_without_an_inventory_it_runs_on_this_machine_and_says_so(directory: Path, started: list[Started]) -> None:
    assert run("train.py") == "rankdeck: no inventory: localhost, this machine; --host names another one\n"

    (directory / "rankdeck.toml").write_text('[[node]]\nhost = "gpu1"\n')
    assert run("train.py") == ""
    run("--no-config", "train.py")

    assert [hosts for hosts, _, _ in started] == [["localhost"], ["gpu1"], ["localhost"]]


@pytest.mark.parametrize("option", ["--nnodes", "--rdzv_endpoint", "--rdzv-id", "--tee", "--log_dir", "--no-python"])
def test_an_option_of_torchrun_is_refused_with_what_to_write_instead(started: list[Started], option: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(option, "2", "train.py")

    assert refused.value.whole.startswith(f"{option} is an option of torchrun, not of rankdeck (")
    assert started == []
