"""Which hosts a command is about, as it names them and as the inventory does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.commands.hosts_of_a_job import HostsWanted
from app.commands.inventory_file import named_hosts
from app.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "".join(f'[[node]]\nhost = "{host}"\n' for host in ("gpu1", "gpu2", "cpu1"))
    (tmp_path / "rankdeck.toml").write_text(nodes)
    monkeypatch.chdir(tmp_path)


def wanted(names: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> HostsWanted:
    return HostsWanted(named_hosts(names, exclude), "", bool(names), names, exclude, "python3", "", "")


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
