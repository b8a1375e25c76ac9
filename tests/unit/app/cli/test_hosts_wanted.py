"""Which hosts a command is about, as it names them and as the inventory does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from app.cli import control, hosts
from app.cli.chosen_hosts import HostsWanted, _print_unreachable
from app.cli.inventory_file import named_hosts
from app.cli.main import rankdeck
from app.errors import AppError, HostUnreachableError, NoAgentError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "".join(f'[[node]]\nhost = "{host}"\n' for host in ("gpu1", "gpu2", "cpu1"))
    (tmp_path / "rankdeck.toml").write_text(nodes)
    monkeypatch.chdir(tmp_path)


def wanted(names: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> HostsWanted:
    return HostsWanted(named_hosts(names, exclude), "", bool(names), names, exclude, "python3", "", "")


def test_where_no_inventory_names_a_host_it_is_this_machine(tmp_path: Path) -> None:
    (tmp_path / "rankdeck.toml").unlink()

    assert wanted().names == ["localhost"]
    with pytest.raises(UsageError, match="there is no inventory to choose hosts from"):
        wanted(exclude=("gpu1",))


def test_a_job_is_of_the_hosts_that_it_names_unless_others_are_named() -> None:
    assert wanted().narrowed(()).names == ["gpu1", "gpu2", "cpu1"]
    assert wanted().narrowed(("gpu*",)).names == ["gpu1", "gpu2"]
    assert wanted().narrowed(("gpu*",)).typed == "--host 'gpu*'"
    assert wanted().narrowed(("gpu*",)).include == ("gpu*",)
    assert wanted(("cpu1",)).narrowed(("gpu*",)).names == ["cpu1"]


def test_a_host_of_a_job_can_be_left_out() -> None:
    assert wanted(exclude=("gpu2",)).narrowed(("gpu1", "gpu2")).names == ["gpu1"]
    with pytest.raises(UsageError, match="no host of the inventory is left"):
        wanted(exclude=("gpu*",)).narrowed(("gpu1", "gpu2"))


def test_a_pattern_of_a_job_that_matches_no_host_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="'tpu1' matches no host of the inventory"):
        wanted().narrowed(("tpu1",))


def test_directories_are_the_command_s_or_each_host_s_own() -> None:
    assert {entry.workdir for entry in wanted().with_workdirs("~/p").entries} == {"~/p"}
    assert {entry.workdir for entry in wanted().with_workdirs("").entries} == {"~"}


def test_where_no_host_has_an_agent_one_line_says_what_starts_them(capsys: pytest.CaptureFixture[str]) -> None:
    away: dict[str, AppError] = {
        name: NoAgentError(name, "nothing is known of jobs there", "up") for name in wanted().names
    }

    with pytest.raises(AppError) as caught:
        _print_unreachable(away, wanted(), is_in_the_way=True)

    assert caught.value.whole == (
        "no agent runs on gpu1, gpu2 and cpu1: nothing is known of jobs there (start them: rankdeck up)"
    )
    assert (caught.value.exit_code, capsys.readouterr().err) == (3, "")


def test_where_hosts_are_away_for_several_reasons_each_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    away = {
        "gpu1": NoAgentError("gpu1", "nothing is known of jobs there"),
        "gpu2": HostUnreachableError("gpu2", "no route"),
    }

    with pytest.raises(AppError, match="2 of 3 hosts cannot take part"):
        _print_unreachable(away, wanted(), is_in_the_way=True)

    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "has_inventory", "is_told"),
    [("", False, True), ("--host localhost", False, False), ("--no-config", False, False), ("", True, False)],
)
def test_without_an_agent_here_the_hint_says_that_no_inventory_named_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, *, has_inventory: bool, is_told: bool
) -> None:
    def find_none(*_: object, **__: object) -> None:
        raise NoAgentError("localhost", "nothing is known of jobs there", "rankdeck up localhost")

    monkeypatch.setattr(hosts, "reached", find_none)
    if not has_inventory:
        (tmp_path / "rankdeck.toml").unlink()

    error = CliRunner().invoke(rankdeck, ["status", *words.split()], standalone_mode=False).exception

    assert isinstance(error, NoAgentError)
    told = "; no rankdeck.toml here or above names a host, --host does" if is_told else ""
    assert error.hint == f"rankdeck up localhost{told}"


@pytest.mark.parametrize("verb", ["stop", "kill", "restart", "fault freeze --rank 1"])
@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_who_would_act_on_a_job_where_no_inventory_is_reads_where_to_do_it_and_starts_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, *, is_elsewhere: bool
) -> None:
    def find_none(*_: object, **__: object) -> None:
        raise NoAgentError("localhost", "nothing is known of jobs there", "rankdeck up localhost")

    monkeypatch.setattr(control, "reached", find_none)
    if is_elsewhere:
        (tmp_path / "rankdeck.toml").unlink()

    error = CliRunner().invoke(rankdeck, verb.split(), standalone_mode=False).exception

    assert isinstance(error, NoAgentError)
    where = (
        "no rankdeck.toml here or above names a host: run this where one does, or name the hosts of the job by --host"
    )
    assert error.hint == (where if is_elsewhere else "rankdeck up localhost")
