"""Named barriers, where ranks meet or wait for the first one: errors name who is missing, where it is, and why.

    barrier("epoch end", timeout_s=600)
    texts = exchange("settings", my_text)
    with local_master_first("corpus"): ...          # the first rank of each node downloads, the others find it done
    @rank_zero_only / only_on_master()              # what needs every rank raises in there, instead of hanging

A barrier is made of a few keys in the job's store and is no collective: it costs a tenth to a half of
`dist.barrier()` on gloo, has a time-out of its own, works the same beside NCCL, and does not wait for work queued on
an accelerator. Every rank that gives up names all ranks that are missing, with the line each stands at; ranks that can
never come, because they have ended or wait elsewhere, are an error within seconds, whatever the time-out. A rank that
is slow, silent or stopped is waited for.

For that one thread a process (`ddpcore.barriers.heartbeat`) publishes where this rank is, from its first barrier
on, or from `announce`. With it a rank has three connections to the store: torch's, the barriers', the thread's.
"""

from __future__ import annotations

from ddpcore.arguments import check_is, check_number, check_text
from ddpcore.barriers import journal
from ddpcore.barriers.open_session import current_session, end_session
from ddpcore.barriers.rank_status import BarrierKind
from ddpcore.barriers.store_barrier import pass_barrier
from ddpcore.errors import BarrierUseError


def barrier(label: str, timeout_s: float = 1800.0) -> None:
    """Wait until every rank has called `barrier` with this label as often as this one has.

    Blocks; any thread, but only the main thread's calls are shown in the console. Without a process group, or alone in
    it, it returns at once.

    Args:
        label: What people read in the console and in errors: the same on every rank, and one for a place in the
            program, not one for each step.
        timeout_s: How long to wait for the others; `math.inf` for as long as it takes.

    Raises:
        BarrierTimeoutError: Some ranks did not come; it names them, and where they are.
        BarrierDeadlockError: Some ranks can never come. It is a `BarrierTimeoutError`, raised early.
        BarrierUseError: Inside a block that only one rank runs, or in a forked child.
        StoreLostError: The job's store is gone.
    """
    _check(label, timeout_s)
    session = current_session()
    if session is not None and not journal.is_left_out():
        pass_barrier(session, BarrierKind.BARRIER, label, timeout_s)


def exchange(label: str, value: str, timeout_s: float = 1800.0) -> list[str]:
    """Meet as at a `barrier`, and return what every rank has brought, in the order of ranks.

    For short texts that ranks must agree on: 1 MiB each, 4 MiB together. Blocks. Without a process group it returns
    `[value]`.

    Args:
        label: As of `barrier`; a barrier of the same name is another one.
        value: This rank's text.
        timeout_s: How long to wait for the others.

    Raises:
        BarrierTimeoutError: Some ranks did not come; it names them, and where they are.
        BarrierDeadlockError: Some ranks can never come. It is a `BarrierTimeoutError`, raised early.
        BarrierUseError: As of `barrier`, or the texts are too large.
        StoreLostError: The job's store is gone.
    """
    _check(label, timeout_s)
    check_is(BarrierUseError, "value", value, str, "a text")
    session = current_session()
    return [value] if session is None else pass_barrier(session, BarrierKind.EXCHANGE, label, timeout_s, value)


def announce() -> None:
    """Publish where this rank is from now on, not only from its first barrier on. Without a group: nothing."""
    current_session()


def leave() -> None:
    """Leave the barriers: ranks that wait for this one, now or later, get an error immediately."""
    end_session()


def _check(label: str, timeout_s: float) -> None:
    check_text(BarrierUseError, "label", label)
    check_number(BarrierUseError, "timeout_s", timeout_s, wanted="a number above 0, of seconds")
