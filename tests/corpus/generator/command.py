"""`python -m tests.corpus --generated N`: plays stories on some processes and prints the figures and the failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from typing import TYPE_CHECKING, TypeVar

from tests.corpus.generator import causes, ends
from tests.corpus.generator.lives import play
from tests.corpus.generator.score import Grade, table
from tests.corpus.generator.shrinking import entry, shrink
from tests.corpus.generator.stories import story_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from tests.corpus.generator.score import Result

T = TypeVar("T", causes.Outcome, ends.Outcome)

STRIDE = 1_000_000
"""Between the seeds of two runs: their stories do not overlap."""


def seeds_of(seed: int, number: int) -> range:
    """Return the seeds of a run's stories."""
    return range(seed * STRIDE, seed * STRIDE + number)


def play_seed(seed: int) -> tuple[int, Result]:
    """Play the story of a seed."""
    return seed, play(story_of(seed))


def play_all(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, Result]]:
    """Play stories on some processes, in the order in which they are done."""
    with multiprocessing.get_context("fork").Pool(jobs, initializer=_leave_interrupts_to_the_parent) as pool:
        yield from pool.imap_unordered(play_seed, seeds, chunksize=1)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def reproduction(seed: int) -> str:
    """Return the command that plays one story again."""
    return f"python -m tests.corpus --story {seed}"


def main(number: int, seed: int, jobs: int) -> None:
    """Play and print; who stops it (control-C, SIGTERM, `timeout`) gets the figures of the stories played so far."""
    begun_s = time.monotonic()
    results: list[Result] = []
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        for at, result in play_all(seeds_of(seed, number), jobs):
            results.append(result)
            if result.grade is not Grade.RIGHT:
                print(describe(at, result), flush=True)  # noqa: T201 - what the command is for
    print(*table(results), sep="\n")  # noqa: T201
    print(f"n = {len(results)} of {number} in {time.monotonic() - begun_s:.0f} s, seed {seed}")  # noqa: T201


def main_of_shrinking(seed: int) -> None:
    """Shrink the story of a seed, if it fails, and print it as a line to keep."""
    small = shrink(story_of(seed))
    result = play(small)
    print(result.grade.value, result.why, *result.said, entry(small, f"story {seed}"), sep="\n")  # noqa: T201


def main_of_one(seed: int) -> None:
    """Play the story of a seed, and print all of it."""
    story = story_of(seed)
    result = play(story)
    print(story, result.grade.value, result.why, *result.said, sep="\n")  # noqa: T201


def main_of_causes(number: int, seed: int, jobs: int) -> None:
    """Play runs with a slow rank, and print those with a cause that is not named or false, and the figures."""
    outcomes = _outcomes(play_causes, seeds_of(seed, number), jobs)
    print(*causes.table(outcomes), sep="\n")  # noqa: T201 - what the command is for


def main_of_ends(number: int, seed: int, jobs: int) -> None:
    """Play runs in which a rank ends, and print those that are named wrong, and the figures."""
    outcomes = _outcomes(play_end, seeds_of(seed, number), jobs)
    print(*ends.table(outcomes), sep="\n")  # noqa: T201 - what the command is for


def _outcomes(play_run: Callable[[int], T], seeds: Iterable[int], jobs: int) -> list[T]:
    """Play runs on some processes, and print those that went wrong as they come."""
    outcomes: list[T] = []
    with multiprocessing.get_context("fork").Pool(jobs, initializer=_leave_interrupts_to_the_parent) as pool:
        for outcome in pool.imap_unordered(play_run, seeds, chunksize=1):
            outcomes.append(outcome)
            if not outcome.is_right:
                print(outcome, flush=True)  # noqa: T201 - what the command is for
    return outcomes


def play_causes(seed: int) -> causes.Outcome:
    """Play the run of a seed."""
    return causes.play(causes.run_of(seed))


def play_end(seed: int) -> ends.Outcome:
    """Play the run of a seed in which a rank ends."""
    return ends.play(ends.run_of(seed))


def describe(seed: int, result: Result) -> str:
    """Return a failing story in a few lines."""
    story = result.story
    faults = "; ".join(
        f"{fault.kind.value} at {fault.rank}, step {fault.step}, place {fault.place}" for fault in story.faults
    )
    size = f"{story.shape.num_nodes}x{story.shape.ranks_per_node} {story.shape.semantics.value}"
    said = " | ".join(result.said)
    why = f"{faults} {result.why}"
    return f"{result.grade.value:12} {size}: {why}\n    {said}\n    {reproduction(seed)}"
