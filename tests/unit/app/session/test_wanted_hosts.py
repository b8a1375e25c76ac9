"""How many ranks the look at hosts before a job counts GPUs for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent.wire.commands import Shown
from app.inventory.inventory import HostEntry
from app.inventory.program import Again
from app.preflight.comparison import compare
from app.session.hosts import HostDoctor, wanted_of
from app.session.remote_job import RunRequest
from tests.support.examinations import H1, H2, answers
from tests.support.jobs import make_spec
from tests.support.plain_hosts import these

HOSTS = these()._replace(entries=(HostEntry(H1, num_ranks=16), HostEntry(H2, num_ranks=16)))
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(("env", "is_well"), [((), False), ((("A", "b"),), False), (((VISIBLE, ""),), True)])
def test_a_job_without_gpus_starts_on_hosts_with_fewer_gpus_than_ranks(env: Any, is_well: bool) -> None:
    wanted = wanted_of(HOSTS, RunRequest(("train.py",), "train", num_ranks=16, env=env))

    found = compare([answers(one.host, num_ranks=one.num_ranks) for one in wanted])

    assert (found.problems == []) == is_well


@pytest.mark.parametrize(("env", "num_ranks"), [({}, 2), ({VISIBLE: "0,1"}, None)])
async def test_a_restart_keeps_what_its_ranks_see(env: dict[str, str], num_ranks: int | None) -> None:
    async def ask(*_: object) -> Shown:
        return Shown(make_spec(env=env), "/logs", 29_500)

    doctor = HostDoctor(HOSTS, fleet=lambda: SimpleNamespace(ask=ask))  # type: ignore[arg-type,return-value]

    found = await doctor._wanted_again(Again("train"), wanted_of(HOSTS))

    assert [one.num_ranks for one in found] == [num_ranks, num_ranks]
