"""A line behind `rankdeck run`, typed as behind torchrun: whose the options are, and on which hosts it runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import click
import pytest
from click.testing import CliRunner

from agent.wire.commands import Status, encode_reply
from app.cli import chosen_hosts
from app.cli import run as run_command
from app.cli.main import rankdeck
from app.errors import AgentRefusedError, HostsBusyError, UsageError
from app.fleet.agent_link import AgentPlace
from app.fleet.local_link import LocalLink
from app.inventory.inventory import HostEntry
from app.session.options import SessionOptions
from app.session.remote_job import RunRequest
from tests.support.node_reports import job_status, node_report
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.cli.chosen_hosts import HostsWanted
    from app.fleet.agent_link import AgentLink
    from app.session.hosts import Hosts
    from app.session.remote_session import RemoteSession

Started = tuple[list[str], tuple[str, ...], int | str | None]


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
        found.append((wanted.names, request.command, request.nproc or request.num_ranks))

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
        (["--nproc-per-node=gpu", "--nnodes", "1", "t.py"], ["localhost"], ("t.py",), "gpu"),
        (["--nproc_per_node", "auto", "--nnodes=1:1", "--max_restarts=2", "t.py"], ["localhost"], ("t.py",), "auto"),
        (["--host", "a", "--host", "b", "t.py", "--", "c"], ["a", "b"], ("t.py", "--", "c"), None),
    ],
)
def test_what_follows_the_program_is_the_program_s(
    started: list[Started],
    arguments: list[str],
    hosts: list[str],
    command: tuple[str, ...],
    num_ranks: int | str | None,
) -> None:
    run(*arguments)

    assert started == [(hosts, command, num_ranks)]


@pytest.mark.parametrize(
    ("typed", "gets", "meant"),
    [
        ("train.py --detach", "train.py gets --detach", "--detach train.py"),
        (
            "train.py --steps 300 --nproc-per-node 2",
            "train.py gets --nproc-per-node 2",
            "--nproc-per-node 2 train.py --steps 300",
        ),
        (
            "--host a -- train.py 'a b' --host gpu2 --headless c",
            "train.py gets --host gpu2, --headless",
            "--host a --host gpu2 --headless train.py 'a b' c",
        ),
        ("--host a -mpkg.train --detach --lr 1", "pkg.train gets --detach", "--host a --detach -m pkg.train --lr 1"),
        (
            "--host a -m pkg.train --max_restarts=3 --standalone --lr 1 --host",
            "pkg.train gets --max_restarts=3, --standalone, --host",
            "",
        ),
        ("--host a train.py --hosts 3 --epochs 2 host", "", ""),
    ],
)
def test_options_of_rankdeck_behind_the_program_are_the_program_s_and_noted_with_the_line_that_is_meant(
    directory: Path, started: list[Started], typed: str, gets: str, meant: str
) -> None:
    (directory / "rankdeck.toml").write_text('[[node]]\nhost = "gpu1"\n')
    line = f": rankdeck run {meant}" if meant else ""
    note = f"rankdeck: {gets}; rankdeck's own options come before the program{line}\n" if gets else ""

    assert (run(*shlex.split(typed)), len(started)) == (note, 1)


def test_a_name_that_the_inventory_does_not_have_may_be_that_of_a_job_that_has_run(directory: Path) -> None:
    (directory / "rankdeck.toml").write_text('[[node]]\nhost = "gpu1"\n[job.gpt]\ncommand = ["train.py"]\n')
    with pytest.raises(
        UsageError, match=r"rankdeck\.toml has no job gtp; those there: gpt; the nearest is gpt"
    ) as found:
        CliRunner().invoke(rankdeck, ["start", "gtp"], catch_exceptions=False, standalone_mode=False)

    assert found.value.hint == "write [job.gtp] with its command; one that has run before: rankdeck restart gtp"


def test_without_an_inventory_it_runs_on_this_machine_and_says_so(directory: Path, started: list[Started]) -> None:
    assert run("train.py") == "rankdeck: on this machine (no rankdeck.toml names a host; --host does)\n"

    (directory / "rankdeck.toml").write_text('[[node]]\nhost = "gpu1"\n')
    assert run("train.py") == ""
    run("--no-config", "train.py")

    assert [hosts for hosts, _, _ in started] == [["localhost"], ["gpu1"], ["localhost"]]


def test_who_interrupts_before_the_start_reads_that_no_job_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chosen_hosts, "reached", interrupt)

    result = CliRunner().invoke(rankdeck, ["run", "--detach", "train.py"], standalone_mode=False)

    assert isinstance(result.exception, click.Abort)
    assert result.stderr.splitlines()[1] == "rankdeck: no job was started"


def test_who_starts_a_job_and_leaves_reads_its_name_and_then_what_to_type_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(_session: object) -> None:
        """It starts."""

    monkeypatch.setattr(run_command, "_start", start)
    session = SimpleNamespace(farewell=lambda: "rankdeck: job gpt goes on; watch it: rankdeck attach gpt")

    @click.command()
    def leave() -> None:
        run_command._start_and_leave(session, SimpleNamespace(names=["h1"]), "gpt", is_json=False)  # type: ignore[arg-type]

    assert CliRunner().invoke(leave).output.splitlines() == ["gpt", session.farewell()]


@pytest.mark.parametrize("option", ["--nnodes", "--rdzv_endpoint", "--rdzv-id", "--tee", "--log_dir", "--no-python"])
def test_an_option_of_torchrun_is_refused_with_what_to_write_instead(started: list[Started], option: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(option, "2", "train.py")

    assert refused.value.whole.startswith(f"{option} is an option of torchrun, not of rankdeck (")
    assert started == []


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        *((option, "--nproc-per-node N") for option in ("--ranks", "-n", "--nproc", "--gpus", "--num_processes")),
        *((option, "--host gpu1 --host gpu2") for option in ("-H", "--hosts", "--nodes")),
        ("--hostfile", "rankdeck init --hostfile FILE"),
    ],
)
def test_another_launcher_s_option_names_ours(started: list[Started], option: str, ours: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(option, "4", "train.py")

    assert refused.value.whole.startswith(f"there is no {option} here (")
    assert ours in refused.value.whole
    assert started == []


@pytest.mark.parametrize("option", ["--headless", "--json", "--detach"])
def test_who_wants_no_console_of_exec_reads_that_it_opens_none(option: str) -> None:
    with pytest.raises(UsageError) as refused:
        rankdeck.main(["exec", option, "--", "torchrun", "t.py"], standalone_mode=False)

    whole = f"there is no {option} here (exec opens no console; rankdeck attach --headless follows)"
    assert refused.value.whole == whole


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("torchrun --nproc-per-node 2 train.py", "leave torchrun out: rankdeck run --nproc-per-node 2 train.py"),
        ("python3 -u train.py", "leave python3 -u out: rankdeck run train.py"),
        ("python -m torch.distributed.run t.py", "leave python -m torch.distributed.run out: rankdeck run t.py"),
        ("-m torch.distributed.launch t.py", "leave -m torch.distributed.launch out: rankdeck run t.py"),
        ("/usr/bin/python -m pkg.train", "leave /usr/bin/python out: rankdeck run -m pkg.train"),
        ("torchrun", "leave torchrun out: rankdeck run train.py"),
    ],
)
def test_what_rankdeck_starts_itself_is_to_be_left_out(started: list[Started], typed: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(*typed.split())

    assert (str(refused.value), started) == (line, [])


@pytest.mark.parametrize(
    ("typed", "reason", "hint"),
    [
        ("--host a --workdir {home}/my/proj t.py", "no_script", "expanded it; quote it: --workdir '~/my/proj'"),
        ("--host a --workdir {home} t.py", "no_workdir", "expanded it; quote it: --workdir '~'"),
        ("--host a b c t.py", "no_script", "if b is a host: --host b, one --host for each"),
        ("--host a b -m pkg.t", "no_script", "if b is a host: --host b, one --host for each"),
        ("--host a --workdir {home}/my/proj t.py", "no_space", ""),
        ("--host a --workdir {home}er t.py", "no_script", "--workdir names another directory there"),
        ("--host localhost --workdir {home}/proj t.py", "no_script", "--workdir names another directory there"),
        ("--host a t.py u.py", "no_script", "--workdir names another directory there"),
        ("b t.py", "no_script", "--workdir names another directory there"),
    ],
)
def test_a_host_that_lacks_the_program_hints_at_what_was_typed_amiss(
    directory: Path, monkeypatch: pytest.MonkeyPatch, typed: str, reason: str, hint: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        error = AgentRefusedError("a", reason, "t.py is not a file")
        error.hint += "; n0: prepared, taken back"
        raise error

    monkeypatch.setattr(run_command, "_start_and_watch", refuse)

    with pytest.raises(AgentRefusedError) as refused:
        run(*typed.format(home=directory).split())

    slip, semicolon, others = refused.value.hint.partition("; n0: prepared")
    assert (slip.endswith(hint), bool(slip), semicolon + others) == (True, bool(hint), "; n0: prepared, taken back")


@pytest.mark.parametrize(
    ("typed", "new", "farewell", "hint"),
    [
        ("", ["localhost"], "", "the agent on localhost, and leaves it running: rankdeck down"),
        (
            "--host a --host b --host c --python /v/python",
            ["c", "a"],
            "",
            "the agent on a and c, and leaves it running: rankdeck down a c --python /v/python",
        ),
        ("--host a", [], "", ""),
        ("--host a", ["a"], "rankdeck: job t may run", ""),
    ],
)
def test_who_is_refused_reads_which_agents_the_command_has_started_and_how_to_end_them(
    monkeypatch: pytest.MonkeyPatch, typed: str, new: list[str], farewell: str, hint: str
) -> None:
    @contextlib.contextmanager
    def looked_at(_wanted: HostsWanted, job: chosen_hosts.Watch) -> Iterator[Hosts]:
        for name in [*new, "old"]:
            place = AgentPlace(True, "/s", "/p", "/h", 6, pid=7, is_new=name != "old")
            job.then(cast("AgentLink", SimpleNamespace(host=name, bring_up=lambda place=place: place)))
        yield cast("Hosts", SimpleNamespace(links=[]))

    def refuse(session: RemoteSession, *_: object, **__: object) -> None:
        assert session.farewell() == farewell
        raise AgentRefusedError("b", "no_space", "the disk is full")

    monkeypatch.setattr(run_command, "looked_at", looked_at)
    monkeypatch.setattr(run_command, "_start_and_leave", refuse)
    monkeypatch.setattr(run_command, "RemoteSession", lambda *_: SimpleNamespace(farewell=lambda: farewell))

    with pytest.raises(AgentRefusedError) as refused:
        run("--detach", *typed.split(), "t.py")

    assert refused.value.hint.removeprefix("this command has started ") == hint


def test_where_the_home_here_is_the_root_no_path_is_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = cast("HostsWanted", SimpleNamespace(names=["a"], is_named=True))
    assert "'~/tmp'" in run_command._slip(wanted, os.path.expanduser("~/tmp"), ("t.py",))  # noqa: PTH111
    monkeypatch.setenv("HOME", "/")
    assert run_command._slip(wanted, "/tmp", ("t.py",)) == ""


@pytest.mark.parametrize("value", ["two", "0", "-1", "cpus"])
def test_a_number_of_ranks_is_a_number_or_a_word_of_torchrun(started: list[Started], value: str) -> None:
    with pytest.raises(click.BadParameter):
        run("--nproc-per-node", value, "train.py")

    assert started == []


@pytest.mark.parametrize("is_new", [False, True])
def test_a_program_has_the_variables_of_the_shell_that_starts_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_new: bool
) -> None:
    of_agent = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "SAME": "a=b"}
    agent = subprocess.Popen(["sleep", "60"], env=of_agent)
    try:
        until(Path(f"/proc/{agent.pid}/environ").read_bytes, 10, "the kernel has put its variables in place")
        for name, value in {
            "CUDA_VISIBLE_DEVICES": "1",
            "SAME": "a=b",
            "LR": "3e-4",
            "SHLVL": "9",
            "RANK": "7",
        }.items():
            monkeypatch.setenv(name, value)
        link = LocalLink()
        link.place = AgentPlace(True, "/s", "/p", "/h", 6, pid=agent.pid, is_new=is_new)
        request = RunRequest(("train.py",), "gpt", python="venv/bin/python", env=(("LR", "1"),))

        asked = run_command._of_this_shell(request, link)
    finally:
        agent.kill()
        agent.wait()

    assert asked.python == str(directory / "venv/bin/python")
    assert dict(asked.env) == ({} if is_new else {"CUDA_VISIBLE_DEVICES": "1"}) | {"LR": "1"}
    told = "started from another shell; the job gets from this one: CUDA_VISIBLE_DEVICES"
    assert (told in capsys.readouterr().err) is not is_new


@pytest.mark.parametrize(("num_hosts", "is_changed"), [(1, True), (2, False)])
def test_a_job_over_several_hosts_takes_nothing_of_this_shell(
    monkeypatch: pytest.MonkeyPatch, num_hosts: int, *, is_changed: bool
) -> None:
    started: list[RunRequest] = []
    monkeypatch.setattr(run_command, "RemoteSession", lambda _, request, __: started.append(request))
    request = RunRequest(("train.py",), "gpt", python="venv/bin/python")
    run_command._session(request, SessionOptions(), [], cast("Hosts", SimpleNamespace(links=[LocalLink()] * num_hosts)))

    assert (started != [request]) is is_changed


def test_what_cannot_be_sent_is_refused(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "caf\udce9")
    for words in (["--env", "ODD"], ["--workdir", "caf\udce9"], ["--job-python", "caf\udce9/python"]):
        with pytest.raises(UsageError, match="is not UTF-8"):
            run(*words, "train.py")

    assert started == []


class BusyLink:
    """A host on which another job runs, and which is not examined."""

    runs_programs = True

    def __init__(self, host: str) -> None:
        self.host = host
        self.verbs: list[str] = []

    def ask_verb(self, verb: str, *_arguments: str, answered: object = ()) -> bytes:
        self.verbs.append(verb)
        assert answered
        return encode_reply(Status(node_report(1, [job_status(job_id="other")], [])))


def test_hosts_on_which_another_job_runs_are_refused_before_they_are_examined() -> None:
    links, entries = [BusyLink("h1"), BusyLink("h2")], [HostEntry("h1"), HostEntry("h2")]
    request = RunRequest(("train.py",), "gpt")

    with pytest.raises(HostsBusyError, match=r"^job other runs on h1 and h2$"):
        run_command._look_first(cast("Hosts", SimpleNamespace(links=links, entries=entries)), request, lambda *_: None)

    assert [link.verbs for link in links] == [["status"], ["status"]]


@pytest.mark.parametrize("is_made", [False, True])
def test_a_recording_that_was_there_before_is_kept_where_hosts_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    recording = tmp_path / "kept.rd"
    recording.write_bytes(b"of another job")
    starts: list[bool] = []

    def start(_wanted: object, request: RunRequest, made: list[object], **_how: object) -> None:
        starts.append(request.is_beside)
        if not request.is_beside:
            made += ["a session"] * is_made
            raise HostsBusyError("job other runs on h1")

    monkeypatch.setattr(run_command, "_start_and_watch_alone", start)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    request = RunRequest(("train.py",), "gpt")
    run_command._start_and_watch(cast("HostsWanted", None), request, is_json=False, recording=recording)

    assert (starts, recording.exists()) == ([False, True], not is_made)


def test_help_names_the_jobs_that_a_start_asks_about() -> None:
    shown = " ".join(CliRunner().invoke(rankdeck, ["run", "--help"]).output.split())
    manual = " ".join(CliRunner().invoke(rankdeck, ["help", "cluster"]).output.split())

    assert "though other jobs of rankdeck run there" in shown
    assert "asks before a start beside another job of rankdeck" in manual
