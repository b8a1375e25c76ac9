"""Which ranks share a directory. Machines reached by plain SSH often share none: then each keeps a whole copy.

The first rank of every node leaves a file with a name of its own, and all look which of them they see. Ranks that see
the same are one site: its lowest rank leads, its ranks write one copy among them.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.checkpoint.directory import SEEN, directory_error, make_directory
from ddpcore.errors import CheckpointDirectoryError
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from pathlib import Path

    from ddpcore.checkpoint.meeting import Meeting


class Site(NamedTuple):
    """The ranks that share this rank's directory.

    Attributes:
        ranks: Sorted global ranks of this site.
        rank: This one.
        leaders: The lowest rank of every site.
    """

    ranks: tuple[int, ...]
    rank: int
    leaders: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """True for the rank that publishes what its site writes."""
        return self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        """This rank's place within its site."""
        return self.ranks.index(self.rank)


def find_site(root: Path, meeting: Meeting, call: str) -> Site:
    """Make the directory on every node and find out who shares this rank's; every rank calls it, it blocks.

    Raises:
        CheckpointDirectoryError: It cannot be used on some node, or some rank does not see its own node's.
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
