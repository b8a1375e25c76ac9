"""Brings the ranks together for a checkpoint, at a store barrier and never in the training's collectives.

`Meeting`: every call of a Checkpointer meets under one label and carries its kind. So ranks that call different things
learn it immediately, and a rank that calls nothing (only rank 0 saves) is named after a minute, instead of a hang.

`Site` and `find_site`: which ranks share a directory. Machines reached by plain SSH often share none: then each keeps a
whole copy. The first rank of every node leaves a file with a name of its own, and all look which of them they see.
Ranks that see the same are one site: its lowest rank leads, its ranks write one copy among them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from ddpcore.agreement import common_problem, difference, ranks_by_value, ranks_text, speakers
from ddpcore.barriers.failure_notice import first_failure
from ddpcore.barriers.named_barriers import exchange
from ddpcore.checkpoint.directory import SEEN, directory_error, make_directory
from ddpcore.errors import (
    BarrierTimeoutError,
    CheckpointCallError,
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointInvalidError,
    RankFailedError,
    StateNotStorableError,
)
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from pathlib import Path

LABEL = "checkpoint"

MAX_LISTING_CHARS = 500_000
"""Characters of all listings where the ranks' states differ; `exchange` carries little more."""

_numbers = count()
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointCallError,
        CheckpointDirectoryError,
        CheckpointInvalidError,
        StateNotStorableError,
    )
}


class Meeting:
    """Store barriers of one Checkpointer."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Ranks that make several in one order have them under the same numbers.
        self._number = next(_numbers)

    def meet(self, call: str, value: dict[str, Any], *, extra_s: float = 0.0) -> list[dict[str, Any]]:
        """Send all ranks a JSON value, and return what each of them sends; blocks until all have arrived.

        `call` is what the program has called, with what has to be the same on all ranks. `extra_s` is added to the
        time-out for ranks that have something to do first. Raises CheckpointCallError if ranks are missing or called
        something else, RankFailedError if ranks have died or left.
        """
        try:
            texts = exchange(LABEL, json.dumps([self._number, call, value]), self._timeout_s + extra_s)
        except BarrierTimeoutError as error:
            # Not of one that has come to the program's end: it has not called, and that is why. Nor of one that has
            # come here, lost its patience before this rank and ended.
            failure = first_failure(0.0, among=error.ended, counts_leaving=False) if error.ended else None
            if failure is not None:
                raise RankFailedError(
                    failure.rank, f"{failure}; so {call}, which needs every rank, cannot be done", failure.trace
                ) from error
            raise CheckpointCallError(
                f"{ranks_text(error.missing)} did not call {call}, which is every rank's work, not only rank 0's: "
                "call it on all ranks, outside of `if rank == 0`; if one is only late, give the Checkpointer a longer "
                f"timeout_s. ({error})",
                error.missing,
            ) from error
        answers = [json.loads(text) for text in texts]
        _check_alike(answers)
        return [value for _, _, value in answers]

    def agree(
        self, call: str, error: CheckpointError | None, value: dict[str, Any], *, extra_s: float = 0.0
    ) -> list[dict[str, Any]]:
        """Meet; if a rank has an error all raise its kind, and name the rank unless all have it. See `meet`."""
        own = None if error is None else {"kind": type(error).__name__, "text": str(error)}
        answers = self.meet(call, {**value, "error": own}, extra_s=extra_s)
        self.raise_common([answer["error"] for answer in answers], error)
        return answers

    @staticmethod
    def raise_common(errors: list[dict[str, str] | None], own: CheckpointError | None) -> None:
        """Raise the error of any rank."""
        if own is not None and all(error == errors[0] for error in errors):
            raise own
        found = [error for error in errors if error is not None]
        if found:
            text = common_problem([error["text"] if error else "" for error in errors])
            raise _KINDS[found[0]["kind"]](text) from own

    def compare(self, call: str, digests: list[str], listing: dict[str, str]) -> None:
        """Raise CheckpointCallError if the ranks' states differ in structure, with the first place where they do.

        `digests` are each rank's, of its listing; `listing` is this rank's.
        """
        odd = speakers(digests)
        if not odd:
            return
        rank = dist.get_rank()
        own = _beginning(listing, MAX_LISTING_CHARS // len(odd)) if rank in odd else None
        answers = self.meet(call, {"listing": own})
        listings = {rank: answers[rank]["listing"] for rank in odd}
        raise CheckpointCallError(
            f"the ranks have different states to save: {difference(digests, listings)}. What differs between ranks "
            "belongs into per_rank"
        )


def _check_alike(answers: list[tuple[int, str, object]]) -> None:
    """Raise if the ranks have not made the same call."""
    calls = [call for _, call, _ in answers]
    if len(set(calls)) == 1:
        # The same method, but of one of several objects?
        calls = [f"{call} of its Checkpointer number {number + 1}" for number, call, _ in answers]
    ranks_of = ranks_by_value(calls)
    if len(ranks_of) > 1:
        raise CheckpointCallError(
            "all ranks have to call the same: "
            + ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in ranks_of.items())
        )


def _beginning(listing: dict[str, str], max_chars: int) -> dict[str, str]:
    """Return as much of a listing as fits."""
    ends = accumulate(len(place) + len(value) + 8 for place, value in listing.items())
    return {place: listing[place] for place, end in zip(listing, ends, strict=True) if end <= max_chars}


class Site(NamedTuple):
    """Ranks that share this rank's directory, sorted; this rank; and the lowest rank of every site."""

    ranks: tuple[int, ...]
    rank: int
    leaders: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """True for the rank that publishes what its site writes."""
        return self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        return self.ranks.index(self.rank)


def find_site(root: Path, meeting: Meeting, call: str) -> Site:
    """Make the directory on every node and find out which ranks share this rank's; every rank calls it, it blocks.

    Raises CheckpointDirectoryError if it cannot be used on some node, or a rank does not see its own node's.
    """
    placement = current_placement()
    # A name that nobody has looked for before: file systems remember for seconds that a name was not there.
    token = meeting.meet(call, {"token": secrets.token_hex(8)})[0]["token"]
    own = root / f"{SEEN}{token}-{placement.rank}" if placement.local_rank == 0 else None
    try:
        meeting.agree(call, _leave(root, own), {})
        seen = _seen(root, token)
        error = None
        if not seen:
            error = CheckpointDirectoryError(
                f"{root} is not what the first rank of this node has under that name: give all ranks one absolute path"
            )
        answers = meeting.agree(call, error, {"leader": min(seen, default=0)})
    finally:
        if own is not None:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
    leaders = [answer["leader"] for answer in answers]
    ranks = [rank for rank, leader in enumerate(leaders) if leader == leaders[placement.rank]]
    return Site(tuple(ranks), placement.rank, tuple(sorted(set(leaders))))


def _leave(root: Path, own: Path | None) -> CheckpointDirectoryError | None:
    try:
        if own is not None:
            make_directory(root)
            own.touch()
    except CheckpointDirectoryError as error:
        return error
    except OSError as error:
        return directory_error(root, error)
    return None


def _seen(root: Path, token: str) -> list[int]:
    prefix = f"{SEEN}{token}-"
    try:
        return [int(path.name.removeprefix(prefix)) for path in root.iterdir() if path.name.startswith(prefix)]
    except OSError:
        return []
