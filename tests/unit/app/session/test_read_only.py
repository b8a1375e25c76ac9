"""A console that only looks on has no way to do anything to a job."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import UsageError
from app.session.demo import Demo, DemoOptions
from app.session.options import SessionOptions
from ddpcore.wire import Fault, FaultKind


@pytest.mark.parametrize("is_read_only", [False, True])
async def test_control_and_faults_are_there_unless_only_looking_is_allowed(is_read_only: bool) -> None:
    demo = Demo(DemoOptions(num_ranks=1, session=SessionOptions(is_read_only=is_read_only)))
    try:
        assert (demo.control is None) == is_read_only
        assert demo.can_inject == (not is_read_only)
        refusal = "this console only watches" if is_read_only else "no node has rank 0"
        with pytest.raises(UsageError, match=refusal):
            await asyncio.wait_for(demo.inject(Fault(FaultKind.KILL, 0)), 5)
    finally:
        await demo.close()
