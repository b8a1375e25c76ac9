"""Plays programs and prints how right what was shown is, by class."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from tests.corpus.reported.faults import FAULTS
from tests.corpus.reported.lives import HEALTHY
from tests.corpus.reported.playing import play
from tests.corpus.reported.scoring import Score, Scored, is_right, score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.corpus.reported.truth import Program

PROGRAMS = FAULTS + HEALTHY


def chosen(names: Sequence[str]) -> list[Program]:
    """Return the programs of these names, or of these classes; of none, all."""
    found = [program for program in PROGRAMS if not names or {program.name, program.fault_class} & set(names)]
    unknown = set(names) - {name for program in found for name in (program.name, program.fault_class)}
    if unknown:
        raise SystemExit(f"no such program or class: {', '.join(sorted(unknown))}")
    return found


def play_and_score(program: Program, patience: float = 1.0) -> Scored:
    """Run one; `patience` is how many times as long a verdict may take as on a quiet machine."""
    try:
        played = play(program, partial(is_right, program), patience)
    except AssertionError as error:
        return Scored(program, Score.SILENT, None, f"not played to its end: {error}")
    return score(program, played, patience)


def line(scored: Scored) -> str:
    """Return one program's line."""
    took = "" if scored.took_s is None else f"{scored.took_s:5.1f} s"
    return f"{scored.score:11}  {scored.program.name:34} {took:8} {scored.reason}".rstrip()


def figures(all_scored: Iterable[Scored]) -> list[str]:
    """Return the table by class, and a line for all."""
    by_class: dict[str, list[Scored]] = {}
    for scored in all_scored:
        by_class.setdefault(scored.program.fault_class, []).append(scored)
    rows = [f"{'':12}" + "".join(f"{name:>12}" for name in ("n", *Score))]
    by_class["all"] = [scored for members in by_class.values() for scored in members]
    for name, members in by_class.items():
        counts = Counter(one.score for one in members)
        rows.append(f"{name:12}{len(members):12}" + "".join(f"{counts[one]:12}" for one in Score))
    return rows
