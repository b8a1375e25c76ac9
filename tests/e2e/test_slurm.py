"""Training in steps of a real Slurm: started in one line, watched by the job's id, ended with a checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from app.manual import markdown
from tests.support.slurm import SlurmCluster, require_slurm
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(600)
START_S = 120.0
END_S = 60.0
SAVE_S = 120.0
"""Seconds for a checkpoint before an end (`JobSpec.save_s`)."""
RANKDECK = f"{sys.executable} -P -m app"
ENGINE = """
import time, torch
from torch import nn
import ddpcore
from ddpcore.examples.spirals import spirals
torch.set_num_threads(1)
with ddpcore.Engine(seed=0, log_dir="runs") as engine:
    model = engine.wrap(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = engine.loader(spirals(6000, seed=1), global_batch_size=96)
    engine.checkpoint("runs", every="100000 steps", model=model, optimizer=optimizer)
    print("begins at step", engine.step, flush=True)
    for batch in engine.steps(batches, until="100000 epochs"):
        for points, arms in batch.micro_batches(1):
            engine.backward(nn.functional.cross_entropy(model(points), arms))
        engine.update(optimizer)
        time.sleep(0.1)
"""
TASK = """
import os, pathlib, torch
import torch.distributed as dist
dist.init_process_group(
    "gloo", f"tcp://{os.environ['MASTER_ADDR']}:29655", rank=int(os.environ["SLURM_PROCID"]), world_size=4
)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
has_ended = torch.zeros(1)
while not has_ended.item():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    has_ended.fill_(float(pathlib.Path("end").exists()))
    dist.all_reduce(has_ended)
"""
SHORT = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print('all', flush=True)"
LINE = re.search(r"<!-- srun -->.*?\n(srun [^\n]*)\n```", markdown("slurm"), re.DOTALL)
assert LINE, "the manual has the line"
RUN = LINE[1].replace("rankdeck run", f"{RANKDECK} run --nproc-per-node 1 --name spirals") + "; echo srun ended with $?"


@pytest.fixture(scope="module", params=[pytest.param("", id="best"), pytest.param("linuxproc", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    require_slurm()
    with SlurmCluster(proctrack=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def no_job_is_left_to_the_next_test(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.run("scancel", "--state=RUNNING")
    cluster.run("scancel", "--state=PENDING")
    until(lambda: nothing_is_left(cluster), SAVE_S + END_S, "nothing is left")


def training(cluster: SlurmCluster, *options: str) -> str:
    """Return a batch job of two nodes whose ranks train, from wherever the last one has stopped."""
    (cluster.home / "train.py").write_text(ENGINE)
    job_id = cluster.submit(RUN, "--nodes=2", *options)
    until_it_trains(cluster, job_id)
    return job_id


def until_it_trains(cluster: SlurmCluster, job_id: str) -> None:
    try:
        until(lambda: "training, step" in cluster.output(job_id), START_S, f"job {job_id} trains")
    except AssertionError as error:
        raise AssertionError(f"{error}: {cluster.output(job_id)}") from error


def checkpoints(cluster: SlurmCluster) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (cluster.home / "runs").glob("step_*"))


def nothing_is_left(cluster: SlurmCluster) -> bool:
    words = []
    for process in (process for name in cluster.nodes for process in cluster.network[name].processes()):
        with contextlib.suppress(psutil.Error):
            words.append(" ".join(process.cmdline()))
    return not any("train.py" in text or "-m agent" in text for text in words)


@pytest.mark.slow
def test_one_line_runs_a_program_on_all_nodes_and_ends_with_its_exit_code(cluster: SlurmCluster) -> None:
    (cluster.home / "train.py").write_text(SHORT)
    job_id = cluster.submit(RUN, "--nodes=2")
    until(lambda: cluster.state(job_id) == "COMPLETED", START_S, f"job {job_id} ends")

    assert "srun ended with 0" in cluster.output(job_id)
    assert "2 of 2 nodes" in cluster.output(job_id)
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")

    (cluster.home / "train.py").write_text("raise SystemExit(3)")
    job_id = cluster.submit(RUN, "--nodes=2")
    until(lambda: cluster.state(job_id) == "COMPLETED", START_S, f"job {job_id} ends")
    assert "srun ended with 1" in cluster.output(job_id)
    assert "exited with code 3" in cluster.output(job_id)


@pytest.mark.slow
def test_tasks_of_srun_that_exec_has_prepared_are_one_job_over_their_nodes(cluster: SlurmCluster) -> None:
    (cluster.home / "task.py").write_text(TASK)
    # The last one has no probe.
    task = f"{RANKDECK} exec -- {sys.executable} $( [ $SLURM_PROCID = 3 ] && echo -I ) task.py"
    tasks = f"--nodes=2 --ntasks=4 --ntasks-per-node=2 --overcommit sh -c '{task}'"
    job_id = cluster.submit(f"export MASTER_ADDR=$(hostname -i); srun {tasks}; echo srun ended with $?", "--nodes=2")
    where = ("--host", "h1", "--host", "h2", "--python", sys.executable)

    def ranks() -> list[tuple[int, str, str]]:
        printed = cluster.rankdeck("status", f"slurm-{job_id}-0", "--json", *where, codes=tuple(range(20)))
        found = json.loads(printed)["ranks"] if printed.startswith("{") else []
        return [(rank["rank"], rank["node"], "trains" if (rank["step"] or 0) > 2 else rank["detail"]) for rank in found]

    def is_seen(found: list[tuple[int, str, str]]) -> bool:
        return found[:3] == expected and found[3][:2] == (3, "h2") and found[3][2].startswith("no probe (python -I)")

    expected = [(0, "h1", "trains"), (1, "h1", "trains"), (2, "h2", "trains")]
    until(lambda: is_seen(ranks()), START_S, "its ranks train, and the last one is seen")
    (cluster.home / "end").touch()
    until(lambda: "srun ended" in cluster.output(job_id), START_S, f"job {job_id} ends")
    assert "srun ended with 0" in cluster.output(job_id)
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")


def test_scancel_leaves_a_checkpoint_and_a_console_is_told(cluster: SlurmCluster) -> None:
    job_id = training(cluster)
    status = json.loads(cluster.rankdeck("status", "--slurm", job_id, "--json"))
    assert [rank["node"] for rank in status["ranks"]] == ["h1", "h2"]
    console = attached(cluster, job_id)
    before = checkpoints(cluster)

    cluster.run("scancel", job_id)

    said, _ = console.communicate(timeout=END_S)
    assert console.returncode == 0
    assert said.startswith("job spirals: stopped"), "torchrun's exit code is 1 where Slurm's SIGTERM reaches it too"
    until(lambda: cluster.state(job_id) == "CANCELLED" and nothing_is_left(cluster), END_S, "all is over")
    assert len(set(checkpoints(cluster)) - set(before)) == 1
    ended = cluster.rankdeck("status", "--slurm", job_id, codes=(2, 3))
    assert f"Slurm job {job_id} has ended: CANCELLED" in ended


def attached(cluster: SlurmCluster, job_id: str) -> subprocess.Popen[str]:
    """Return a console without a screen that shows a job that trains."""
    console = cluster.start(sys.executable, "-P", "-m", "app", "attach", "--slurm", job_id, "--headless")
    until_printed(console, " training")
    return console


def until_printed(console: subprocess.Popen[str], text: str) -> None:
    assert console.stderr is not None
    lines = [""]
    while text not in lines[-1]:
        lines.append(console.stderr.readline())
        assert lines[-1], "".join(lines)


def ended_by(cluster: SlurmCluster, job_id: str, *cause: str) -> str:
    """Return what a console that is attached to a job shows once a command of Slurm has ended that."""
    console = attached(cluster, job_id)
    cluster.run(*cause)
    stdout, stderr = console.communicate(timeout=END_S)
    return stdout + stderr


@pytest.mark.slow
def test_a_preempted_job_leaves_a_checkpoint_and_consoles_show_why(cluster: SlurmCluster) -> None:
    job_id = training(cluster)
    before = checkpoints(cluster)
    why = f"Slurm ends job {job_id}: a job of higher priority has preempted it"
    urgent = ("sbatch", "--nodes=2", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    assert why in ended_by(cluster, job_id, *urgent)
    until(lambda: cluster.state(job_id) == "PREEMPTED" and nothing_is_left(cluster), END_S, "all is over")

    # With linuxproc a preemption signals all processes twice, and torchrun gives its ranks no time after the second.
    if cluster.signals_only_tasks:
        assert len(set(checkpoints(cluster)) - set(before)) == 1
    ended = cluster.rankdeck("status", "--slurm", job_id, codes=(2, 3))
    assert f"Slurm job {job_id} has ended: PREEMPTED; a job of higher priority has preempted it" in ended


@pytest.mark.slow
def test_a_failed_node_is_why_slurm_ends_a_job(cluster: SlurmCluster) -> None:
    job_id = training(cluster, "--no-requeue")
    down = ("scontrol", "update", "NodeName=h2", "State=DOWN", "Reason=broken")

    assert f"Slurm ends job {job_id}: a node has failed" in ended_by(cluster, job_id, *down)
    until(lambda: cluster.state(job_id) == "NODE_FAIL" and nothing_is_left(cluster), END_S, "all is over")

    cluster.run("scontrol", "update", "NodeName=h2", "State=RESUME", codes=(0, 1))  # it may be back by itself
    until(lambda: set(cluster.states().values()) == {"idle"}, END_S, "all nodes are idle")


@pytest.mark.slow
def test_a_node_that_slurm_drains_is_a_notice_and_the_job_goes_on(cluster: SlurmCluster) -> None:
    job_id = training(cluster)
    console = attached(cluster, job_id)

    cluster.run("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=bad disk")
    until_printed(console, "Slurm drains h2 (bad disk): no new job starts there, this one keeps running")
    cluster.run("scontrol", "update", "NodeName=h2", "State=RESUME")
    until_printed(console, "Slurm reports h2 in service again")
    assert cluster.state(job_id) == "RUNNING"

    cluster.run("scancel", job_id)
    console.communicate(timeout=END_S)


def until_it_goes_on(cluster: SlurmCluster, job_id: str, step: int) -> None:
    """Wait until a requeued job trains again, from a step on."""
    until(lambda: cluster.state(job_id) == "RUNNING", START_S, f"job {job_id} runs again")
    # Relay and agents come first.
    look = ("logs", "--slurm", job_id)
    until(lambda: f"begins at step {step}" in cluster.rankdeck(*look, codes=(0, 2, 3)), START_S, "it goes on")


@pytest.mark.slow
def test_a_requeued_job_goes_on_from_its_checkpoint(cluster: SlurmCluster) -> None:
    job_id = training(cluster)

    cluster.run("scontrol", "requeue", job_id)
    until(lambda: cluster.state(job_id) == "PENDING", END_S, f"job {job_id} waits")
    assert "PENDING" in cluster.rankdeck("status", "--slurm", job_id, codes=(2,))
    last = checkpoints(cluster)[-1]
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    until_it_goes_on(cluster, job_id, last)


@pytest.mark.slow
def test_a_requeued_job_goes_on_from_its_checkpoint_on_another_node(cluster: SlurmCluster) -> None:
    job_id = training(cluster, "--nodes=1", "--nodelist=h1")

    cluster.run("scontrol", "requeue", job_id)
    until(lambda: cluster.state(job_id) == "PENDING" and nothing_is_left(cluster), END_S, f"job {job_id} waits")
    last = checkpoints(cluster)[-1]
    cluster.run("scontrol", "update", f"JobId={job_id}", "ReqNodeList=h2", "StartTime=now")
    until_it_goes_on(cluster, job_id, last)

    status = json.loads(cluster.rankdeck("status", "--slurm", job_id, "--json"))
    assert [rank["node"] for rank in status["ranks"]] == ["h2"]


@pytest.mark.slow
def test_the_tasks_of_an_array_are_jobs_of_their_own_that_share_a_node(cluster: SlurmCluster) -> None:
    (cluster.home / "train.py").write_text(ENGINE)
    script = f"mkdir -p task_$SLURM_ARRAY_TASK_ID && cd $_ && ln -sf ../train.py . && {RUN}"
    where = ("--nodes=1", "--nodelist=h1", "--cpus-per-task=1", "--time=2", "--output=%A_%a.out")
    array = cluster.submit(script, "--array=1-2%1", *where)
    first, last = f"{array}_1", f"{array}_2"
    until_it_trains(cluster, first)
    assert "on no node: PENDING (JobArrayTaskLimit)" in cluster.rankdeck("status", "--slurm", last, codes=(2,))
    console = attached(cluster, array)

    cluster.run("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=2")
    until_it_trains(cluster, last)
    told = cluster.rankdeck("status", "--slurm", array, codes=(2,))
    assert f"Slurm job {array} is 2 jobs: {first} RUNNING, {last} RUNNING" in told
    assert "job spirals: running" in cluster.rankdeck("status", "--slurm", last, codes=(0, 10))

    cluster.run("scontrol", "requeue", last)
    until(lambda: cluster.state(last) == "PENDING", END_S, "the last task waits")
    assert "job spirals: running" in cluster.rankdeck("status", "--slurm", array, codes=(0, 10))
    cluster.run("scontrol", "update", f"JobId={last}", "StartTime=now", "TimeLimit=UNLIMITED")
    (saved,) = (cluster.home / "task_2/runs").glob("step_*")
    until_it_goes_on(cluster, last, int(saved.name.removeprefix("step_")))

    said, _ = console.communicate(timeout=150.0)
    assert said.startswith("job spirals: succeeded"), "the engine has ended it before its own time limit"
    assert len([*(cluster.home / "task_1/runs").glob("step_*")]) == 1
    until(lambda: cluster.state(first) == "COMPLETED", END_S, "the first task ends")
    assert "job spirals: running" in cluster.rankdeck("status", "--slurm", array, codes=(0, 10))
    cluster.run("scancel", last)
    until(lambda: cluster.state(last) == "CANCELLED", SAVE_S, "the last task ends")
    told = cluster.rankdeck("status", "--slurm", array, codes=(2,))
    assert f"Slurm job {array} is 2 jobs: {first} COMPLETED, {last} CANCELLED" in told


@pytest.mark.slow
def test_a_step_of_a_heterogeneous_job_is_found_by_each_of_its_components(cluster: SlurmCluster) -> None:
    (cluster.home / "train.py").write_text(ENGINE)
    second = f"#SBATCH --nodes=1 --nodelist=h1\n#SBATCH hetjob\n#SBATCH --nodes=1 --nodelist=h2\n{RUN}"
    job_id = cluster.submit(second.replace("srun ", "srun --het-group=1 ", 1))
    until_it_trains(cluster, job_id)

    for typed in (job_id, f"{job_id}+0", f"{job_id}+1"):
        assert "rank 0 on h2: running" in cluster.rankdeck("status", "--slurm", typed, codes=(0, 10))


@pytest.mark.slow
def test_the_time_limit_leaves_a_checkpoint(cluster: SlurmCluster) -> None:
    job_id = training(cluster, "--time=1")
    console = attached(cluster, job_id)
    before = checkpoints(cluster)

    said, _ = console.communicate(timeout=120.0)

    assert said.startswith("job spirals: succeeded"), "the engine has ended it before Slurm's signal"
    until(lambda: cluster.state(job_id) != "RUNNING" and nothing_is_left(cluster), END_S, "all is over")
    assert len(set(checkpoints(cluster)) - set(before)) == 1


@pytest.mark.slow
def test_two_users_share_nodes_and_each_watches_their_own_job(cluster: SlurmCluster) -> None:
    alice = cluster.add_user()
    hers = training(alice, "--cpus-per-task=1")
    roots = training(cluster, "--cpus-per-task=1")

    assert "job spirals: running" in alice.rankdeck("status", "--slurm", hers, codes=(0, 10))
    assert "job spirals: running" in cluster.rankdeck("status", "--slurm", roots, codes=(0, 10))
    assert f"Slurm job {hers} is a job of alice" in cluster.rankdeck("status", "--slurm", hers, codes=(3,))
    assert f"Slurm job {roots} is a job of root" in alice.rankdeck("stop", "--slurm", roots, codes=(3,))

    alice.run("scancel", hers)
    until(lambda: cluster.state(hers) == "CANCELLED", END_S, "hers ends")
    assert cluster.state(roots) == "RUNNING"
    assert checkpoints(alice)


@pytest.mark.slow
def test_two_jobs_share_a_node(cluster: SlurmCluster) -> None:
    first = training(cluster, "--cpus-per-task=1")
    (cluster.home / "second").mkdir()
    script = f"cd second && ln -s ../train.py . && {RUN.replace('spirals', 'second')}"
    second = cluster.submit(script, "--nodes=2", "--cpus-per-task=1")
    until_it_trains(cluster, second)

    # Two jobs on the cores of one: a rank may be shown as slow.
    assert "job spirals: running" in cluster.rankdeck("status", "--slurm", first, codes=(0, 10))
    assert "job second: running" in cluster.rankdeck("status", "--slurm", second, codes=(0, 10))
    cluster.run("scancel", first, second)
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")


def step_of(cluster: SlurmCluster, job_id: str) -> int:
    """Return the lowest step of the ranks; -1 while a console cannot see one."""
    printed = cluster.rankdeck("status", "--slurm", job_id, "--json", codes=tuple(range(20)))
    ranks = json.loads(printed.splitlines()[0])["ranks"] if printed.startswith("{") else []
    return min((-1 if rank["step"] is None else int(rank["step"]) for rank in ranks), default=-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", "relay"])
def test_the_job_goes_on_when_the_relay_or_the_agent_of_the_first_node_is_killed(
    cluster: SlurmCluster, name: str
) -> None:
    job_id = training(cluster)
    before = step_of(cluster, job_id)

    cluster.run(
        "pkill", "-KILL", "-f", {"agent": "agent serve --relay", "relay": "agent relay --listen"}[name], host="h1"
    )

    said = f"the {name} of this node was killed by SIGKILL: starting another"
    until(lambda: said in cluster.output(job_id), END_S, "it is told")
    until(lambda: step_of(cluster, job_id) > before + 20, START_S, "a console sees that it goes on")
    cluster.run("scancel", job_id)
    until(lambda: cluster.state(job_id) == "CANCELLED" and nothing_is_left(cluster), SAVE_S + END_S, "all is over")
    assert checkpoints(cluster)[-1] > before


@pytest.mark.slow
def test_the_step_ends_when_the_agent_of_its_first_node_ends(cluster: SlurmCluster) -> None:
    job_id = training(cluster)

    directory = cluster.home / f".local/state/rankdeck/h1-slurm-{job_id}"
    cluster.run(sys.executable, "-P", "-m", "agent", "shutdown", "--dir", str(directory), host="h1")
    until(lambda: cluster.state(job_id) == "COMPLETED", START_S, f"job {job_id} ends")

    assert "the agent of this node has ended" in cluster.output(job_id)
    assert "srun ended with 0" not in cluster.output(job_id)
    until(lambda: nothing_is_left(cluster), END_S, "nothing is left")


@pytest.mark.slow
def test_agents_of_other_nodes_end_after_the_first_task_was_killed(cluster: SlurmCluster) -> None:
    job_id = training(cluster)

    cluster.run("pkill", "-KILL", "-f", "app run --nproc-per-node", host="h1")

    # Where the ranks have stopped at an agreed step, their launcher waits for the other node's as long as for a save.
    until(lambda: nothing_is_left(cluster), SAVE_S + END_S, "nothing is left")
    cluster.run("scancel", job_id)


def test_several_tasks_on_a_node_are_refused_once(cluster: SlurmCluster) -> None:
    said = cluster.run("srun", "-N2", "-n4", sys.executable, "-P", "-m", "app", "run", "train.py", codes=(2,))

    assert said.count("rankdeck: srun starts 4 tasks on 2 nodes") == 1
    assert "srun --ntasks-per-node=1 rankdeck run" in said
