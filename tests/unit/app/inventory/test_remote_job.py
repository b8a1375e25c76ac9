"""A job on one host, as a person asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from agent.wire.commands import Prepare, decode_command, encode_command
from agent.wire.jobs import JobSpec, JobState, JobStatus
from agent.wire.machine import GpuFigures, GpuReport, GpusReport, GpuWatchState
from agent.wire.reports import WIRE_VERSION, NodeReport
from app.errors import AgentRefusedError, HostsBusyError, UsageError
from app.fleet.agent_link import AgentPlace
from app.inventory.inventory import HostEntry
from app.inventory.program import check_command, check_job_id, make_job_id
from app.session.remote_job import (
    JobHost,
    RunRequest,
    check_metrics,
    check_room,
    ended_jobs,
    job_specs,
    node_of_rank,
    only_running_job,
)
from app.session.remote_session import RemoteSession

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACE = AgentPlace(ready=True, dir="/s", python="/opt/python", home="/home/ada", wire_version=WIRE_VERSION)


@pytest.mark.parametrize(
    ("command", "job_id"),
    [
        (("train.py", "--lr", "1"), "train-3f2a"),
        (("src/My Train_2.py",), "my-train-2-3f2a"),
        (("-m", "pkg.train", "x"), "train-3f2a"),
        (("-m",), "m-3f2a"),
        (("___.py",), "job-3f2a"),
        (("x" * 90 + ".py",), "x" * 40 + "-3f2a"),
    ],
)
def test_a_job_is_called_after_its_program(command: tuple[str, ...], job_id: str) -> None:
    assert make_job_id(command, "3f2a") == job_id
    assert check_job_id(job_id) == job_id


@pytest.mark.parametrize("job_id", ["", "A", "-a", "a/b", "a" * 65, "a\n"])
def test_what_cannot_be_a_name_is_refused(job_id: str) -> None:
    with pytest.raises(UsageError, match="cannot be a job's name"):
        check_job_id(job_id)


def test_an_argument_that_is_not_utf_8_is_refused() -> None:
    assert check_command(("train.py", "naïve")) == ("train.py", "naïve")
    with pytest.raises(UsageError, match="not UTF-8"):
        check_command(("train.py", "\udcff"))
    with pytest.raises(UsageError, match="-m names no module"):
        check_command(("-m",))


def spec_of(request: RunRequest, place: AgentPlace, node: NodeReport) -> JobSpec:
    """The share of the only host."""
    (spec,) = job_specs(request, [JobHost(HostEntry("h1"), place, node)]).values()
    return spec


def report(num_cpus: int, *gpus: GpuReport) -> NodeReport:
    """What a node says of itself."""
    watched = GpusReport(GpuWatchState.WATCHING, gpus=list(gpus))
    return NodeReport(1, "h1", "e", 1, "h1", 1, num_cpus, gpus=watched)


def test_a_job_is_the_only_node_s_and_meets_on_loopback() -> None:
    spec = spec_of(RunRequest(("train.py",), "t", workdir="~/project", python="~/venv/bin/python"), PLACE, report(8))

    assert (spec.num_nodes, spec.node_rank, spec.world_size, spec.local_world_size) == (1, 0, 4, 4)
    assert (spec.master_addr, spec.interface) == ("127.0.0.1", "")
    assert (spec.workdir, spec.python) == ("/home/ada/project", "/home/ada/venv/bin/python")
    assert decode_command(encode_command(Prepare(spec))) == Prepare(spec)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("", "/opt/python"), ("python3", "python3"), ("venv/bin/python", "/home/ada/venv/bin/python"), ("/p", "/p")],
)
def test_the_job_s_python_is_the_agent_s_own_unless_another_is_named(asked: str, found: str) -> None:
    assert spec_of(RunRequest(("train.py",), "t", python=asked), PLACE, report(1)).python == found


@pytest.mark.parametrize(
    ("workdir", "found"),
    [("~", "/home/ada"), ("/data", "/data"), ("sub/dir", "/home/ada/sub/dir"), ("sub", "/home/ada/sub")],
)
def test_a_workdir_is_seen_from_the_home_there(workdir: str, found: str) -> None:
    request = RunRequest(("train.py",), "t", workdir=workdir)

    assert spec_of(request, PLACE, report(1)).workdir == found


def test_there_is_a_rank_for_each_gpu_unless_another_number_is_asked_for() -> None:
    node = report(64, *[GpuReport(GpuFigures(index)) for index in range(3)])

    assert spec_of(RunRequest(("t.py",), "t"), PLACE, node).world_size == 3
    assert spec_of(RunRequest(("t.py",), "t", num_ranks=5), PLACE, node).world_size == 5
    assert spec_of(RunRequest(("t.py",), "t"), PLACE, report(1)).world_size == 1


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_ranks_share_gpus_only_when_that_is_asked_for(shares_gpus: bool) -> None:
    assert spec_of(RunRequest(("t.py",), "t", shares_gpus=shares_gpus), PLACE, report(1)).shares_gpus is shares_gpus


def test_a_hang_is_abandoned_only_on_request() -> None:
    assert spec_of(RunRequest(("t.py",), "t"), PLACE, report(1)).abandon_s == 0.0
    assert spec_of(RunRequest(("t.py",), "t", abandon_s=3600.0), PLACE, report(1)).abandon_s == 3600.0


def test_patterns_and_the_wish_for_no_probe_reach_the_job() -> None:
    request = RunRequest(("train.py",), "train-1", metrics=check_metrics((r"loss=(\S+)",)), is_probed=False)

    spec = spec_of(request, PLACE, report(4))

    assert (spec.metrics, spec.is_probed) == ([r"loss=(\S+)"], False)
    assert decode_command(encode_command(Prepare(spec))) == Prepare(spec)


@pytest.mark.parametrize("patterns", [("(x)",) * 9, ("x" * 513,), ("",)])
def test_too_many_or_too_long_patterns_are_refused_before_anything_travels(patterns: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="at most 8 patterns of at most 512 characters"):
        check_metrics(patterns)


@pytest.mark.parametrize("pattern", ["train_mse", r"mse \([0-9.]+\)", "(?:a|b) [0-9]+"])
def test_a_pattern_without_a_group_is_refused_before_anything_travels(pattern: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_metrics(("loss=([0-9.]+)", pattern))
    todo = f"put what is to be read in a group, as in '{pattern} ([0-9.]+)'"
    assert str(refused.value) == f"--metric '{pattern}' finds no value: {todo}"


@pytest.mark.parametrize("pattern", [r"\\(x)", "[(] (x)", "(?P<a>x)", "(?<a>x)", "("])
def test_a_pattern_that_may_have_a_group_is_the_agent_s_to_judge(pattern: str) -> None:
    assert check_metrics((pattern,)) == (pattern,)


def job_status(job_id: str, state: JobState) -> JobStatus:
    return JobStatus(job_id, 0, state, 1.0, 2, 1, 0, 0, 2)


def test_the_only_job_that_runs_need_not_be_named() -> None:
    ended, running = job_status("a", JobState.FAILED), job_status("b", JobState.RUNNING)

    def reports(*jobs: JobStatus) -> dict[str, NodeReport]:
        return {node: msgspec.structs.replace(report(2), jobs=list(jobs)) for node in ("h1", "h2")}

    prepared = job_status("left", JobState.PREPARED)
    assert only_running_job(reports(ended, running, prepared)) == "b"
    with pytest.raises(UsageError, match="no job runs on h1 and h2"):
        only_running_job(reports(ended, prepared))
    assert ended_jobs(reports(ended, running, prepared)) == ["a"]
    with pytest.raises(UsageError, match="no job runs on h1 and h2") as caught:
        only_running_job(reports(ended), where_none_runs="ended: a; rankdeck evidence a")
    assert caught.value.hint == "ended: a; rankdeck evidence a"
    with pytest.raises(UsageError, match="several jobs run on h1 and h2: b, c"):
        only_running_job(reports(running, job_status("c", JobState.STOPPING)))


def test_a_job_has_its_hosts_for_itself_unless_it_may_share_them() -> None:
    idle = report(2)
    busy = msgspec.structs.replace(idle, jobs=[job_status("a", JobState.FAILED), job_status("b", JobState.RUNNING)])

    check_room("t", {"h1": idle, "h2": idle}, is_beside=False)
    check_room("t", {"h1": idle, "h2": busy}, is_beside=True)
    check_room("b", {"h1": idle, "h2": busy}, is_beside=False)
    with pytest.raises(HostsBusyError, match=r"^job b runs on h2$") as caught:
        check_room("t", {"h1": idle, "h2": busy}, is_beside=False)
    assert caught.value.hint == "--beside starts t there too; rankdeck stop b ends the other"


@pytest.mark.parametrize(
    ("nproc", "num_gpus", "num_ranks"), [("gpu", 2, 2), ("auto", 2, 2), ("auto", 0, 64), ("cpu", 2, 64)]
)
def test_torchrun_s_words_for_a_number_of_ranks_count_gpus_or_cores(nproc: str, num_gpus: int, num_ranks: int) -> None:
    gpus = [GpuReport(GpuFigures(index)) for index in range(num_gpus)]
    host = JobHost(HostEntry("h1", num_ranks=3), PLACE, report(64, *gpus))

    (spec,) = job_specs(RunRequest(("train.py",), "gpt", nproc=nproc), [host]).values()

    assert spec.local_world_size == num_ranks


def test_a_rank_for_each_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(UsageError, match="--nproc-per-node gpu: h1 has no GPU"):
        job_specs(RunRequest(("train.py",), "gpt", nproc="gpu"), [JobHost(HostEntry("h1"), PLACE, report(64))])


def test_each_host_has_its_share_its_directory_and_its_python() -> None:
    hosts = [
        JobHost(HostEntry("h1", num_ranks=2, workdir="~/a"), PLACE, report(64)),
        JobHost(HostEntry("h2"), msgspec.structs.replace(PLACE, home="/root", python="/usr/bin/python3"), report(6)),
        JobHost(HostEntry("h3", num_ranks=1), PLACE, report(64)),
    ]

    specs = job_specs(RunRequest(("train.py",), "t"), hosts, "10.0.0.5")

    assert list(specs) == ["h1", "h2", "h3"]
    shares = [(spec.node_rank, spec.first_rank, spec.local_world_size) for spec in specs.values()]
    assert shares == [(0, 0, 2), (1, 2, 3), (2, 5, 1)]
    assert {(spec.num_nodes, spec.world_size, spec.master_addr) for spec in specs.values()} == {(3, 6, "10.0.0.5")}
    assert [spec.workdir for spec in specs.values()] == ["/home/ada/a", "/root", "/home/ada"]
    assert [spec.python for spec in specs.values()] == ["/opt/python", "/usr/bin/python3", "/opt/python"]
    everywhere = job_specs(RunRequest(("t.py",), "t", num_ranks=4, workdir="/w"), hosts, "10.0.0.5").values()
    assert {(spec.local_world_size, spec.workdir) for spec in everywhere} == {(4, "/w")}


@pytest.mark.parametrize("gives_in", [True, False])
async def test_each_host_names_once_the_attempt_after_those_that_it_has_kept(gives_in: bool) -> None:
    kept = {"h1": 2, "h2": 7}
    tried: list[int] = []

    async def start(specs: Mapping[str, JobSpec]) -> None:
        tried.append(specs["h1"].attempt)
        for node, attempt in kept.items():
            if not gives_in or tried[-1] < attempt:
                raise AgentRefusedError(node, "job_exists", "it is there", attempt)

    links = [SimpleNamespace(host=node, place=PLACE) for node in kept]
    hosts = SimpleNamespace(links=links, entries=[*map(HostEntry, kept)], names=[*kept])
    session = cast("RemoteSession", SimpleNamespace(_hosts=hosts, _start_own_job=start))
    request = RunRequest(("t.py",), "t", master_addr="10.0.0.5")
    starting = RemoteSession._start_on_hosts(session, request, {node: report(4) for node in kept})
    if not gives_in:
        with pytest.raises(AgentRefusedError, match="it is there"):
            await starting
        assert tried == [0, 2, 2]
        return
    specs = await starting
    assert (tried, {spec.attempt for spec in specs.values()}) == ([0, 2, 7], {7})


def test_a_rank_is_looked_for_on_the_node_that_has_it() -> None:
    first = job_status("t", JobState.RUNNING)
    statuses = {"h1": first, "h2": msgspec.structs.replace(first, first_rank=2, local_world_size=3)}

    assert [node_of_rank(statuses, rank) for rank in range(5)] == ["h1", "h1", "h2", "h2", "h2"]
    with pytest.raises(UsageError, match="no node has rank 5"):
        node_of_rank(statuses, 5)


def test_faults_are_allowed_only_when_a_person_says_so() -> None:
    assert not spec_of(RunRequest(("train.py",), "t"), PLACE, report(2)).allow_faults
    assert spec_of(RunRequest(("train.py",), "t", allow_faults=True), PLACE, report(2)).allow_faults
