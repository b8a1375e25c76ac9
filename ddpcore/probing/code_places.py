"""Where code lies that is not the user's, and what lines a thread stands at. Torch-free, as the probe is."""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.probing.stack import MAX_REMEMBERED_FRAMES, SHADOW_WEIGHT, CodeRoots, FrameKind, Reading, StackReader
from ddpcore.wire import Phase, Place

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from ddpcore.probing.samples import StackLine

MAX_FRAMES = 200
"""Innermost frames looked at: a deep recursion is not walked to its root ten times a second."""

_COLLECTION_CAN_DEADLOCK = sys.version_info < (3, 11, 9)

_SILENT = FrameKind(0, Phase.OTHER, is_user=False, file="", function="")
"""Of every frame that says nothing, so that most need no look at what they are."""

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
            return (file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ("", 0, "")


def is_own(file: str) -> bool:
    """Say whether code of this file is ddpcore's own; its examples stand for a user's."""
    return file.startswith(_OWN) and not file.startswith(_OWN_EXAMPLES)


def stack_of(thread_id: int) -> list[StackLine]:
    """Return a thread's innermost frames. No frame is kept: it would keep the program's tensors alive."""
    return _lines(current_frames().get(thread_id))


class StackWalk:
    """Reads what a thread's stack says, several times a second: what `StackReader.read` says of `stack_of`, for less.

    No line is looked up but the place's, and code that has been met is known by its id, so that nothing of it is
    touched again: in training all that is touched has to come from memory.

    Args:
        roots: Where code lies that is not the user's.
    """

    def __init__(self, roots: CodeRoots) -> None:
        self._reader = StackReader(roots)
        self._kinds: dict[int, FrameKind] = {}
        """By `id()` of the code."""
        self._met: list[CodeType] = []
        """Kept alive, or another's code could get the id of one of them."""

    def read(self, thread_id: int) -> Reading:
        """Return phase and place of a thread. No frame is kept."""
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
                heaviness, told, is_user, file, function = kind
                if heaviness > weight:
                    weight, phase = heaviness, told
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

    Functions have their class before them. The threads run on meanwhile, so each stack is of its own moment.
    """
    stacks: dict[int, tuple[list[StackLine], bool]] = {}
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
    """Return each thread's innermost frame.

    Source: https://github.com/python/cpython/issues/106883. Before Python 3.11.9 a garbage collection within the call
    can stop the whole process for ever: it may let another thread run, which may begin or end a third one, and for that
    needs a lock that this call holds.
    """
    if not _COLLECTION_CAN_DEADLOCK or not gc.isenabled():
        return sys._current_frames()  # noqa: SLF001 - the documented way
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 - the documented way
    finally:
        gc.enable()


def _spellings(directory: Path) -> tuple[str, ...]:
    """Return a directory as code objects may name it: as it was imported, and with links resolved."""
    return tuple(dict.fromkeys((f"{directory}/", f"{directory.resolve()}/")))
