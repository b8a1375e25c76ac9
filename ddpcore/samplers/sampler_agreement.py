"""Do all ranks cut up the same epoch? Asked once at the start, it turns silent nonsense into one error on every rank.

Ranks whose data sets differ in length train on wrong samples, and then hang, since one of them has a step more.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ddpcore.agreement import common_problem, ranks_by_value, ranks_text
from ddpcore.barriers.named_barriers import exchange
from ddpcore.errors import DdpcoreError, SamplerMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LABEL = "samplers agree"

_MAX_SHOWN = 4
"""Number of different answers to one question that an error shows."""


PlannedT = TypeVar("PlannedT", bound="Planned")


class Planned(Protocol):
    """A sampler that describes how it cuts up an epoch."""

    def plan(self) -> dict[str, Any]:
        """Return JSON-able facts that are equal on all ranks, except `rank`, of `num_replicas`."""


def check_same_everywhere(sampler: Planned, timeout_s: float = 1800.0) -> None:
    """Compare this sampler's plan with that of every other rank: order, place in it, batch size, shares.

    Call it on every rank, after a state was loaded and before the first batch; main thread; blocks until all have come.
    Without a process group only the sampler itself is checked.

    Args:
        sampler: This rank's.
        timeout_s: How long to wait for the others.

    Raises:
        SamplerMismatchError: They do not agree; every rank gets the same message, which names ranks and values.
        BarrierTimeoutError: Some ranks did not come; it names them.
        StoreLostError: The job's store is gone.
    """
    make_same_everywhere(lambda: sampler, timeout_s)


def make_same_everywhere(make: Callable[[], PlannedT], timeout_s: float = 1800.0) -> PlannedT:
    """Make a sampler on every rank and return it if all ranks could, and all have made the same one.

        sampler = make_same_everywhere(lambda: ElasticBatchSampler(ShuffledOrder(len(dataset)), 256))

    Where making it fails on one rank only, such as for a data set that is empty there, `check_same_everywhere` would
    leave the others waiting for a rank that has raised; this informs them. Main thread; blocks until all have come.

    Args:
        make: Makes this rank's sampler, and may load its state.
        timeout_s: How long to wait for the others.

    Raises:
        DdpcoreError: As `make` raised it, if it failed alike on all ranks.
        SamplerMismatchError: It failed on some ranks, or the samplers do not agree; the same message on every rank.
        BarrierTimeoutError: Some ranks did not come; it names them.
        StoreLostError: The job's store is gone.
    """
    sampler, failure = None, None
    try:
        sampler = make()
    except DdpcoreError as error:
        failure = error
    answer = {"problem": str(failure)} if sampler is None else {"problem": "", "plan": sampler.plan()}
    answers = [json.loads(text) for text in exchange(_LABEL, json.dumps(answer), timeout_s)]
    problems = [answer["problem"] for answer in answers]
    if failure is not None and len(set(problems)) == 1:
        raise failure
    problem = common_problem(problems)
    if not problem:
        plans = [answer["plan"] for answer in answers]
        problem = find_difference(plans) or find_untaken(plans)
    if problem or sampler is None:
        raise SamplerMismatchError(problem) from failure
    return sampler


def find_difference(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return as text what the plans of ranks 0, 1, ... differ in, or ""."""
    flat = [{**plan, **plan["order"]} for plan in plans]
    names = {name for plan in flat for name in plan} - {"order", "rank"}
    differences = []
    for name in sorted(names):
        ranks_of = ranks_by_value([json.dumps(plan.get(name)) for plan in flat])
        if len(ranks_of) > 1:
            shown = [f"{value} on {ranks_text(ranks)}" for value, ranks in list(ranks_of.items())[:_MAX_SHOWN]]
            more = f" and {len(ranks_of) - _MAX_SHOWN} other values" if len(ranks_of) > _MAX_SHOWN else ""
            differences.append(f"{name} is {', '.join(shown)}{more}")
    if not differences:
        return ""
    return (
        f"the ranks would not train on the same epoch: {'; '.join(differences)}. Give every rank the same data set "
        "(a copy may be incomplete), seed, batch size and weights, and load the same state on every rank"
    )


def find_untaken(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return as text which shares no rank takes although the plans are otherwise equal, or ""."""
    untaken = sorted(set(range(plans[0]["num_replicas"])) - {plan["rank"] for plan in plans})
    if not untaken:
        return ""
    return (
        f"the samplers of {len(plans)} processes are made for {plans[0]['num_replicas']} replicas, and nobody takes "
        f"the samples of {ranks_text(untaken)}: leave rank and num_replicas to the process group"
    )
