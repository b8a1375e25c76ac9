"""Whatever faults there are, and whenever they come: each strikes its own rank, once, at its step or soon after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpcore.probe.faults import StepFaults
from ddpcore.wire import Fault, FaultKind

RANK = 2
FAULTS = st.lists(
    st.builds(
        Fault,
        kind=st.sampled_from(FaultKind),
        rank=st.integers(RANK - 1, RANK),
        at_step=st.none() | st.integers(0, 30),
        factor=st.floats(1.0, 1000.0),  # tells most of them apart
    ),
    max_size=6,
    unique=True,
)


@given(FAULTS, st.lists(st.tuples(FAULTS, st.integers(1, 5)), min_size=1, max_size=12))
def test_each_fault_of_the_rank_strikes_once_and_not_before_its_step(
    first: list[Fault], rounds: list[tuple[list[Fault], int]]
) -> None:
    faults = StepFaults(first, RANK)
    step = 0
    struck: list[tuple[Fault, int]] = []
    owed = [fault for fault in first if fault.rank == RANK and (fault.at_step is None or fault.at_step > 0)]
    for arrived, num_steps in rounds:
        for fault in arrived:
            faults.add(fault)
        owed += [fault for fault in arrived if fault.rank == RANK]
        late = [fault for fault in arrived if fault.at_step is not None and fault.at_step <= step]
        step += num_steps
        due = faults.due(step)
        assert all(fault.rank == RANK for fault in due)
        assert all(fault.at_step is None or fault.at_step <= step for fault in due)
        assert sum(fault.at_step is None for fault in due) >= sum(fault.rank == RANK for fault in late)
        struck += [(fault, step) for fault in due]

    assert len(struck) <= len(owed)
    pending = [fault for fault in owed if fault.at_step is not None and fault.at_step > step]
    if rounds[0][1] == 1:  # the first report is of the first step: nothing has gone by unseen
        expected = [fault for fault in owed if fault not in pending]
        assert sorted(map(_but_its_step, [fault for fault, _ in struck])) == sorted(map(_but_its_step, expected))


def _but_its_step(fault: Fault) -> tuple[str, float]:
    """Return what a fault keeps when it comes too late for its step."""
    return fault.kind.value, fault.factor
