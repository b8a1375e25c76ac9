"""What a person does to the job from the console: asked first, done beside the frames, told in a notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import AppError
from app.inventory.program import Again
from app.view.actions import Deed
from app.view.summary import ENDED

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from app.inventory.program import Program
    from app.tui.dialogs.control import Wish
    from app.tui.personal_app import PersonalApp
    from app.tui.source import Control


async def ask_for_fault(console: PersonalApp, selected: int) -> None:
    """Ask which fault to inject, and inject it; `selected` is the rank that is looked at."""
    from app.tui.dialogs.confirm import FaultScreen, why_no_fault  # noqa: PLC0415 - the first frame does not pay for it

    stage = console.stage
    view = stage.newest
    why_not = why_no_fault(view, can_inject=stage.source.can_inject)
    if view is None or why_not:
        console.say(why_not, "warning")
        return
    fault = await console.push_screen_wait(FaultScreen(stage, view, selected))
    if fault is not None:
        await _do(console, stage.source.inject(fault))


async def ask_for_control(console: PersonalApp) -> None:
    """Ask what to do to the job as a whole, and do it."""
    from app.tui.dialogs.control import ANOTHER, ControlScreen, Wish  # noqa: PLC0415 - the first frame does not pay

    stage = console.stage
    view, control = stage.newest, stage.source.control
    job = view.job() if view is not None else None
    if control is None:
        console.say("This console only looks on: nothing can be done to the job from here.", "warning")
    elif view is None or job is None:
        if view is not None and stage.source.starter is not None:
            await ask_for_program(console)
        else:
            console.say("There is no job yet to act on.", "warning")
    else:
        wish = await console.push_screen_wait(ControlScreen(stage, view, job))
        if wish == ANOTHER:
            await ask_for_program(console)
        elif isinstance(wish, Wish):
            without = wish.without if wish.deed is Deed.RESTART_WITHOUT else ()
            again = Again(job.job_id, wish.num_ranks, without)
            if not wish.looks_first or await _is_fit(console, again, "Restart it"):
                await _do(console, _fulfil(control, job.job_id, wish))


async def ask_for_program(console: PersonalApp) -> None:
    """Ask which program to start, and start it; not beside a job that runs."""
    from app.tui.dialogs.program_form import ProgramScreen  # noqa: PLC0415 - the first frame does not pay for it

    stage = console.stage
    starter, view = stage.source.starter, stage.newest
    job = view.job() if view is not None else None
    if starter is None:
        console.say("No program can be started from this console.", "warning")
    elif job is not None and job.state not in ENDED:
        by_key = f" ({key})" if (key := stage.keymap.first("control")) else ""
        told = f"Job {job.job_id} runs on {starter.where}: end it first{by_key}, then start another one."
        console.say(told, "warning")
    else:
        try:
            past = await starter.past()
        except AppError as error:
            _say_not_done(console, error)
            return
        asks_look = stage.source.doctor is not None and len(starter.hosts) > 1
        screen = ProgramScreen(stage.look, starter.where, starter.hosts, past, asks_look=asks_look)
        program = await console.push_screen_wait(screen)
        if program is not None and (not screen.looks_first or await _is_fit(console, program, "Start it")):
            await _do(console, starter.start(program))


async def _is_fit(console: PersonalApp, job: Program | Again, deed: str) -> bool:
    """Look at the hosts; return whether they are fit for a job, or a person wants it all the same."""
    from app.tui.dialogs.doctor import DoctorScreen  # noqa: PLC0415 - as above

    doctor = console.stage.source.doctor
    if doctor is None:
        return True
    is_wanted: bool = await console.push_screen_wait(DoctorScreen(console.stage, doctor, job, deed))
    return is_wanted


def _fulfil(control: Control, job_id: str, wish: Wish) -> Awaitable[str]:
    match wish.deed:
        case Deed.STOP | Deed.STOP_NOW:
            return control.stop(job_id, is_agreed=wish.deed is Deed.STOP)
        case Deed.KILL:
            return control.kill(job_id)
        case Deed.RESTART | Deed.RESTART_NOW:
            return control.restart(job_id, wish.num_ranks, is_at_once=wish.deed is Deed.RESTART_NOW)
        case Deed.RESTART_WITHOUT:
            return control.restart(job_id, is_at_once=True, without=wish.without)


async def _do(console: PersonalApp, doing: Awaitable[str]) -> None:
    try:
        said = await doing
    except AppError as error:
        _say_not_done(console, error)
    else:
        console.stage.take_notices([said])
        console.say(said)


def _say_not_done(console: PersonalApp, error: AppError) -> None:
    console.say(error.whole, "error", "Not done")
