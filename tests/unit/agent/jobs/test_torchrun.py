from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from torch.distributed.run import parse_args

from agent.jobs.job import Job
from agent.jobs.launch import Launch
from agent.jobs.lifecycle import CommitReceived, LauncherFailed, LauncherStarted
from agent.jobs.torchrun import LaunchPaths, launcher_argv, launcher_env, why_unprobed
from ddpcore.wire import Fault, FaultKind, decode_faults
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from tests.support.jobs import make_spec

if TYPE_CHECKING:
    from pathlib import Path

PATHS = LaunchPaths("/run/a/inbox.sock", "/run/a/jobs/train/0")


def test_the_argv_names_everything_that_torchrun_would_guess() -> None:
    argv = launcher_argv(make_spec(python="/py", command=["-m", "pkg.train", "--lr", "1"]), 4711, "127.0.0.1")
    assert argv[:3] == ["/py", "-m", "torch.distributed.run"]
    options = dict(zip(argv[3:-5:2], argv[4:-5:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "2",
        "--max-restarts": "0",
        "--rdzv-backend": "static",
        "--rdzv-id": "train",
        "--master-addr": "127.0.0.1",
        "--master-port": "4711",
        "--node-rank": "1",
        "--rdzv-conf": "timeout=120",
        "--logs-specs": "rankdeck",
        "--monitor-interval": "0.3",
    }
    assert argv[-5:] == ["-m", "--", "pkg.train", "--lr", "1"]


def test_the_argv_of_an_elastic_job_names_what_c10d_would_guess() -> None:
    spec = make_spec(attempt=3, elastic_min_nodes=1, max_restarts=5, master_addr="fd00::1")

    argv = launcher_argv(spec, 4711, "fd00::2")

    options = dict(zip(argv[3:-2:2], argv[4:-2:2], strict=True))
    assert options == {
        "--nnodes": "1:2",
        "--nproc-per-node": "2",
        "--max-restarts": "5",
        "--rdzv-backend": "rankdeck-c10d",
        "--rdzv-id": "train.3",
        "--rdzv-endpoint": "[fd00::1]:4711",
        "--local-addr": "fd00::2",
        "--rdzv-conf": "is_host=0,join_timeout=600,read_timeout=10",
        "--logs-specs": "rankdeck",
        "--monitor-interval": "0.3",
    }
    assert launcher_env(spec, {}, PATHS)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in launcher_env(make_spec(), {}, PATHS)


OPTIONS = st.sampled_from(["--nproc", "--node", "--rdzv", "--m", "-m", "-h", "--", "--max-restarts=9", "--lr", "x"])


@pytest.mark.parametrize("is_module", [True, False])
@given(name=st.text(min_size=1), arguments=st.lists(st.text() | OPTIONS))
def test_arguments_pass_untouched_through_the_parser_of_torchrun(
    name: str, arguments: list[str], *, is_module: bool
) -> None:
    argv = launcher_argv(make_spec(command=["-m"] * is_module + [name, *arguments]), 1, "127.0.0.1")

    parsed = parse_args(argv[3:])  # type: ignore[no-untyped-call]
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (is_module, name, arguments)


@pytest.mark.parametrize(
    ("printed", "exit_code", "end"),
    [
        (
            "usage: run.py ...\nrun.py: error: no such option\n",
            2,
            "exited with code 2; its last line: run.py: error: no",
        ),
        ("INFO all is well\n", -9, "was killed by SIGKILL"),
        ("Traceback (most recent call last):\n  x\nOSError: full\n", 1, "exited with code 1"),
        ("", 1, "exited with code 1"),
    ],
)
def test_a_launcher_that_ends_without_a_traceback_is_quoted(
    printed: str, exit_code: int, end: str, tmp_path: Path
) -> None:
    job = Job(make_spec(), 0.0)
    for event in (CommitReceived(), LauncherStarted()):
        job.handle(event, 0.0)
    job_dir = tmp_path / "0"
    job_dir.mkdir()
    (job_dir / "launcher.log").write_text(printed)

    job.handle(LauncherFailed(exit_code, Launch(job, job_dir, None).any_failure(exit_code)), 9.0)

    cause = job.status(9.0).root_cause
    assert cause is not None
    assert cause.end.startswith(f"the launcher {end}")
    assert ("its last line" in cause.end) is ("its last line" in end)


@given(st.dictionaries(st.text(min_size=1).map(lambda name: f"U_{name}"), st.text()))
def test_variables_of_the_user_pass_untouched(env: dict[str, str]) -> None:
    made = launcher_env(make_spec(env=env), {}, PATHS)
    assert {name: made[name] for name in env} == env


def test_ranks_learn_where_the_agent_is() -> None:
    env = launcher_env(make_spec(attempt=3), {"HOME": "/home/u"}, PATHS, store_fd=9)
    assert env["RANKDECK_INBOX"] == "/run/a/inbox.sock"
    assert env["RANKDECK_LOG_DIR"] == env["RANKDECK_REQUEST_DIR"] == "/run/a/jobs/train/0"
    assert (env["RANKDECK_JOB_ID"], env["RANKDECK_ATTEMPT"], env["RANKDECK_STORE_FD"]) == ("train", "3", "9")
    assert env["HOME"] == "/home/u"
    assert "RANKDECK_FAULTS" not in env


def test_without_a_reserved_port_torch_binds_its_own() -> None:
    assert "RANKDECK_STORE_FD" not in launcher_env(make_spec(), {}, PATHS)


def test_faults_travel_in_the_environment() -> None:
    faults = [Fault(FaultKind.FREEZE, 2, at_step=10)]
    assert decode_faults(launcher_env(make_spec(faults=faults), {}, PATHS)["RANKDECK_FAULTS"]) == faults


@pytest.mark.parametrize(
    ("base", "env", "expected"),
    [
        ({}, {}, str(LAUNCH_PLUGIN_DIR)),
        ({"PYTHONPATH": "/lib"}, {}, f"{LAUNCH_PLUGIN_DIR}:/lib"),
        ({"PYTHONPATH": "/lib"}, {"PYTHONPATH": "/mine"}, f"{LAUNCH_PLUGIN_DIR}:/mine"),
    ],
)
def test_the_plug_in_comes_first_on_the_search_path(base: dict[str, str], env: dict[str, str], expected: str) -> None:
    assert launcher_env(make_spec(env=env), base, PATHS)["PYTHONPATH"] == expected


def test_what_an_outer_job_left_in_the_environment_does_not_reach_this_one() -> None:
    base = {"PET_NNODES": "9", "RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "RANKDECK_PROBED_PID": "1"}
    assert not set(base) & set(launcher_env(make_spec(), base, PATHS))


def test_defaults_give_way_to_the_user() -> None:
    env = launcher_env(make_spec(grace_s=60.5, env={"GLOO_SOCKET_IFNAME": "eth0"}), {}, PATHS, "eth1")
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["PYTHONUNBUFFERED"] == env["PYTHONFAULTHANDLER"] == "1"
    assert env["TORCH_FR_BUFFER_SIZE"] == "64"
    assert env["TORCH_NCCL_ENABLE_TIMING"] == "1"
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "66"
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == ("eth0", "=eth1", "eth1")
    own = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ENABLE_TIMING": "0"}
    assert launcher_env(make_spec(env=own), {}, PATHS).items() >= own.items()
    assert "GLOO_SOCKET_IFNAME" not in launcher_env(make_spec(), {}, PATHS)


def test_the_user_s_own_word_on_the_recorder_is_not_outdone() -> None:
    assert "TORCH_FR_BUFFER_SIZE" not in launcher_env(make_spec(env={"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}), {}, PATHS)
    assert launcher_env(make_spec(env={"TORCH_FR_BUFFER_SIZE": "0"}), {}, PATHS)["TORCH_FR_BUFFER_SIZE"] == "0"


def test_a_job_without_a_probe_says_so_to_the_plug_in_and_leaves_torch_alone() -> None:
    env = launcher_env(make_spec(is_probed=False), {}, PATHS)

    assert env["RANKDECK_UNPROBED"] == "1"
    assert "TORCH_FR_BUFFER_SIZE" not in env
    assert "RANKDECK_UNPROBED" not in launcher_env(make_spec(), {}, PATHS)


@pytest.mark.parametrize(
    ("changes", "base", "why"),
    [
        ({}, {}, ""),
        ({"is_probed": False}, {}, "as asked"),
        ({}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it out"),
        ({"env": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ""),
    ],
)
def test_why_ranks_have_no_probe_is_known_before_they_start(
    changes: dict[str, Any], base: dict[str, str], why: str
) -> None:
    assert why_unprobed(make_spec(**changes), base) == why
