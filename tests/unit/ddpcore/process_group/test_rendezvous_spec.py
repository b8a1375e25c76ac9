"""How a rank was told to meet the others."""

from __future__ import annotations

import pytest

from ddpcore.errors import ContradictoryLaunchError, NotLaunchedError
from ddpcore.process_group.rendezvous_spec import LocalNumbers, Scheme, first_host, read_rendezvous

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
TORCHRUN = {**LAUNCHED, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}

# Of Slurm 22.05, as measured: `srun -N2 -n3`, the last task; and its batch script with -N2 -n4.
ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_GTIDS": "2",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SRUN = ALLOCATION | {
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "h[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.13",
}
BATCH_SCRIPT = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_NTASKS": "4"}


def test_torchrun_s_variables_say_it_all() -> None:
    spec = read_rendezvous(None, None, None, {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})

    assert spec is not None
    assert (spec.scheme, spec.rank, spec.world_size) == (Scheme.ENV, 1, 4)
    assert spec.local == LocalNumbers(1, 2, 0)
    assert spec.url == "env://?rank=1&world_size=-1"
    assert spec.where == "env://gpu1:29500"
    assert spec.has_agent_store
    assert not spec.hosts_store


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "environ"),
    [
        (None, None, None, {}),
        (None, None, None, {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}),
        (None, 0, 1, {}),
        (None, None, None, {"RANK": "", "WORLD_SIZE": ""}),
    ],
)
def test_without_a_launcher_and_without_others_it_is_alone(
    init_method: str | None, rank: int | None, world_size: int | None, environ: dict[str, str]
) -> None:
    assert read_rendezvous(init_method, rank, world_size, environ) is None


@pytest.mark.parametrize(
    ("init_method", "where", "url"),
    [
        ("tcp://gpu1:4711", "tcp://gpu1:4711", "tcp://gpu1:4711?rank=0&world_size=-1"),
        ("tcp://[fe80::1]:4711", "tcp://[fe80::1]:4711", "tcp://[fe80::1]:4711?rank=0&world_size=-1"),
        ("tcp://gpu1:4711?use_libuv=0", "tcp://gpu1:4711", "tcp://gpu1:4711?rank=0&world_size=-1&use_libuv=0"),
        ("file:///shared/meet", "file:///shared/meet", "file:///shared/meet?rank=0&world_size=-1"),
    ],
)
def test_a_url_says_where(init_method: str, where: str, url: str) -> None:
    spec = read_rendezvous(init_method, 0, 2, {})

    assert spec is not None
    assert (spec.where, spec.url, spec.local) == (where, url, LocalNumbers())
    assert spec.hosts_store == init_method.startswith("tcp")


def test_a_url_may_say_rank_and_world_size() -> None:
    spec = read_rendezvous("tcp://gpu1:4711?rank=1&world_size=3", None, None, {})

    assert spec is not None
    assert (spec.rank, spec.world_size) == (1, 3)


def test_the_master_of_torchrun_may_be_named_again() -> None:
    spec = read_rendezvous("tcp://gpu1:29500", None, None, {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})

    assert spec is not None
    assert spec.has_agent_store


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({"LOCAL_RANK": "1"}, LocalNumbers(1, None, None)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "3"}, LocalNumbers(0, 1, 3)),
        ({"LOCAL_WORLD_SIZE": "2"}, LocalNumbers()),
    ],
)
def test_other_launchers_say_less_of_the_node(variables: dict[str, str], local: LocalNumbers) -> None:
    spec = read_rendezvous(None, None, None, LAUNCHED | variables)

    assert spec is not None
    assert spec.local == local


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_absent_variable_is_named(missing: str) -> None:
    environ = {name: value for name, value in LAUNCHED.items() if name != missing}

    with pytest.raises(NotLaunchedError, match=f"^{missing} is not set: "):
        read_rendezvous(None, None, None, environ)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_another_launcher_s_numbers_are_pointed_at(name: str) -> None:
    with pytest.raises(NotLaunchedError, match=rf"another launcher has set {name}=3; give rank=int\(os.environ"):
        read_rendezvous("tcp://gpu1:4711", None, None, {name: "3"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_what_is_no_number_is_named(name: str) -> None:
    with pytest.raises(NotLaunchedError, match=f"^{name}='four' is not a number"):
        read_rendezvous(None, None, None, {**TORCHRUN, name: "four"})


def test_what_is_no_number_in_the_url_is_named() -> None:
    with pytest.raises(NotLaunchedError, match=r"^init_method's rank='x' is not a number"):
        read_rendezvous("tcp://gpu1:4711?rank=x", None, 2, {})


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "variables", "words"),
    [
        (None, 2, None, {}, "rank=2 was given, but the environment has RANK=1"),
        (None, None, 3, {}, "world_size=3 was given, but the environment has WORLD_SIZE=4"),
        ("env://?rank=0", None, None, {}, "init_method has rank=0, but the environment has RANK=1"),
        (None, None, None, {"RANK": "4"}, "rank 4 is outside the world of 4: ranks count from 0 to 3"),
        (None, None, None, {"RANK": "-1"}, "rank -1 is outside the world of 4"),
        (None, None, None, {"WORLD_SIZE": "0"}, "world size 0: there is at least one rank"),
        (
            None,
            None,
            None,
            {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2",
        ),
        (None, None, None, {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not fit WORLD_SIZE=4"),
        (None, None, None, {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 does not fit"),
        (None, None, None, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 in a world of 4"),
        (None, None, None, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 in a world of 4"),
        (None, None, None, {"MASTER_PORT": "0"}, "MASTER_PORT is 0: ports count from 1"),
        (None, None, None, {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ("tcp://gpu1", None, None, {}, "does not name where rank 0 listens"),
        ("tcp://:4711", None, None, {}, "does not name where rank 0 listens"),
        ("tcp://gpu1:4711/x", None, None, {}, "does not name where rank 0 listens"),
        ("tcp://gpu1:99999", None, None, {}, "Port out of range"),
        ("tcp://gpu1:0", None, None, {}, "init_method's port is 0"),
        (
            "tcp://gpu1:4711",
            None,
            None,
            {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            "which hosts the store at gpu1:29500",
        ),
        ("tcp://gpu1:4711?master=1", None, None, {}, "takes rank, world_size and use_libuv, not master"),
        ("file://shared/meet", None, None, {}, "with three slashes"),
        ("file:///shared/", None, None, {}, "does not name a file"),
        ("file:///shared/a#b", None, None, {}, "has a '#' in it"),
        ("/shared/meet", None, None, {}, "is a path: write file:///shared/meet"),
        ("tpc://gpu1:4711", None, None, {}, "is not known: use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"),
    ],
)
def test_what_cannot_be_is_refused_with_one_line(
    init_method: str | None, rank: int | None, world_size: int | None, variables: dict[str, str], words: str
) -> None:
    with pytest.raises(ContradictoryLaunchError) as caught:
        read_rendezvous(init_method, rank, world_size, LAUNCHED | variables)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_world_without_a_meeting_place_is_not_taken_for_alone() -> None:
    with pytest.raises(NotLaunchedError, match="MASTER_ADDR is not set"):
        read_rendezvous(None, 0, 2, {})


def test_each_task_of_srun_is_a_rank_and_the_first_node_of_its_step_the_master() -> None:
    spec = read_rendezvous(None, None, None, SRUN)

    assert spec is not None
    assert (spec.rank, spec.world_size, spec.local) == (2, 3, LocalNumbers(0, 1, 1))
    assert spec.url == "tcp://h1:19812?rank=2&world_size=-1"
    assert (spec.scheme, spec.is_by_slurm, spec.has_agent_store) == (Scheme.TCP, True, False)


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[08-11,17],login1"}, "tcp://gpu08:19812"),
        ({"SLURM_STEP_NUM_NODES": "1"}, "tcp://127.0.0.1:19812"),
        ({"SLURM_STEP_ID": "0"}, "tcp://h1:19711"),
        ({"MASTER_ADDR": "fe80::1"}, "tcp://[fe80::1]:19812"),
        ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}, "tcp://gpu1:29500"),
        ({"MASTER_PORT": "29500"}, "tcp://h1:29500"),
    ],
)
def test_the_master_of_srun_s_ranks(variables: dict[str, str], where: str) -> None:
    spec = read_rendezvous(None, None, None, SRUN | variables)

    assert spec is not None
    assert spec.where == where


@pytest.mark.parametrize("init_method", ["tcp://gpu1:4711", "file:///shared/meet", "env://"])
def test_srun_s_ranks_go_with_any_rendezvous(init_method: str) -> None:
    spec = read_rendezvous(init_method, None, None, SRUN)

    assert spec is not None
    assert (spec.rank, spec.world_size, spec.local.local_rank) == (2, 3, 0)
    assert spec.is_by_slurm == (init_method == "env://")


@pytest.mark.parametrize(
    "environ",
    [
        BATCH_SCRIPT,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SRUN | {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "4"},
        SRUN | {"PMI_SIZE": "6", "PMI_RANK": "4"},
        SRUN | {"SLURM_PROCID": "two"},
    ],
)
def test_a_batch_script_a_lone_task_and_another_launcher_s_process_are_no_ranks_of_srun(
    environ: dict[str, str],
) -> None:
    assert read_rendezvous(None, None, None, environ) is None


def test_the_ranks_of_srun_s_own_pmi_are_its_tasks() -> None:
    spec = read_rendezvous(None, None, None, SRUN | {"PMI_SIZE": "3", "PMI_RANK": "2"})

    assert spec is not None
    assert spec.rank == 2


def test_torchrun_below_srun_decides() -> None:
    spec = read_rendezvous(None, None, None, SRUN | TORCHRUN)

    assert spec is not None
    assert (spec.rank, spec.world_size, spec.where, spec.is_by_slurm) == (1, 4, "env://gpu1:29500", False)


def test_a_world_size_of_1_is_a_training_a_task() -> None:
    assert read_rendezvous(None, None, 1, SRUN) is None


def test_a_world_size_that_the_step_has_not_is_refused() -> None:
    with pytest.raises(ContradictoryLaunchError, match="rank 2 is outside the world of 2"):
        read_rendezvous(None, None, None, SRUN | {"WORLD_SIZE": "2"})


def test_a_step_without_a_list_of_nodes_asks_for_the_master() -> None:
    with pytest.raises(NotLaunchedError, match="MASTER_ADDR is not set"):
        read_rendezvous(None, None, None, {**SRUN, "SLURM_STEP_NODELIST": ""})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("h1", "h1"),
        ("h1,h2", "h1"),
        ("gpu[08-11,17]", "gpu08"),
        ("gpu[3,1]", "gpu3"),
        ("rack[0-1]node[3-5],login1", "rack0node3"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
