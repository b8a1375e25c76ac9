"""Pictures of every view: `python tests/tui/shots.py OUTDIR [80x24 ...]`, or `--readme` for README's.

SVG, exported by Textual from the console: on a simulated cluster, of which the same run gives the same picture; of
README from two real runs of the demo.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from app.diagnosis.causes import Cause  # noqa: E402 - after the path is set
from app.session.demo import CONSOLE_STEPS, DEFAULT_RANKS, Demo, DemoOptions  # noqa: E402
from app.tui.actions import VIEW_NAMES  # noqa: E402
from app.tui.console import Console  # noqa: E402
from app.tui.theme import Look  # noqa: E402
from ddpcore.wire import Fault, FaultKind  # noqa: E402
from tests.support.consoles import Desk, TalkingSource, desk, never_reached_source  # noqa: E402
from tests.support.sim import SimCluster  # noqa: E402
from tests.support.waiting import until_async  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PICTURES = ROOT / "app" / "tui" / "pictures"
SIZES = ("80x24", "120x35", "200x50")
TRAINING_S = 30.0
FROZEN_S = 6.0
LOST_S = 14.0
FREEZE_STEP = 400
SLOW_STEP = 60
SLOW_FACTOR = 3.0
LONG_S = 300.0
"""More than a training needs to come to its fault, and its verdict."""


def picture(console: Desk) -> str:
    """Return the screen as SVG: no font of another machine, and no clip path around every text."""
    svg = console.console.export_screenshot(title="rankdeck", simplify=True)
    svg = re.sub(r"@font-face \{[^}]*\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<clipPath id="[^"]*-line-\d+">.*?</clipPath>\s*', "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="url\(#[^"]*-line-\d+\)"', "", svg)
    return svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")


async def take(out: Path, size: tuple[int, int], look: Look, name: str) -> None:
    """Take every view of a starting, a healthy and a frozen training, the dialogs and the help."""
    source = TalkingSource(SimCluster())
    source.notice("agents demo-0 and demo-1 are up")
    source.notice("torchrun started on 2 nodes; importing torch takes some seconds")
    async with desk(source, size, look) as console:
        await console.play(source, 2)
        (out / f"{name}-starting.svg").write_text(picture(console))
        await console.play(source, TRAINING_S)
        await take_views(console, out, f"{name}-healthy")
        source.sim.freeze(2)
        await console.play(source, FROZEN_S)
        await take_views(console, out, f"{name}-frozen")
        for key, dialog in (("question_mark", "help"), ("F", "fault"), ("ctrl+p", "palette")):
            await console.press(key)
            (out / f"{name}-{dialog}.svg").write_text(picture(console))
            await console.press("escape")
        await take_what_is_chosen(console, out, name)


async def take_ends(out: Path, size: tuple[int, int], look: Look, name: str) -> None:
    """Take every view of a training that has lost a node, and of one that ran out of memory."""
    for harm, what in ((lose_a_node, "lost"), (run_out_of_memory, "oom")):
        source = TalkingSource(SimCluster(num_nodes=4, ranks_per_node=4))
        async with desk(source, size, look) as console:
            await console.play(source, TRAINING_S)
            harm(source.sim)
            await console.play(source, LOST_S)
            await take_views(console, out, f"{name}-{what}")


async def take_away(out: Path, size: tuple[int, int], look: Look, name: str) -> None:
    """Take every view of a cluster of which a host has never been reached."""
    source = never_reached_source()
    async with desk(source, size, look) as console:
        await console.play(source, LOST_S)
        await take_views(console, out, f"{name}-away")


def lose_a_node(sim: SimCluster) -> None:
    """Let nothing more be heard of a node, and nobody reach its ranks."""
    sim.lose_node(2)


def run_out_of_memory(sim: SimCluster) -> None:
    """Let the kernel kill a rank for memory."""
    sim.kill_for_memory(5)


async def take_views(console: Desk, out: Path, name: str) -> None:
    """Take every view."""
    for number, view in enumerate(VIEW_NAMES, start=1):
        await console.press(str(number))
        (out / f"{name}-{number}-{view}.svg").write_text(picture(console))
    await console.press("1")


async def take_what_is_chosen(console: Desk, out: Path, name: str) -> None:
    """Take filters, the page of a rank, the grid and a picture that stands still."""
    for keys, what in (
        (("2", "slash", *"state=wai nod=x"), "filter"),
        (("escape", "p", "o"), "problems"),
        (("escape", "v"), "grid"),
        (("v", "o", "o", "o", "o", "enter"), "rank"),
        (("6", "slash", *"loss rank=0-1", "enter"), "found"),
        (("escape", "1", "f"), "standing"),
    ):
        await console.press(*({" ": "space", "=": "equals_sign", "-": "minus"}.get(key, key) for key in keys))
        (out / f"{name}-{what}.svg").write_text(picture(console))


async def take_for_readme(out: Path = PICTURES) -> None:
    """Take the pictures that README shows, from two real trainings on this machine."""
    async with demo(Fault(FaultKind.FREEZE, 2, at_step=FREEZE_STEP)) as console:
        await until_async(lambda: (waited_s(console, Cause.FROZEN) or 0) > FROZEN_S, LONG_S, "a frozen rank")
        (out / "overview.svg").write_text(picture(console))
        await console.show("charts")
        (out / "charts.svg").write_text(picture(console))
    async with demo(Fault(FaultKind.SLOW, 6, at_step=SLOW_STEP, factor=SLOW_FACTOR), num_ranks=8) as console:
        await console.show("stragglers")
        await until_async(lambda: waited_s(console, Cause.STRAGGLER) is not None, LONG_S, "a slow rank")
        await console.settle()
        (out / "stragglers.svg").write_text(picture(console))


@asynccontextmanager
async def demo(fault: Fault, num_ranks: int = DEFAULT_RANKS) -> AsyncIterator[Desk]:
    """Open the console on a real run of the demo."""
    session = Demo(DemoOptions(num_ranks, CONSOLE_STEPS, fault))
    console = Console(session)
    try:
        async with console.run_test(size=(120, 35), notifications=True) as pilot:
            await session.start()
            yield Desk(console, pilot)
    finally:
        await session.close()


def waited_s(console: Desk, cause: Cause) -> float | None:
    """Return for how long ranks have waited by a verdict that the console shows; None where it shows none."""
    view = console.console.ui.view
    return next((row.waited_s for row in view.verdicts() if row.cause is cause), None) if view is not None else None


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    if arguments == ["--readme"]:
        asyncio.run(take_for_readme())
        return
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    for size in arguments[1:] or SIZES:
        width, height = (int(part) for part in size.split("x"))
        asyncio.run(take(out, (width, height), Look(), size))
        asyncio.run(take_ends(out, (width, height), Look(), size))
        asyncio.run(take_away(out, (width, height), Look(), size))
        if size == SIZES[0]:
            asyncio.run(take(out, (width, height), Look(has_colour=False, is_ascii=True), f"{size}-plain"))


if __name__ == "__main__":
    main(sys.argv[1:])
