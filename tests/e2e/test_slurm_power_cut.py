"""A node of a real Slurm job loses its power: the console shows it first, then why Slurm ends the job."""

from __future__ import annotations

import pytest

from tests.e2e.test_slurm import END_S, attached, nothing_is_left, training, until_printed
from tests.support.slurm import SlurmCluster, require_slurm
from tests.support.waiting import until


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_without_power_is_shown_before_slurm_ends_the_job() -> None:
    require_slurm()
    with SlurmCluster() as cluster:
        job_id = training(cluster, "--no-requeue")
        console = attached(cluster, job_id)

        cluster.network["h2"].cut_power()

        until_printed(console, "h2")
        assert cluster.state(job_id) == "RUNNING", "Slurm takes longer to see it"
        stdout, stderr = console.communicate(timeout=END_S)
        assert "Slurm reports h2 as down" in stderr or "a node has failed" in stdout + stderr
        until(lambda: cluster.state(job_id) == "NODE_FAIL" and nothing_is_left(cluster), END_S, "all is over")

        cluster.boot("h2")
        until(lambda: set(cluster.states().values()) == {"idle"}, END_S, "all nodes are idle")
