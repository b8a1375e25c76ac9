"""Loads the same checkpoint on all ranks: the latest that is sound on every rank, or at least on one node.

`Loader`: the leaders list what they have. Then, the latest first, every rank reads and checks the candidate for itself:
a replica has to read all of it anyway, and a checksum holds only for the bytes that this rank has got. If all ranks
accept it, it is loaded; else they drop it, remember why, and take the next.

`send_state` sends a checkpoint's state from a node that has it to those that do not, over a gloo group of its own.
"""

from __future__ import annotations

import json
import logging
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddpcore.agreement import common_problem
from ddpcore.checkpoint.catalog import Published, list_checkpoints
from ddpcore.checkpoint.directory import step_of
from ddpcore.checkpoint.reading import read_manifest
from ddpcore.checkpoint.state_tree import DTYPES, flatten, unflatten
from ddpcore.checkpoint.tensor_files import Contents, bytes_of, read_checkpoint
from ddpcore.errors import CheckpointDirectoryError, CheckpointInvalidError
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpcore.checkpoint.meeting import Meeting, Site

_log = logging.getLogger(__name__)

READ_BYTES_PER_S = 5e6
"""Bytes a second of the slowest disk for which ranks wait while others read."""

MAX_LISTED = 1000
"""Latest checkpoints of a directory that the ranks exchange."""


class Loaded(NamedTuple):
    """Result of `load`: the state as it was saved, on the CPU, and what else was found.

    `per_rank` is None unless every rank has its own. `skipped` are the reasons why newer checkpoints were passed over,
    `invalid` the names of this site's damaged ones.
    """

    step: int
    state: Any
    per_rank: Any
    skipped: tuple[str, ...]
    invalid: frozenset[str]
    since: int


class Loader:
    """One search for a checkpoint. Every rank makes the same calls; `call` is what the program has called."""

    def __init__(self, root: Path, site: Site, meeting: Meeting, call: str) -> None:
        self._root = root
        self._site = site
        self._meeting = meeting
        self._call = call
        self._skipped: list[str] = []
        self._invalid: set[str] = set()

    def load(self, step: int | None) -> Loaded | None:
        """Return the latest sound checkpoint, of this step if one is given; None if there is none at all.

        Raises CheckpointInvalidError if all are damaged, CheckpointDirectoryError if the directory cannot be read.
        """
        for candidate, name_of in self._candidates(step):
            found = self._try(candidate, name_of.get(self._site.ranks[0]))
            if found is not None:
                return found
        if self._skipped:
            what, advice = "no checkpoint", "Move them away to start over"
            if step is not None:
                what = f"no checkpoint of step {step}"
                advice = "Load another one: `python -m ddpcore.checkpoint verify` lists which are sound"
            raise CheckpointInvalidError(
                f"{what} in {self._root} can be used: {'; '.join(self._skipped)}. {advice}", self._skipped
            )
        return None

    def _candidates(self, step: int | None) -> list[tuple[Published, dict[int, str]]]:
        """Return all checkpoints of all sites, latest first, each with its name in the directory of each leader."""
        error: CheckpointDirectoryError | None = None
        published: list[Published] = []
        refused: list[tuple[str, str]] = []
        if self._site.is_leader:
            try:
                listing = list_checkpoints(self._root)
                published = [one for one in listing.published if step in (None, one.step)]
                refused = [(name, why) for name, why in listing.refused.items() if step in (None, step_of(name))]
            except CheckpointDirectoryError as problem:
                error = problem
        listed = {"published": published[:MAX_LISTED], "refused": refused[:MAX_LISTED]}
        answers = self._meeting.agree(self._call, error, listed)
        copies: dict[tuple[int, int, str], dict[int, Published]] = {}
        for leader in self._site.leaders:
            for one in (Published(*fields) for fields in answers[leader]["published"]):
                copies.setdefault((one.sequence, one.step, one.id), {})[leader] = one
            for name, why in answers[leader]["refused"]:
                self._skip(name, why)
        return [
            (next(iter(by_leader.values())), {leader: one.name for leader, one in by_leader.items()})
            for _, by_leader in sorted(copies.items(), reverse=True)
        ]

    def _try(self, candidate: Published, name: str | None) -> Loaded | None:
        """Load one candidate on all ranks, or on none."""
        num_bytes = 0
        if name is not None and self._site.is_leader:
            num_bytes = _size_of(self._root / name)
        sizes = [answer["num_bytes"] for answer in self._meeting.meet(self._call, {"num_bytes": num_bytes})]
        contents, problem, shortage = None, "", ""
        try:
            contents, problem = self._read(candidate, name)
        except MemoryError as error:
            shortage = str(error)
        if problem and name is not None:
            self._invalid.add(name)
        own = contents is not None and contents.per_rank is not None
        answers = self._meeting.meet(
            self._call,
            {
                "problem": problem,
                "has_own": own,
                "shortage": shortage,
                "since": contents.manifest.since if contents is not None else 0,
            },
            extra_s=max(sizes) / READ_BYTES_PER_S,
        )
        shortages = [answer["shortage"] for answer in answers]
        if any(shortages):
            # An older one would not be smaller.
            raise CheckpointInvalidError(f"{candidate.name} is not loaded: {common_problem(shortages)}", shortages)
        problems = [answer["problem"] for answer in answers]
        if all(problems):
            self._skip(candidate.name, common_problem(problems))
            return None
        state = contents.state if contents is not None else None
        if any(problems):
            state = self._fetch(candidate, state, problems)
        all_have_own = all(answer["has_own"] for answer in answers)
        per_rank = contents.per_rank if contents is not None and all_have_own else None
        since = answers[problems.index("")]["since"]
        return Loaded(candidate.step, state, per_rank, tuple(self._skipped), frozenset(self._invalid), since)

    def _read(self, candidate: Published, name: str | None) -> tuple[Contents | None, str]:
        if name is None:
            return None, "this node has no copy of it"
        try:
            contents = read_checkpoint(self._root / name, self._site.rank)
        except CheckpointInvalidError as error:
            return None, str(error)
        manifest = contents.manifest
        if (manifest.step, manifest.sequence, manifest.id) != candidate[1:]:
            return None, "it was replaced by another checkpoint while it was read"
        if manifest.world_size != current_placement().world_size:
            contents = contents._replace(per_rank=None)
        return contents, ""

    def _fetch(self, candidate: Published, state: object, problems: list[str]) -> Any:
        """Send the state from the first rank that has it to those that do not."""
        receivers = [rank for rank, problem in enumerate(problems) if problem]
        source = problems.index("")
        if self._site.rank == 0:
            _log.warning("%s comes from rank %d: %s", candidate.name, source, common_problem(problems))
        state, checksum = send_state(state, source, receivers)
        sums = [answer["checksum"] for answer in self._meeting.meet(self._call, {"checksum": checksum})]
        if any(sums[rank] != sums[source] for rank in receivers):
            raise CheckpointInvalidError(f"the checkpoint was garbled on its way from rank {source}: load it again")
        return state

    def _skip(self, name: str, reason: str) -> None:
        text = f"{name}: {reason}"
        if text not in self._skipped:
            self._skipped.append(text)


def _size_of(path: Path) -> int:
    try:
        return sum(record.bytes for record in read_manifest(path).files.values())
    except CheckpointInvalidError:
        return 0


TIMEOUT = timedelta(minutes=30)
"""Time-out for one tensor, over whatever network joins the nodes."""


def send_state(state: object, source: int, receivers: Sequence[int]) -> tuple[Any, int]:
    """Return the source's state on every receiver, and on both a checksum of it. Every rank calls it; blocks."""
    # The training's own groups stay out of this: work may be pending there. Ranks that need nothing take part, too: a
    # group without them would, beside NCCL, have them alone call a collective (a split without colour).
    group = dist.new_group(timeout=TIMEOUT, backend="gloo")
    rank = dist.get_rank()
    try:
        if rank == source:
            return state, _send(state, source, group)
        received, checksum = _receive(source, group, keeps=rank in receivers)
        return (received, checksum) if rank in receivers else (state, 0)
    finally:
        dist.destroy_process_group(group)


def _send(state: object, source: int, group: Any) -> int:
    flat = flatten(state)
    text = json.dumps([flat.skeleton, flat.specs()]).encode()
    dist.broadcast(torch.tensor([len(text)]), source, group)
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    checksum = zlib.crc32(text)
    for tensor in flat.tensors.values():
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), source, group)
            checksum = zlib.crc32(bytes_of(tensor), checksum)
    return checksum


def _receive(source: int, group: Any, *, keeps: bool) -> tuple[Any, int]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, source, group)
    content = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    text = bytes(bytes_of(content))
    checksum = zlib.crc32(text)
    skeleton, specs = json.loads(text)
    tensors = {}
    for name, dtype, shape in specs:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), source, group)
        if keeps:
            tensors[name] = tensor
            checksum = zlib.crc32(bytes_of(tensor), checksum)
    return (unflatten(skeleton, tensors), checksum) if keeps else (None, 0)
