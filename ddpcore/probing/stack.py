"""What the main thread's stack says: the phase of training it is in, and the line of the user's program it stands at.

Pure. Asked several times a second in every rank, so each (file, function) is classified once and remembered.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ddpcore.wire import Phase, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.probing.samples import StackLine

MAX_REMEMBERED_FRAMES = 4096
"""Programs that compile code at run time make new file names for ever; the memory of them is bounded."""

_COMPILED = "/torchinductor_"
"""In the path of what torch.compile has written, TORCHINDUCTOR_CACHE_DIR aside. Source: torch 2.13,
`torch._inductor.runtime.cache_dir_utils.default_cache_dir`."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
"""What torch.compile calls the rest of a function behind a break of its graph. Source: torch 2.13,
`torch._dynamo.resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX`."""

_MAX_FILE_CHARS = 4096
_MAX_FUNCTION_CHARS = 256


class CodeRoots(msgspec.Struct, frozen=True):
    """Where code lies that is not the user's."""

    torch: tuple[str, ...]
    """The directory of torch, in every spelling (each with a trailing slash)."""
    ddpcore: tuple[str, ...]
    libraries: tuple[str, ...]
    """The standard library and site-packages."""
    main_file: str = ""
    """`__main__.__file__`."""


class Reading(NamedTuple):
    """What one stack says."""

    phase: Phase
    """`OTHER` when nothing in the stack tells."""
    place: Place | None
    is_shadowing: bool = False
    """The rank has no input left and only answers the others' collectives (`Join`)."""


class _Rule(NamedTuple):
    path: str
    """Below torch's directory; one that ends in a slash stands for everything in it."""
    functions: frozenset[str]
    """Empty means any."""
    weight: int
    phase: Phase


class FrameKind(NamedTuple):
    """What a frame says whatever line it stands at."""

    weight: int
    phase: Phase
    is_user: bool
    file: str
    function: str


def _rule(path: str, weight: int, phase: Phase, *functions: str) -> _Rule:
    return _Rule(path, frozenset(functions), weight, phase)


SHADOW_WEIGHT = 7
"""Of a rank that is in `Join`'s end: until the others are there too, it calls what they call."""

# A heavier frame decides wherever it stands in the stack; among equals the innermost does. So a forward recomputed
# inside backward is backward, a dataset that runs a module is data, and a closure's forward inside optimizer.step is
# forward. Rendezvous outweighs all: it is made of collectives, but nobody trains yet.
_TORCH_RULES = (
    _rule("nn/modules/module.py", 1, Phase.FORWARD, "_call_impl", "_wrapped_call_impl"),
    _rule("nn/functional.py", 1, Phase.FORWARD),
    _rule("optim/", 1, Phase.OPTIMIZER),
    _rule("amp/grad_scaler.py", 1, Phase.OPTIMIZER),
    _rule("nn/utils/clip_grad.py", 1, Phase.OPTIMIZER),
    _rule("serialization.py", 2, Phase.CHECKPOINT, "save", "_save", "_legacy_save"),
    _rule("distributed/checkpoint/", 2, Phase.CHECKPOINT),
    _rule("utils/data/", 3, Phase.DATA),
    _rule("distributed/distributed_c10d.py", 6, Phase.JOINING, "init_process_group"),
    _rule("distributed/rendezvous.py", 6, Phase.JOINING),
    _rule("distributed/distributed_c10d.py", 4, Phase.BARRIER),
    _rule("distributed/_functional_collectives.py", 4, Phase.BARRIER),
    _rule("_tensor.py", 5, Phase.BACKWARD, "backward"),
    _rule("autograd/__init__.py", 5, Phase.BACKWARD, "backward", "grad"),
    _rule("autograd/graph.py", 5, Phase.BACKWARD, "_engine_run_backward"),
    _rule("distributed/algorithms/join.py", SHADOW_WEIGHT, Phase.OTHER, "__exit__"),
)
_DDPCORE_RULES = (
    *(_rule(f"barriers/{file}.py", 4, Phase.BARRIER) for file in ("gates", "gate", "first_one_first")),
    _rule("process_group/opening.py", 6, Phase.JOINING),
)

_EXAMPLES = "examples/"
"""Programs below ddpcore that stand for a user's own."""


class StackReader:
    """Reads stacks of one process.

    Args:
        roots: Where code lies that is not the user's.
    """

    def __init__(self, roots: CodeRoots) -> None:
        self._roots = roots
        self._kinds: dict[tuple[str, str], FrameKind] = {}

    def read(self, stack: Sequence[StackLine]) -> Reading:
        """Return phase and place of a stack, innermost frame first."""
        kinds = self._kinds
        phase, weight = Phase.OTHER, 0
        place: Place | None = None
        for file, line, function in stack:
            kind = kinds.get((file, function)) or self.kind_of(file, function)
            if kind.weight > weight:
                weight, phase = kind.weight, kind.phase
            if place is None and kind.is_user:
                place = Place(file=kind.file, line=line, function=kind.function)
        return Reading(phase, place or self._main_place(stack), weight == SHADOW_WEIGHT)

    def is_own(self, file: str, function: str) -> bool:
        """Say whether a frame is the user's own program, which may itself be a library."""
        return self.kind_of(file, function).is_user or file == self._roots.main_file

    def kind_of(self, file: str, function: str) -> FrameKind:
        """Return what a frame says whatever line it stands at."""
        return self._kinds.get((file, function)) or self._classify(file, function)

    def _main_place(self, stack: Sequence[StackLine]) -> Place | None:
        """Return the script's own line in a program that is itself a library (`-m installed.package`)."""
        outermost: StackLine | None = None
        for entry in stack:
            if entry[0] == self._roots.main_file:
                return self._place(entry)
            if not entry[0].startswith("<frozen"):
                outermost = entry
        if outermost is None or _below(outermost[0], self._roots.ddpcore) is not None:
            # Only the probe's own exit is left of the program.
            return None
        return self._place(outermost)

    def _place(self, entry: StackLine) -> Place:
        file, line, function = entry
        kind = self.kind_of(file, function)
        return Place(file=kind.file, line=line, function=kind.function)

    def _classify(self, file: str, function: str) -> FrameKind:
        if len(self._kinds) >= MAX_REMEMBERED_FRAMES:
            self._kinds.clear()
        weight, phase, is_user = self._judge(file, function)
        resumed = _RESUMED.fullmatch(function)
        shown = resumed[1] if resumed else function
        kind = FrameKind(weight, phase, is_user, sendable(file, _MAX_FILE_CHARS), sendable(shown, _MAX_FUNCTION_CHARS))
        self._kinds[file, function] = kind
        return kind

    def _judge(self, file: str, function: str) -> tuple[int, Phase, bool]:
        """Return weight, phase, and whether the frame is the user's."""
        below_torch = _below(file, self._roots.torch)
        if below_torch is not None:
            return *_match(_TORCH_RULES, below_torch, function), False
        below_ddpcore = _below(file, self._roots.ddpcore)
        if below_ddpcore is not None:
            is_example = below_ddpcore.startswith(_EXAMPLES)
            return *_match(_DDPCORE_RULES, below_ddpcore, function), is_example
        # "<string>" and its like are generated code: dataclasses, namedtuple, attrs.
        is_generated = file.startswith("<") or _COMPILED in file
        is_library = is_generated or _below(file, self._roots.libraries) is not None
        return 0, Phase.OTHER, not is_library


def sendable(text: str, max_chars: int) -> str:
    """Return `text` as UTF-8 can carry it, cut to `max_chars`; an undecodable file name holds lone surrogates."""
    return text[:max_chars] if text.isascii() else text.encode(errors="replace").decode()[:max_chars]


def _below(file: str, roots: tuple[str, ...]) -> str | None:
    """Return the part of `file` below the first root that holds it."""
    for root in roots:
        if file.startswith(root):
            return file[len(root) :]
    return None


def _match(rules: tuple[_Rule, ...], path: str, function: str) -> tuple[int, Phase]:
    for rule in rules:
        is_here = path.startswith(rule.path) if rule.path.endswith("/") else path == rule.path
        if is_here and (not rule.functions or function in rule.functions):
            return rule.weight, rule.phase
    return 0, Phase.OTHER
