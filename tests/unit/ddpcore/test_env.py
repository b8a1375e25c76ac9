"""torchrun's variables and the agent's, parsed once."""

from __future__ import annotations

import pytest

from ddpcore.env import ProbeEnv, TorchrunEnv, parse_probe, parse_torchrun
from ddpcore.errors import NotLaunchedError
from ddpcore.wire import (
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LAUNCHER_NAMESPACE,
    ENV_LAUNCHER_PID,
    ENV_PROBED_PID,
    ENV_REQUEST_DIR,
    Fault,
    FaultKind,
    encode_faults,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_s_variables_become_one_struct() -> None:
    assert parse_torchrun(TORCHRUN) == TorchrunEnv(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        restart_count=2,
        master_addr="10.0.0.1",
        master_port=29500,
    )


def test_node_rank_and_restart_count_may_be_absent() -> None:
    environ = {
        name: value for name, value in TORCHRUN.items() if name not in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    }

    env = parse_torchrun(environ)

    assert (env.node_rank, env.restart_count) == (0, 0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_absent_variable_is_named_together_with_what_to_run(name: str) -> None:
    with pytest.raises(NotLaunchedError, match=rf"^{name} is not set.*torchrun --nproc-per-node"):
        parse_torchrun({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "five", "RANK='five' is not a number"),
        ("RANK", "8", "RANK=8 does not fit WORLD_SIZE=8"),
        ("RANK", "-1", "RANK=-1 does not fit"),
        ("LOCAL_RANK", "4", "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4"),
        ("GROUP_RANK", "x", "GROUP_RANK='x' is not a number"),
    ],
)
def test_a_value_that_makes_no_sense_is_quoted(name: str, value: str, said: str) -> None:
    with pytest.raises(NotLaunchedError, match=said):
        parse_torchrun(TORCHRUN | {name: value})


def test_a_process_without_an_inbox_is_not_probed() -> None:
    assert parse_probe({}) is None
    assert parse_probe({ENV_INBOX: ""}) is None


def test_the_agent_s_variables_become_one_struct() -> None:
    fault = Fault(kind=FaultKind.SLOW, rank=2, at_step=10, factor=4.0)

    env = parse_probe(
        {
            ENV_INBOX: "/run/inbox.sock",
            ENV_REQUEST_DIR: "/run/job",
            ENV_JOB_ID: "gpt",
            ENV_ATTEMPT: "3",
            ENV_LAUNCHER_PID: "77",
            ENV_LAUNCHER_NAMESPACE: "pid:[4026531836]",
            ENV_PROBED_PID: "78",
            ENV_FAULTS: encode_faults([fault]),
        }
    )

    assert env == ProbeEnv(
        inbox="/run/inbox.sock",
        request_dir="/run/job",
        job_id="gpt",
        attempt=3,
        launcher_pid=77,
        launcher_namespace="pid:[4026531836]",
        probed_pid=78,
        faults=(fault,),
    )


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "9" * 5000, "\u0663"])
def test_a_number_that_makes_no_sense_costs_only_its_own_function(value: str) -> None:
    env = parse_probe({ENV_INBOX: "/i", ENV_LAUNCHER_PID: value, ENV_ATTEMPT: value, ENV_FAULTS: "[{"})

    assert env is not None
    assert (env.launcher_pid, env.attempt, env.faults) == (None, 0, ())
