"""Reads a thread's stack: the phase of training it is in, and the line of the user's program where it stands.

`StackReader` is asked several times a second in every rank, so each (file, function) is classified once and remembered.
Its answers depend on its arguments alone. `StackWalk` gives the same answers as `StackReader` for less work.

`CodeRoots` holds where code lies that is not the user's. `stack_of` and `all_stacks` return the lines where threads
stand. The module is torch-free, as the probe is.
"""

from __future__ import annotations

import gc
import os
import re
import site
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ddpcore.wire import Phase, Place

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType


StackLine = tuple[str, int, str]
"""File, line and function of one frame."""

MAX_REMEMBERED_FRAMES = 4096
"""Bound of the memory for frames: programs that compile code at run time make new file names without end."""

_COMPILED = "/torchinductor_"
"""Part of the path of what torch.compile has written, TORCHINDUCTOR_CACHE_DIR aside. Source: torch 2.13,
`torch._inductor.runtime.cache_dir_utils.default_cache_dir`."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
"""What torch.compile calls the rest of a function behind a break of its graph. Source: torch 2.13,
`torch._dynamo.resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX`."""

_MAX_FILE_CHARS = 4096
_MAX_FUNCTION_CHARS = 256


class CodeRoots(msgspec.Struct, frozen=True):
    """Where code lies that is not the user's."""

    torch: tuple[str, ...]
    """Directory of torch, in every spelling (each with a trailing slash)."""
    ddpcore: tuple[str, ...]
    libraries: tuple[str, ...]
    """Directories of the standard library and site-packages."""
    main_file: str = ""
    """`__main__.__file__`."""


class Reading(NamedTuple):
    """What one stack shows."""

    phase: Phase
    """Phase; `OTHER` when nothing in the stack shows one."""
    place: Place | None
    is_shadowing: bool = False
    """True if the rank has no input left and only answers the others' collectives (`Join`)."""


class _Rule(NamedTuple):
    path: str
    """Path below torch's directory; one that ends in a slash stands for everything in it."""
    functions: frozenset[str]
    """Functions; empty means any."""
    weight: int
    phase: Phase


class FrameKind(NamedTuple):
    """What a frame is, whatever line it stands at."""

    weight: int
    phase: Phase
    is_user: bool
    file: str
    function: str


def _rule(path: str, weight: int, phase: Phase, *functions: str) -> _Rule:
    return _Rule(path, frozenset(functions), weight, phase)


SHADOW_WEIGHT = 7
"""Weight of a rank in `Join`'s end: until the others are there too, it calls what they call."""

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
    *(
        _rule(f"barriers/{file}.py", 4, Phase.BARRIER)
        for file in ("named_barriers", "store_barrier", "first_one_first")
    ),
    _rule("process_group/opening.py", 6, Phase.JOINING),
)

_EXAMPLES = "examples/"
"""Programs below ddpcore that stand for a user's own."""


class StackReader:
    """Reads stacks of one process."""

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
        """Return whether a frame is the user's own program, which may itself be a library."""
        return self.kind_of(file, function).is_user or file == self._roots.main_file

    def kind_of(self, file: str, function: str) -> FrameKind:
        """Return what a frame shows, at any of its lines."""
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


MAX_FRAMES = 200
"""Innermost frames looked at: a deep recursion is not walked to its root ten times a second."""

_COLLECTS_IN_CALLS = sys.version_info < (3, 12)
"""Whether garbage may be collected wherever an object is made; from Python 3.12 on it is between two instructions."""

_SILENT = FrameKind(0, Phase.OTHER, is_user=False, file="", function="")
"""Kind of every frame that shows nothing, so that most need no look at what they are."""

_OWN = f"{Path(__file__).parents[1]}/"
_OWN_EXAMPLES = f"{_OWN}examples/"


def code_roots() -> CodeRoots:
    """Return the roots of this process, once its import of torch has begun."""
    torch_file = sys.modules["torch"].__file__ or ""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return CodeRoots(
        torch=_spellings(Path(torch_file).parent),
        ddpcore=_spellings(Path(__file__).parents[1]),
        libraries=tuple(dict.fromkeys(spelling for path in _library_paths() for spelling in _spellings(path))),
        main_file=main or "",
    )


def _library_paths() -> list[Path]:
    """Return where the standard library is, and what was installed: here, for the user, by Debian, or below a venv."""
    paths = sysconfig.get_paths()
    installed = [path for entry in sys.path if (path := Path(entry)).name in {"site-packages", "dist-packages"}]
    known = (Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    # What torch.compile writes is no program of the user's.
    compiled = [Path(cache)] if (cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) else []
    return [*known, Path(site.getusersitepackages()), *installed, *compiled]


def caller_line() -> StackLine:
    """Return the innermost line of the calling thread that is not ddpcore's own: 0.5 us."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect costs a thousand times as much
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own(file):
            return (file, frame.f_lineno, function_of(frame.f_code))
        frame = frame.f_back
    return ("", 0, "")


_HELD = frozenset({"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
"""Names of code that a function holds: from Python 3.12 on only generator expressions have code of their own."""


def function_of(code: CodeType) -> str:
    """Return the function of a frame; of a generator expression or comprehension, the function that holds it."""
    if code.co_name not in _HELD:
        return code.co_name
    holders = [name for name in code.co_qualname.split(".") if name not in _HELD and name != "<locals>"]
    return holders[-1] if holders else "<module>"


def is_own(file: str) -> bool:
    """Return whether code of this file is ddpcore's own; its examples stand for a user's."""
    return file.startswith(_OWN) and not file.startswith(_OWN_EXAMPLES)


class _NoCollection:
    """Holds collections of garbage off in a block, in all threads, where they could end the process; may be nested.

    A collection may let other threads run, amid a call that reads frames: `f_back` then follows a pointer into a stack
    that is gone (a segmentation fault), and `sys._current_frames` can wait for ever for a lock that it holds itself.
    Source: https://github.com/python/cpython/issues/106883; Objects/frameobject.c of Python 3.11, `PyFrame_GetBack`.
    The threshold does it, not `gc.disable`: programs often ask whether the collector is on, and leave it as it was.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: list[int] = []
        """Thresholds of before, the outermost block's first."""
        if _COLLECTS_IN_CALLS:
            # A forked child would have no thread that ends the block.
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release
            )

    def __enter__(self) -> None:
        if _COLLECTS_IN_CALLS:
            self._lock.acquire()
            self._held.append(gc.get_threshold()[0])
            gc.set_threshold(0)

    def __exit__(self, *_: object) -> None:
        if _COLLECTS_IN_CALLS:
            held = self._held.pop()
            if gc.get_threshold()[0] == 0:
                gc.set_threshold(held)
            self._lock.release()


no_collection = _NoCollection()
"""Block in which frames of other threads are read: `with no_collection:`."""


def stack_of(thread_id: int) -> list[StackLine]:
    """Return a thread's innermost frames. No frame is kept: it would keep the program's tensors alive."""
    with no_collection:
        return _lines(current_frames().get(thread_id))


class StackWalk:
    """Reads a thread's stack several times a second: what `StackReader.read` finds in `stack_of`, for less.

    No line is looked up but the place's, and code that has been met is known by its id, so that nothing of it is
    touched again: in training all that is touched has to come from memory.
    """

    def __init__(self, roots: CodeRoots) -> None:
        self._reader = StackReader(roots)
        self._kinds: dict[int, FrameKind] = {}
        """Kinds of frames, by `id()` of the code."""
        self._met: list[CodeType] = []
        """Code objects, kept alive: another's code could get the id of one of them."""

    def read(self, thread_id: int) -> Reading:
        """Return phase and place of a thread. No frame is kept."""
        with no_collection:
            return self._read(thread_id)

    def _read(self, thread_id: int) -> Reading:
        innermost = frame = current_frames().get(thread_id)
        known = self._kinds.get
        phase, weight = Phase.OTHER, 0
        place: Place | None = None
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = known(id(code)) or self._meet(code)
            if kind is not _SILENT:
                heaviness, frame_phase, is_user, file, function = kind
                if heaviness > weight:
                    weight, phase = heaviness, frame_phase
                if is_user and place is None:
                    place = Place(file=file, line=frame.f_lineno or 0, function=function)
            frame = frame.f_back
        # Where no frame is the user's, all of them are needed to find the program.
        if place is None:
            return self._reader.read(_lines(innermost))
        return Reading(phase, place, weight == SHADOW_WEIGHT)

    def _meet(self, code: CodeType) -> FrameKind:
        if len(self._met) >= MAX_REMEMBERED_FRAMES:
            self._kinds.clear()
            self._met.clear()
        kind = self._reader.kind_of(code.co_filename, code.co_name)
        if not (kind.weight or kind.is_user):
            kind = _SILENT
        elif kind.is_user and code.co_name in _HELD:
            kind = self._reader.kind_of(code.co_filename, function_of(code))
        self._met.append(code)
        self._kinds[id(code)] = kind
        return kind


def _lines(frame: FrameType | None) -> list[StackLine]:
    """Return the lines of a stack, from this frame outwards."""
    stack: list[StackLine] = []
    while frame is not None and len(stack) < MAX_FRAMES:
        code = frame.f_code
        stack.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return stack


def all_stacks(max_frames: int) -> dict[int, tuple[list[StackLine], bool]]:
    """Return each thread's innermost frames by its id, and whether there are more: 0.1 ms. No frame is kept.

    Functions have their class before them. The threads keep running, so each stack is of its own moment.
    """
    stacks: dict[int, tuple[list[StackLine], bool]] = {}
    with no_collection:
        for thread_id, innermost in current_frames().items():
            stack: list[StackLine] = []
            frame: FrameType | None = innermost
            while frame is not None and len(stack) < max_frames:
                code = frame.f_code
                stack.append((code.co_filename, frame.f_lineno or 0, code.co_qualname))
                frame = frame.f_back
            stacks[thread_id] = stack, frame is not None
    return stacks


def current_frames() -> dict[int, FrameType]:
    """Return each thread's innermost frame; call it, and read them, in a block of `no_collection`."""
    return sys._current_frames()  # noqa: SLF001 - the documented way


def _spellings(directory: Path) -> tuple[str, ...]:
    """Return a directory as code objects may name it: as it was imported, and with links resolved."""
    return tuple(dict.fromkeys((f"{directory}/", f"{directory.resolve()}/")))
