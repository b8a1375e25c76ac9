"""Sources and destinations of NCCL's calls, which no recorder holds."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from ddpcore.probe.gpu import NCCL
from ddpcore.probe.program_calls import MAX_CALLS, CallRoots, _noted
from ddpcore.probe.samples import GroupMembers, RecorderDump, RecorderEntry
from ddpcore.wire import DEFAULT_GROUP

MEMBERS = {DEFAULT_GROUP: GroupMembers((0, 1, 2, 3)), "pair": GroupMembers((2, 3))}


def entry(called_us: int, op: str = "broadcast", group: str = DEFAULT_GROUP) -> RecorderEntry:
    """Return a call as NCCL's recorder has it."""
    return RecorderEntry((NCCL, 0), group, 7, f"nccl:{op}", ((4,),), False, False, called_us)


def roots_of(roots: CallRoots, *entries: RecorderEntry) -> list[int | None]:
    """Return the roots that are known of a ring."""
    return [one.root for one in roots.with_roots(RecorderDump(entries, {}), MEMBERS).entries]


def test_a_call_that_was_recorded_while_the_method_ran_has_its_root_as_a_rank_of_the_job() -> None:
    roots = CallRoots()
    roots.note("broadcast", DEFAULT_GROUP, 1, 100_000, 200_000)
    roots.note("reduce", "pair", 1, 300_000, 400_000)
    assert roots_of(roots, entry(150), entry(350, "reduce", "pair")) == [1, 3]


def test_calls_at_another_time_of_another_group_or_operation_have_none() -> None:
    roots = CallRoots()
    roots.note("broadcast", DEFAULT_GROUP, 1, 100_000, 200_000)
    # DDP broadcasts its buffers in C++, at another time.
    assert roots_of(roots, entry(250), entry(150, group="pair"), entry(150, "reduce"), entry(150, "all_reduce")) == (
        [None] * 4
    )


def test_a_root_that_is_no_member_and_a_group_that_is_gone_are_not_known() -> None:
    roots = CallRoots()
    roots.note("broadcast", "pair", 2, 100_000, 200_000)
    roots.note("broadcast", "gone", 0, 100_000, 200_000)
    assert roots_of(roots, entry(150, group="pair"), entry(150, group="gone")) == [None, None]


def test_only_the_latest_calls_are_kept() -> None:
    roots = CallRoots()
    for number in range(MAX_CALLS + 1):
        roots.note("broadcast", DEFAULT_GROUP, 2, 1_000_000 * number, 1_000_000 * number)
    assert roots_of(roots, entry(0), entry(1000), entry(1000 * MAX_CALLS)) == [None, 2, 2]


class Group:
    """What a wrapped method belongs to."""

    group_name = "pair"

    def gather(self, *_tensors: Any) -> str:
        """Return a work."""
        return "work"


def test_a_wrapped_method_returns_what_it_did_and_notes_calls_with_tensors_on_a_device_alone() -> None:
    for is_cpu, known in ((False, 1), (True, 0)):
        roots = CallRoots()
        call = _noted(Group.gather, "gather", roots)
        assert call(Group(), [], [SimpleNamespace(is_cpu=is_cpu)], SimpleNamespace(rootRank=1)) == "work"
        assert len(roots._calls) == known


def test_a_call_in_a_form_that_is_not_torchs_own_goes_through_unnoted() -> None:
    roots = CallRoots()
    assert _noted(Group.gather, "gather", roots)(Group()) == "work"
    assert not roots._calls


DERIVED = """
import datetime, torch, torch.distributed as dist
from ddpcore.probe.program_calls import count_peer_calls, note_roots
assert note_roots() and count_peer_calls()
class Group(dist.ProcessGroup):
    pass
group, gloo = Group(0, 1), dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60))
group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
group.broadcast([torch.ones(2)], dist.BroadcastOptions()).wait()
"""


def test_a_group_whose_class_a_program_has_derived_goes_on_to_call_torchs_methods() -> None:
    subprocess.run([sys.executable, "-c", DERIVED], check=True)
