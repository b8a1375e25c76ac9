"""The user's actions on the job: each is confirmed first, runs beside the frames, and is reported in a notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import AppError, UsageError
from app.inventory.program import Again
from app.view.actions import JobAction, busy_text
from app.view.summary import ENDED

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from app.inventory.program import Program
    from app.tui.dialogs.control import Wish
    from app.tui.personal_app import PersonalApp
    from app.tui.source import ConsoleSource, Control, Outside
    from app.view.rows import JobRow, RankRow
    from ddpcore.wire import Fault


async def ask_for_fault(console: PersonalApp, selected: int) -> None:
    """Ask which fault to inject, and inject it; `selected` is the selected rank."""
    from app.tui.dialogs.confirm import FaultScreen, why_no_fault  # noqa: PLC0415 - the first frame does not pay for it

    ui = console.ui
    view = ui.latest_view
    why_not = why_no_fault(view, can_inject=ui.source.can_inject)
    if view is None or why_not:
        console.show_notice(why_not, "warning")
        return
    job, source = view.job(), ui.source
    chosen = await console.push_screen_wait(FaultScreen(ui, view, selected))
    if chosen is not None:
        await _do(console, _inject(source, chosen[0], (job, chosen[1])))


async def _inject(source: ConsoleSource, fault: Fault, asked: tuple[JobRow | None, RankRow]) -> str:
    """Inject a fault into a rank, unless it is no longer the process that the user was asked about.

    Raises:
        AppError: It was refused or failed.
    """
    view = source.view()
    rows = view.ranks([fault.rank])
    if not rows or _process(view.job(), rows[0]) != _process(*asked):
        raise UsageError(f"rank {fault.rank} is no longer the process that you were asked about", "ask again")
    return await source.inject(fault)


def _process(job: JobRow | None, row: RankRow) -> tuple[str, int | None, str, int | None]:
    return job.job_id if job else "", job.attempt if job else None, row.node, row.pid


async def ask_for_control(console: PersonalApp) -> None:
    """Ask what to do to the job as a whole, and do it."""
    from app.tui.dialogs.control import ANOTHER, ControlScreen, Wish  # noqa: PLC0415 - the first frame does not pay

    ui = console.ui
    view, control = ui.latest_view, ui.source.control
    job = view.job() if view is not None else None
    if ui.source.outside is not None and ui.source.outside.is_shown:
        await _ask_for_signal(console, ui.source.outside)
        return
    if control is None:
        console.show_notice("This console only watches: nothing can be done to the job from here.", "warning")
    elif view is None or job is None:
        if view is not None and ui.source.starter is not None:
            await ask_for_program(console)
        else:
            console.show_notice("There is no job yet to act on.", "warning")
    elif job.is_adopted and job.state in ENDED:
        console.show_notice(f"Job {job.job_id} has ended. It is started again the way it was started.", "warning")
    else:
        wish = await console.push_screen_wait(ControlScreen(ui, view, job))
        if wish == ANOTHER:
            await ask_for_program(console)
        elif isinstance(wish, Wish):
            without = wish.without if wish.action is JobAction.RESTART_WITHOUT else ()
            again = Again(job.job_id, wish.num_ranks, without)
            if not wish.looks_first or await _is_fit(console, again, "Restart it"):
                await _do(console, _fulfil(control, job.job_id, wish), ends_job=not wish.action.restarts)


async def _ask_for_signal(console: PersonalApp, outside: Outside) -> None:
    """Ask which signal to send to the ranks of a job that rankdeck did not start, and send it."""
    from app.tui.dialogs.signals import SignalScreen  # noqa: PLC0415 - as above

    targets = outside.targets()
    if not outside.can_signal:
        console.show_notice("This console only watches: nothing can be done to the job from here.", "warning")
    elif not targets:
        console.show_notice("No rank of such a job runs.", "warning")
    elif (chosen := await console.push_screen_wait(SignalScreen(console.ui, targets))) is not None:
        await _do(console, outside.send(*chosen))


async def ask_for_program(console: PersonalApp) -> None:
    """Ask which program to start, and start it; refused while a job runs."""
    from app.tui.dialogs.program_form import ProgramScreen  # noqa: PLC0415 - the first frame does not pay for it

    ui = console.ui
    starter, view = ui.source.starter, ui.latest_view
    job = view.job() if view is not None else None
    if starter is None:
        console.show_notice("No program can be started from this console.", "warning")
    elif view is not None and (busy := busy_text(view, starter.where)):
        is_shown = job is not None and job.state not in ENDED
        by_key = f" ({key})" if is_shown and (key := ui.keymap.first("control")) else ""
        console.show_notice(f"{busy}: end it first{by_key}, then start another one.", "warning")
    else:
        try:
            past = await starter.past()
        except AppError as error:
            _show_not_done(console, error)
            return
        asks_look = ui.source.doctor is not None and len(starter.hosts) > 1
        screen = ProgramScreen(ui.look, starter.where, starter.hosts, past, asks_look=asks_look)
        program = await console.push_screen_wait(screen)
        if program is not None and (not screen.looks_first or await _is_fit(console, program, "Start it")):
            await _do(console, starter.start(program))


async def _is_fit(console: PersonalApp, job: Program | Again, action: str) -> bool:
    """Check the hosts; return whether they are fit for a job, or the user goes on anyway."""
    from app.tui.dialogs.doctor import DoctorScreen  # noqa: PLC0415 - as above

    doctor = console.ui.source.doctor
    if doctor is None:
        return True
    is_wanted: bool = await console.push_screen_wait(DoctorScreen(console.ui, doctor, job, action))
    return is_wanted


def _fulfil(control: Control, job_id: str, wish: Wish) -> Awaitable[str]:
    match wish.action:
        case JobAction.STOP | JobAction.STOP_NOW:
            return control.stop(job_id, is_agreed=wish.action is JobAction.STOP)
        case JobAction.KILL:
            return control.kill(job_id)
        case JobAction.RESTART | JobAction.RESTART_NOW:
            return control.restart(job_id, wish.num_ranks, is_immediate=wish.action is JobAction.RESTART_NOW)
        case JobAction.RESTART_WITHOUT:
            return control.restart(job_id, is_immediate=True, without=wish.without)


async def _do(console: PersonalApp, doing: Awaitable[str], *, ends_job: bool = False) -> None:
    """Report what was done; how a job ends the header shows, and a notice about it goes once it does."""
    try:
        outcome = await doing
    except AppError as error:
        _show_not_done(console, error)
        return
    if ends_job:
        console.show_until_ended(outcome)
    else:
        console.ui.take_notices([outcome])
        console.show_notice(outcome)


def _show_not_done(console: PersonalApp, error: AppError) -> None:
    console.show_notice(f"Not done: {error.whole}", "error")
