"""Plays the corpus and prints how right the verdicts are.

`python -m tests.corpus [--seeds N]` plays the scenarios, `--real` the same on real ranks, `--reported [NAME ...]`
programs that users report, `--generated N` stories drawn by rule, `--story SEED` one of those, `--causes N` runs with a
slow rank and why it is slow, `--real-causes [NAME ...]` the same on two real ranks of a quiet machine, `--gpu-causes
[NAME ...]` causes of the GPUs of four real ranks on two hosts of the testbed, `--network-causes [NAME ...]` of the
network of two, `--ends N` runs in which a rank ends and why.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.corpus.generator import command
from tests.corpus.gpu_causes import GPU_CAUSES, GPU_OPPOSITES, play_gpu_cause
from tests.corpus.network_causes import NETWORK_CAUSES, NETWORK_OPPOSITES, play_network_cause
from tests.corpus.real import REAL, play_real
from tests.corpus.real_causes import CAUSES, OPPOSITES, play_cause
from tests.corpus.reported.table import chosen, figures, line, play_and_score
from tests.corpus.scenarios import ALL, Outcome, play

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.corpus.real_causes import RealCause, Told

AnyCause = TypeVar("AnyCause", bound="RealCause[Any]")


def main() -> None:
    """Print a line for each scenario, and the figures of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each scenario")
    parser.add_argument("--real", action="store_true", help="real torchrun ranks instead, once each: some minutes")
    parser.add_argument(
        "--reported", nargs="*", metavar="NAME", help="programs that users report, or classes of them: half an hour"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="times as long as on a quiet machine")
    parser.add_argument("--generated", type=int, nargs="?", const=300, help="play so many stories drawn by rule")
    parser.add_argument("--story", type=int, help="play the story of this seed alone")
    parser.add_argument("--shrink", type=int, help="make the story of this seed as small as it can be while it fails")
    parser.add_argument("--causes", type=int, nargs="?", const=500, help="play so many runs with a slow rank")
    parser.add_argument("--ends", type=int, nargs="?", const=500, help="play so many runs in which a rank ends")
    parser.add_argument(
        "--real-causes", nargs="*", metavar="NAME", help="causes on two real ranks, a quarter of an hour"
    )
    parser.add_argument("--gpu-causes", nargs="*", metavar="NAME", help="causes of GPUs, twenty minutes")
    parser.add_argument("--network-causes", nargs="*", metavar="NAME", help="causes of networks, six minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the generated stories")
    parser.add_argument("--jobs", type=int, default=2, help="processes that play generated stories")
    args = parser.parse_args()
    commands: tuple[tuple[object, Callable[[], None]], ...] = (
        (args.reported, lambda: _play_reported(args.reported, args.patience)),
        (args.real_causes, lambda: _play_causes((*CAUSES, *OPPOSITES), play_cause, args.real_causes, args.patience)),
        (
            args.gpu_causes,
            lambda: _play_causes((*GPU_CAUSES, *GPU_OPPOSITES), play_gpu_cause, args.gpu_causes, args.patience),
        ),
        (
            args.network_causes,
            lambda: _play_causes(
                (*NETWORK_CAUSES, *NETWORK_OPPOSITES), play_network_cause, args.network_causes, args.patience
            ),
        ),
        (args.story, lambda: command.main_of_one(args.story)),
        (args.shrink, lambda: command.main_of_shrinking(args.shrink)),
        (args.causes, lambda: command.main_of_causes(args.causes, args.seed, args.jobs)),
        (args.ends, lambda: command.main_of_ends(args.ends, args.seed, args.jobs)),
        (args.generated, lambda: command.main(args.generated, args.seed, args.jobs)),
    )
    asked = next((play_it for wish, play_it in commands if wish is not None), None)
    if asked is not None:
        asked()
        return
    _play_all(num_seeds=args.seeds, is_real=args.real)


def _play_all(*, num_seeds: int, is_real: bool) -> None:
    outcomes: list[Outcome] = []
    if is_real:
        with tempfile.TemporaryDirectory() as directory:
            for scenario in REAL:
                outcomes.append(play_real(scenario, Path(directory)))
                _print(outcomes[-1:])
    else:
        for simulated in ALL:
            played = [play(simulated, seed) for seed in range(num_seeds)]
            outcomes += played
            _print(played)
    _print_figures(outcomes)


def _play_reported(names: list[str], patience: float) -> None:
    scores = []
    for program in chosen(names):
        scores.append(play_and_score(program, patience))
        print(line(scores[-1]), flush=True)  # noqa: T201 - what the command is for
    print("\n".join(figures(scores)))  # noqa: T201 - as above


def _play_causes(
    causes: Sequence[AnyCause],
    play_one: Callable[[AnyCause, Path, float], Told],
    names: list[str],
    patience: float,
) -> None:
    for cause in causes:
        if not names or cause.name in names:
            with tempfile.TemporaryDirectory() as directory:
                print(play_one(cause, Path(directory), patience), flush=True)  # noqa: T201 - what the command is for


def _print(outcomes: list[Outcome]) -> None:
    took = [outcome.took_s for outcome in outcomes if outcome.took_s is not None]
    time_text = f"{statistics.median(took):5.1f} s, at most {max(took):.1f}" if took else ""
    num_right = sum(outcome.is_right for outcome in outcomes)
    in_vain = [f"{cause} {list(culprits)}" for outcome in outcomes for cause, culprits in outcome.in_vain]
    print(f"{num_right}/{len(outcomes)}  {outcomes[0].name:44} {time_text:24} {'; '.join(in_vain)}", flush=True)  # noqa: T201 - what the command is for


def _print_figures(outcomes: list[Outcome]) -> None:
    faults = [outcome for outcome in outcomes if outcome.is_fault]
    named = sum(outcome.took_s is not None for outcome in faults)
    in_vain = sum(len(outcome.in_vain) for outcome in outcomes)
    healthy = [outcome for outcome in outcomes if not outcome.is_fault]
    print(  # noqa: T201 - as above
        f"n = {len(outcomes)}: {len(faults)} faults, {named} named (recall {named / len(faults):.3f}); "
        f"{named + in_vain} verdicts, {in_vain} in vain (precision {named / max(1, named + in_vain):.3f}); "
        f"{len(healthy)} healthy lives, {sum(outcome.is_right for outcome in healthy)} silent"
    )


if __name__ == "__main__":
    main()
