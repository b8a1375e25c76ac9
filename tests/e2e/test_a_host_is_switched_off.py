"""A host of a job is switched off: commands print what the other host knows, and say what is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import IMPORT_S, Desk, named
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.hosts import Network

HOSTS = ("h1", "h2")
HANG_S = 90.0
TOGETHER = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "begins", flush=True)
while True:
    dist.all_reduce(torch.ones(3))
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_what_the_host_that_answers_knows_is_printed_and_its_lost_peer_is_not_starting(
    network: Network, desk: Desk
) -> None:
    (desk.directory / "train.py").write_text(TOGETHER)
    run = ("run", "--name", "gpt", "--nproc-per-node", "1", "--workdir", str(desk.directory), "--no-doctor")
    code, _, stderr = desk.run(*run, *named(*HOSTS), "--detach", "--", "train.py")
    assert code == 0, stderr

    def are_running() -> bool:
        ranks = desk.json("ranks", *named(*HOSTS), codes=(0, 10))["ranks"]
        return [rank["state"] in {"running", "waiting", "missing"} for rank in ranks] == [True, True]

    until(are_running, IMPORT_S, "both ranks are in their group")

    network["h2"].pull_cable()

    def named_rank() -> dict[str, object]:
        verdicts: list[dict[str, object]] = desk.json("status", *named("h1"), codes=(0, 10))["verdicts"]
        return verdicts[0] if verdicts else {}

    verdict = until(named_rank, HANG_S, "rank 1 is named by the one host that is watched")
    assert (verdict["culprits"], verdict["severity"]) == ([1], "warning")
    assert "no host that is watched here reports it" in str(verdict["text"])

    code, stdout, stderr = desk.run("status", *named(*HOSTS))
    assert (code, stdout.splitlines()[0].startswith("h1: up, h2: lost; CRITICAL")) == (10, True), (stdout, stderr)
    assert "going on without 1 of 2 hosts" in stderr
    code, stdout, _ = desk.run("ranks", *named(*HOSTS), "--json")
    assert (code, [rank["state"] for rank in json.loads(stdout)["ranks"]]) == (10, ["waiting", "lost"])
    assert desk.run("logs", *named(*HOSTS), "--grep", "begins", "-n", "3")[:2] == (0, "h1:r0  rank 0 begins\n")
    code, stdout, stderr = desk.run("events", *named(*HOSTS))
    assert (code, "job gpt: running" in stdout) == (0, True), stdout
    assert ("node h2: not reached" in stdout, "node h2: lost" in stdout) == (True, False), stdout
    assert "without h2: verdicts of that time are judged, and events dated, by the other nodes alone" in stderr
