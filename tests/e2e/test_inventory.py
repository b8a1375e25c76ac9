"""`rankdeck init` writes what it finds, after asking; `up` and `down` reach every host of it, whatever one does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.inventory.inventory import HostEntry, read_inventory
from tests.support.commands import run_rankdeck
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import Network

HOSTS = ("h1", "h2", "h3")
SSH_CONFIG = "Host gpu1 gpu2 login\n  User me\nHost *\n  Port 22\n"
HOSTFILE = "gpu1 slots=8\ngpu2 slots=4\n"


class Shell:
    """A directory in which a person calls the command."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.directory = directory
        self._environ = {**os.environ, "HOME": str(directory), **environ}
        for name in ("RANKDECK_CONFIG", "XDG_CONFIG_HOME", "SLURM_JOB_NODELIST"):
            if name not in environ:
                self._environ.pop(name, None)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return run_rankdeck(*arguments, cwd=self.directory, environ=self._environ)

    @property
    def hosts(self) -> list[HostEntry]:
        text = (self.directory / "rankdeck.toml").read_text()
        return list(read_inventory(text, "rankdeck.toml").hosts)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose name leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(SSH_CONFIG)
    (tmp_path / "hosts").write_text(HOSTFILE)
    return Shell(tmp_path)


def test_nothing_is_written_unasked(shell: Shell) -> None:
    code, stdout, stderr = shell.run("init")

    assert (code, 'host = "gpu1"' in stdout) == (2, True)
    assert stderr == "rankdeck: nothing was written (--yes writes without asking)\n"
    assert not (shell.directory / "rankdeck.toml").exists()


def test_hosts_come_from_the_configuration_of_ssh(shell: Shell) -> None:
    code, stdout, stderr = shell.run("init", "--yes", "--exclude", "log*", "--name", "lab")

    assert code == 0
    assert f"after: export RANKDECK_SSH_CONFIG={shell.directory}/.ssh/config\n" in stderr, "ssh itself ignores HOME"
    assert "rankdeck.toml is written; name there the python that has torch, and the workdir" in stderr
    assert shell.hosts == [HostEntry("gpu1"), HostEntry("gpu2")]
    assert (shell.directory / "rankdeck.toml").read_text() == stdout
    code, _, stderr = shell.run("init", "--yes")
    assert (code, "rankdeck.toml describes a cluster already" in stderr) == (2, True)


def test_hosts_come_from_another_configuration_of_ssh_that_is_named(shell: Shell) -> None:
    (shell.directory / "lab").write_text("Host lab1 lab2\n")
    code, _, stderr = shell.run("init", "--yes", "--ssh-config", "lab")

    assert (code, shell.hosts) == (0, [HostEntry("lab1"), HostEntry("lab2")])
    assert (
        f"the other commands read that file, too, after: export RANKDECK_SSH_CONFIG={shell.directory}/lab\n" in stderr
    )
    code, _, stderr = shell.run("init", "--ssh-config", "lab", "--hostfile", "hosts")
    assert (code, "--ssh-config and hosts of a hostfile do not fit together" in stderr) == (2, True)


def test_without_any_host_the_line_names_what_can_be_given(shell: Shell) -> None:
    (shell.directory / ".ssh/config").unlink()
    code, _, stderr = shell.run("init")

    assert code == 2
    assert "~/.ssh/config names no host" in stderr
    assert "--ssh-config FILE or --hostfile FILE, or export RANKDECK_SSH_CONFIG=FILE" in stderr


def test_hosts_come_from_a_hostfile_and_settings_stay(shell: Shell) -> None:
    (shell.directory / "rankdeck.toml").write_text('[console]\ntheme = "light"\n')
    code, _, _ = shell.run("init", "--yes", "--hostfile", "hosts", "--include", "gpu2")

    assert (code, shell.hosts) == (0, [HostEntry("gpu2", 4)])
    assert (shell.directory / "rankdeck.toml").read_text().startswith('[console]\ntheme = "light"\n')
    assert json.loads(shell.run("config", "--json")[1])["schema"] == 1


def test_hosts_come_from_the_slurm_allocation_of_the_shell(shell: Shell) -> None:
    tools = shell.directory / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames -- n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tools / "scontrol").chmod(0o700)
    inside = Shell(
        shell.directory,
        PATH=f"{tools}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_TASKS_PER_NODE="8(x2)",
    )

    assert inside.run("init", "--yes")[0] == 0
    assert shell.hosts == [HostEntry("n1", 8), HostEntry("n2", 8)]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("init", "--hostfile", "none"), 2, "none cannot be read: No such file"),
        (("init", "--from", "ssh", "--hostfile", "hosts"), 2, "do not fit together"),
        (("init", "--from", "slurm"), 2, "in no Slurm allocation"),
        (("init", "--include", "tpu*"), 2, "'tpu*' matches no host of the inventory"),
        (("init", "--yes", "--output", "no/where.toml"), 2, "cannot be written: No such file"),
        (("up", "--exclude", "a"), 2, "no inventory to choose hosts from (name a host, or write one: rankdeck init)"),
        (("up", "$(reboot)"), 2, "'$(reboot)' is not a host"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(shell: Shell, arguments: tuple[str, ...], code: int, told: str) -> None:
    got, _, stderr = shell.run(*arguments)

    assert (got, len(stderr.splitlines())) == (code, 1)
    assert told in stderr


def test_a_wrong_inventory_is_said_with_its_line(shell: Shell) -> None:
    (shell.directory / "rankdeck.toml").write_text('[[node]]\nhost = "a"\nnpro = 2\n')
    code, _, stderr = shell.run("up")

    assert code == 2
    assert "rankdeck.toml:3: npro: no such key of node; the nearest is nproc" in stderr


def test_alone_it_says_what_to_type_first_and_for_hosts_without_agents_what_starts_them(
    shell: Shell, short_dir: Path
) -> None:
    shell = Shell(shell.directory, XDG_STATE_HOME=str(short_dir))
    code, stdout, stderr = shell.run()
    assert (code, len(stdout.splitlines()), stderr) == (0, 10, "")

    (shell.directory / "rankdeck.toml").write_text('[[node]]\nhost = "localhost"\n')
    code, stdout, stderr = shell.run()
    assert (code, stdout) == (3, "")
    # Ranks that other tests have started may be offered before.
    assert "nothing is known of jobs there (" in stderr
    assert stderr.endswith("rankdeck up localhost)\n")

    (shell.directory / "rankdeck.toml").write_text("[[node]\n")
    code, stdout, stderr = shell.run()
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)


def test_a_program_runs_with_the_ranks_and_where_the_inventory_says(tmp_path: Path, short_dir: Path) -> None:
    shell = Shell(tmp_path, XDG_STATE_HOME=str(short_dir))
    work = shell.directory / "work"
    work.mkdir()
    (work / "where.py").write_text("import os; open(f'{os.getcwd()}/rank-' + os.environ['RANK'], 'w')")
    (shell.directory / "rankdeck.toml").write_text(f'[[node]]\nhost = "localhost"\nnproc = 2\nworkdir = "{work}"\n')
    try:
        assert shell.run("up", "localhost")[0] == 0
        code, stdout, _ = shell.run("run", "--host", "localhost", "--json", "--", "where.py")
        assert (code, json.loads(stdout)["job"]["world_size"]) == (0, 2)
        assert sorted(path.name for path in work.glob("rank-*")) == ["rank-0", "rank-1"]
        code, stdout, stderr = shell.run()
        assert (code, f"rankdeck: the hosts are those of {shell.directory}/rankdeck.toml" in stderr) == (0, True)
        assert "where-" in stdout, "alone it attaches to the job of the inventory's hosts; without a terminal in lines"

        (shell.directory / "rankdeck.toml").write_text("[[node]]\n")
        assert shell.run("status", "--host", "localhost")[0] == 2
        assert shell.run("status", "--host", "localhost", "--no-config")[0] == 0
        command = ("run", "--host", "localhost", "--no-config", "--nproc-per-node", "1", "--workdir", "work", "--json")
        code, stdout, _ = shell.run(*command, "--", "where.py")
        assert (code, json.loads(stdout)["job"]["world_size"]) == (0, 1)
    finally:
        (shell.directory / "rankdeck.toml").unlink()
        shell.run("down", "localhost", "--kill-jobs")


def test_an_inventory_that_others_may_write_runs_nothing(shell: Shell) -> None:
    python = shell.directory / "python"
    python.write_text(f"#!/bin/sh\ntouch {shell.directory}/has-run\n")
    python.chmod(0o700)
    path = shell.directory / "rankdeck.toml"
    path.write_text(f'[cluster]\npython = "{python}"\n[[node]]\nhost = "localhost"\n')
    path.chmod(0o666)
    for arguments in (("up",), ("status", "--host", "localhost")):
        code, _, stderr = shell.run(*arguments)
        assert (code, "names hosts, and somebody else may write it" in stderr) == (2, True)
    assert not (shell.directory / "has-run").exists()

    path.chmod(0o600)
    assert shell.run("status", "--host", "localhost")[0] == 5, "that Python says nothing that an agent says"
    assert (shell.directory / "has-run").exists()


@pytest.mark.parametrize("before", ['[cluster]\npython = "python3"\n', "node = []\n"])
def test_a_file_that_tells_of_a_cluster_is_left_alone(shell: Shell, before: str) -> None:
    (shell.directory / "rankdeck.toml").write_text(before)
    code, _, stderr = shell.run("init", "--yes")

    assert (code, "rankdeck.toml describes a cluster already" in stderr) == (2, True)
    assert (shell.directory / "rankdeck.toml").read_text() == before


@pytest.mark.parametrize("name", ["  ", "a\nb", "\udcff"])
def test_what_would_not_be_read_back_is_not_written(shell: Shell, name: str) -> None:
    code, _, stderr = shell.run("init", "--yes", "--name", name)

    assert (code, stderr.startswith("rankdeck: ")) == (2, True)
    assert [path.name for path in shell.directory.iterdir() if "rankdeck" in path.name] == []


def test_a_link_stays_one_and_keeps_its_mode(shell: Shell) -> None:
    (shell.directory / "real.toml").write_text("[console]\n")
    (shell.directory / "real.toml").chmod(0o600)
    (shell.directory / "rankdeck.toml").symlink_to("real.toml")

    assert shell.run("init", "--yes")[0] == 0
    assert (shell.directory / "rankdeck.toml").is_symlink()
    assert (shell.directory / "real.toml").stat().st_mode & 0o777 == 0o600
    assert [entry.host for entry in shell.hosts] == ["gpu1", "gpu2", "login"]


def test_agents_of_all_hosts_come_up_and_go_down_and_one_that_cannot_stops_no_other(
    network: Network, tmp_path: Path
) -> None:
    shell = Shell(
        tmp_path,
        RANKDECK_PYTHON=sys.executable,
        RANKDECK_SSH_CONFIG=str(network.ssh_config),
        XDG_RUNTIME_DIR=str(network.directory),
    )
    assert shell.run("init", "--yes")[0] == 0
    assert [entry.host for entry in shell.hosts] == ["h1", "h2", "h3"]
    network["h2"].stop_sshd()

    code, stdout, stderr = shell.run("up")

    assert code == 3
    assert [line.split(" (")[0] for line in stdout.splitlines()] == ["the agent on h1 is up", "the agent on h3 is up"]
    assert "h2: " in stderr
    assert "refuses connections" in stderr
    code, stdout, _ = shell.run("down", "--json", "--exclude", "h2")
    ended = {"had_agent": True, "num_jobs_left": 0, "num_jobs_ended": 0}
    assert (code, json.loads(stdout)) == (
        0,
        {
            "schema": 1,
            "hosts": [{"host": host, "error": None, "hint": "", **ended} for host in ("h1", "h3")],
        },
    )
    code, stdout, stderr = shell.run("down", "--json")
    assert code == 3
    assert [bool(row["error"]) for row in json.loads(stdout)["hosts"]] == [False, True, False]
    for host in network.hosts.values():
        until(lambda host=host: host.processes() == [], 60, "nothing runs on the host")  # type: ignore[misc]
