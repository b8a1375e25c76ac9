"""Runs in which a rank ends, and why, drawn by rule: causes of all kinds, and their opposites.

An opposite has the facts of a cause elsewhere, or at another time, and a rank that ends of something else: what is
named then is false. Half of the runs have such facts beside their cause. `end_kinds` has the kinds.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause
from tests.corpus.generator.choices import Seeded
from tests.corpus.generator.end_kinds import BESIDE, ENDS, NCCL_ALONE, OPPOSITES, TIMEOUT_S, Run, Scene, Truth

if TYPE_CHECKING:
    from app.view.rows import VerdictRow

SHAPES = ((1, 2), (2, 2), (1, 4), (2, 1), (2, 4), (3, 2), (4, 2))
AFTER_S = 9.0
"""Played on behind an end: what is named stands, and nothing else comes up."""


@dataclass(frozen=True)
class Outcome:
    """What a run named.

    Attributes:
        named_s: Seconds from the end until all that is true was named; None where it never was, or did not stand.
        false: What was named and is not so.
        standing: Sentence and hint of each verdict at the end.
    """

    run: Run
    named_s: float | None
    false: tuple[str, ...]
    standing: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether all was named, and nothing false."""
        return self.named_s is not None and not self.false


def run_of(seed: int) -> Run:
    """Draw the run of a seed: two of three have a cause."""
    choices = Seeded(seed)
    is_cause = choices.between(0, 2) > 0
    name = list(ENDS)[seed % len(ENDS)] if is_cause else choices.pick(list(OPPOSITES))
    shape = choices.pick([one for one in SHAPES if one[1] > 1] if name in NCCL_ALONE else SHAPES)
    is_lossy = choices.between(0, 3) == 0
    return Run(
        seed=seed,
        name=name,
        is_cause=is_cause,
        shape=shape,
        rank=choices.between(0, shape[0] * shape[1] - 1),
        at_s=choices.between(60, 200) / 10,
        has_nccl=name in NCCL_ALONE or choices.between(0, 1) == 1,
        drop=0.1 if is_lossy else 0.0,
        delay_s=0.3 if is_lossy else 0.01,
        beside=tuple(sorted({choices.pick(list(BESIDE)) for _ in range(2)})) if choices.between(0, 1) else (),
    )


def play(run: Run) -> Outcome:
    """Simulate a run."""
    with tempfile.TemporaryDirectory() as directory:
        scene = Scene(run, Path(directory))
        scene.run(run.at_s)
        for loud in run.beside:
            BESIDE[loud](scene)
        scene.run(scene.choices.pick((0.0, 1.0)) if run.beside else 0.0)
        truth = (ENDS | OPPOSITES)[run.name](scene)
        scene.run(AFTER_S + (TIMEOUT_S if run.has_nccl else 0.0))
        return _judged(scene, truth)


_CLAIMS = (
    (re.compile(r"GPU (\d+) (?:reported|is lost|needs)"), "gpu {}"),
    (re.compile(r"Xid (\d+)"), "xid {}"),
    (re.compile(r"GPU[^;]* is lost"), "lost"),
    (re.compile(r"GPU[^;]* needs a reset"), "reset"),
    (re.compile(r"when the kernel was out of memory|at its limit of memory|since memory was short"), "oom"),
    (re.compile(r"when its cgroup (\S+) was at its limit"), "limit {}"),
    (re.compile(r"by oomd"), "oomd"),
    (re.compile(r"the file system (\S+) is full"), "full {}"),
    (re.compile(r"the file system (\S+) has no inodes"), "inodes {}"),
    (re.compile(r"the quota on (\S+) is used up"), "quota {}"),
    (re.compile(r"an operator had rankdeck"), "rankdeck"),
)


def _in_text(row: VerdictRow) -> set[str]:
    """Return the facts that the sentence of a verdict names."""
    return {label.format(*found.groups()) for claim, label in _CLAIMS for found in claim.finditer(row.text)}


def _in_fields(row: VerdictRow) -> set[str]:
    """Return the facts that `--json` has of a verdict."""
    end = row.end
    found = {"oom"} if row.cause is Cause.OOM else set()
    if end is None:
        return found
    found |= {f"xid {code}" for code in end.xids}
    found |= set() if end.gpu is None else {f"gpu {end.gpu}"}
    found |= {end.gpu_state.removesuffix("_required")} - {"", "ok"}
    found |= {end.sender} - {""}
    if end.memory_limit_bytes is not None:
        found.add(f"limit {'/'.join(end.cgroup.split('/')[1:][-2:])}")
    if end.disk:
        found.add(f"{end.disk_limit.replace('space', 'full')} {end.disk}")
    return found


def _judged(scene: Scene, truth: Truth) -> Outcome:
    false, whole_s = set[str](), list[float]()
    for at_s, row in scene.seen:
        false |= {f"rank {rank}: {row.cause}" for rank in set(row.culprits) - set(truth.ranks)}
        in_text, in_fields = _in_text(row), _in_fields(row)
        false |= (in_text | in_fields) - truth.names
        is_whole = (tuple(row.culprits), row.cause) == (truth.ranks, truth.cause) and truth.names <= in_text & in_fields
        if is_whole and truth.text in row.text and truth.hint in row.hint:
            whole_s.append(at_s)
    slurm = scene.why_slurm_ends()
    if bool(slurm) is not bool(truth.slurm) or truth.slurm not in slurm:
        false.add(f"Slurm: {slurm}")
    end_s = scene.sim.now_s
    stands = not truth.ranks or (bool(whole_s) if truth.is_stopped else end_s in whole_s)
    named_s = max(0.0, min(whole_s, default=0.0) - scene.ended_s) if stands else None
    standing = dict.fromkeys(f"{row.text} -> {row.hint}" for at_s, row in scene.seen if at_s == end_s)
    return Outcome(scene.of, named_s, tuple(sorted(false)), tuple(standing))


def table(outcomes: list[Outcome]) -> list[str]:
    """Return the figures by cause or opposite, as lines."""
    return [
        f"{'cause of an end':58}{'n':>5}{'named':>7}{'s':>7}{'max':>7}{'false':>7}",
        *(_row(name, [one for one in outcomes if one.run.name == name]) for name in ENDS | OPPOSITES),
        _row("all causes", [one for one in outcomes if one.run.is_cause]),
        _row("all opposites", [one for one in outcomes if not one.run.is_cause]),
    ]


def _row(name: str, outcomes: list[Outcome]) -> str:
    took = sorted(one.named_s for one in outcomes if one.named_s is not None)
    seconds = f"{took[len(took) // 2]:7.1f}{took[-1]:7.1f}" if took else f"{'':14}"
    return f"{name:58}{len(outcomes):5}{len(took):7}{seconds}{sum(bool(one.false) for one in outcomes):7}"
