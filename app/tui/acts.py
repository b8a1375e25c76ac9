"""What a person does to the job from the console: asked first, done beside the frames, told in a notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.deeds import Deed
from app.errors import AppError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from app.tui.console import Console
    from app.tui.control_dialog import Wish
    from app.tui.source import Control


async def ask_for_fault(console: Console, selected: int) -> None:
    """Ask which fault to inject, and inject it; `selected` is the rank that is looked at."""
    from app.tui.dialogs import FaultScreen, why_no_fault  # noqa: PLC0415 - the first frame does not pay for it

    stage = console.stage
    view = stage.newest
    why_not = why_no_fault(view, can_inject=stage.source.can_inject)
    if view is None or why_not:
        console.say(why_not, "warning")
        return
    fault = await console.push_screen_wait(FaultScreen(stage, view, selected))
    if fault is not None:
        await _do(console, stage.source.inject(fault))


async def ask_for_control(console: Console) -> None:
    """Ask what to do to the job as a whole, and do it."""
    from app.tui.control_dialog import ControlScreen  # noqa: PLC0415 - the first frame does not pay for it

    stage = console.stage
    view, control = stage.newest, stage.source.control
    job = view.job() if view is not None else None
    if control is None:
        console.say("This console only looks on: nothing can be done to the job from here.", "warning")
    elif view is None or job is None:
        console.say("There is no job yet to act on.", "warning")
    else:
        wish = await console.push_screen_wait(ControlScreen(stage, view, job))
        if wish is not None:
            await _do(console, _fulfil(control, job.job_id, wish))


def _fulfil(control: Control, job_id: str, wish: Wish) -> Awaitable[str]:
    match wish.deed:
        case Deed.STOP | Deed.STOP_NOW:
            return control.stop(job_id, is_agreed=wish.deed is Deed.STOP)
        case Deed.KILL:
            return control.kill(job_id)
        case Deed.RESTART | Deed.RESTART_NOW:
            return control.restart(job_id, wish.num_ranks, is_at_once=wish.deed is Deed.RESTART_NOW)


async def _do(console: Console, doing: Awaitable[str]) -> None:
    try:
        said = await doing
    except AppError as error:
        console.say(f"{error}" + (f" ({error.hint})" if error.hint else ""), "error", "Not done")
    else:
        console.stage.take_notices([said])
        console.say(said)
